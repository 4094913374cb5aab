"""Kernels that several communicators use are loaded once, and unloaded with the last of them."""

from __future__ import annotations

from typing import Any

import pytest

from ipcreduce.device import kernels
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
