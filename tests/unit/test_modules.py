"""Kernels that several communicators use are loaded once, and unloaded with the last of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from ipcreduce.cuda.expressions import Expression
from ipcreduce.device import kernels
from ipcreduce.device.kernels import Kernel, Kernels
from ipcreduce.errors import CudaError

KEY, OTHER = (1, "whole packets", "float32"), (1, "split packets", "float32")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Driver:
        def __init__(self) -> None:
            self.loaded: list[int] = []
            self.made, self.fails = 0, False

        def load_module(self, cubin: bytes) -> int:
            self.made += 1
            self.loaded.append(self.made)
            return self.made

        def get_function(self, module: int, name: str) -> int:
            assert name == "one_shot"
            if self.fails:
                raise CudaError("cuModuleGetFunction", 500, "not found")
            return module * 100

        def close_module(self, module: int) -> None:
            self.loaded.remove(module)

    driver = Driver()
    monkeypatch.setattr(kernels, "driver", driver)
    monkeypatch.setattr(kernels, "_loaded", {})
    return driver


def test_one_module_for_all_that_are_alike(driver: Any):
    assert kernels.take(KEY, "one_shot") is None
    assert (
        kernels.take(KEY, "one_shot", b"") == kernels.take(KEY, "one_shot", b"") == kernels.take(KEY, "one_shot") == 100
    )
    assert kernels.take(OTHER, "one_shot", b"") == 200
    assert driver.loaded == [1, 2]
    for left in ([1, 2], [1, 2], [2]):
        kernels.release(KEY)
        assert driver.loaded == left
    assert kernels.take(KEY, "one_shot") is None
    kernels.release(OTHER)
    assert driver.loaded == []


def test_what_fails_leaves_nothing(driver: Any):
    driver.fails = True
    with pytest.raises(CudaError, match="cuModuleGetFunction"):
        kernels.take(KEY, "one_shot", b"")
    assert driver.loaded == []
    driver.fails = False
    assert kernels.take(KEY, "one_shot", b"") == 200


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been compiled: the macros, and the expression."""
    found: list[Any] = []

    def compile_kernel(name: str, macros: dict[str, str], capability: Any, expression: Any) -> bytes:
        found.append((frozenset(macros.items()), expression))
        return b""

    monkeypatch.setattr(kernels.compiler, "compile_kernel", compile_kernel)
    monkeypatch.setattr(kernels, "using_relaxed", lambda context: nullcontext())
    return found


def kernels_of(context: int = 1, ranks: int = 2, rank: int = 0, whole_packets: bool = True) -> Kernels:
    made = Kernels(context, (9, 0), lambda: None, ranks, rank)
    made.whole_packets = whole_packets
    return made


def test_each_kernel_is_compiled_and_loaded_for_itself(driver: Any, compiled: list[Any]):
    wanted = [
        Kernel("one_shot", "float32"), Kernel("one_shot", "int32"), Kernel("one_shot", "float32", "max"),
        Kernel("one_shot", "float32", depth=2), Kernel("one_shot", "float32", parts=162),
        Kernel("one_shot", "float32", expression=Expression("v", ())),
        Kernel("one_shot", "float32", expression=Expression("v + 1", ())), Kernel("one_shot", "float32", scale=0),
        Kernel("one_shot", "float32", scale=1), Kernel("one_shot", "float32", scale=0, cluster=2),
    ]  # fmt: skip
    one = kernels_of()
    one.load(wanted)
    assert len({one.function(kernel) for kernel in wanted}) == len({*compiled}) == len(compiled) == len(wanted)


def test_communicators_share_the_kernels_that_are_alike(driver: Any, compiled: list[Any]):
    """Those of other ranks, or for packets that do not arrive whole, only if they exchange nothing."""
    every = [kernels_of(), kernels_of(), kernels_of(rank=1), kernels_of(ranks=3), kernels_of(whole_packets=False)]
    found = [one.function(Kernel("one_shot", "float32")) for one in every]
    assert found[0] == found[1]
    assert len({*found}) == len({*compiled}) == len(compiled) == len(every) - 1
    alone = Kernel("one_shot", "float32", alone=True)
    assert len({one.function(alone) for one in every}) == 1
    assert kernels_of(context=2).function(alone) != every[0].function(alone)
    for one in every:
        for release in one.release_actions():
            release()
    assert len(driver.loaded) == 1, "the other context's"
