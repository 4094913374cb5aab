"""Kernels that several communicators use are loaded once, and unloaded with the last of them."""

from __future__ import annotations

from typing import Any

import pytest

from ipcreduce.device import modules
from ipcreduce.errors import CudaError

KEY, OTHER = (1, 2, 0, True, "float32", "sum", 1, "one_shot"), (1, 2, 0, False, "float32", "sum", 1, "one_shot")


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
    monkeypatch.setattr(modules, "driver", driver)
    monkeypatch.setattr(modules, "_loaded", {})
    return driver


def test_one_module_for_all_that_are_alike(driver: Any):
    assert modules.take(KEY) is None
    assert modules.take(KEY, b"") == modules.take(KEY, b"") == modules.take(KEY) == 100
    assert modules.take(OTHER, b"") == 200
    assert driver.loaded == [1, 2]
    for left in ([1, 2], [1, 2], [2]):
        modules.release(KEY)
        assert driver.loaded == left
    assert modules.take(KEY) is None
    modules.release(OTHER)
    assert driver.loaded == []


def test_what_fails_leaves_nothing(driver: Any):
    driver.fails = True
    with pytest.raises(CudaError, match="cuModuleGetFunction"):
        modules.take(KEY, b"")
    assert driver.loaded == []
    driver.fails = False
    assert modules.take(KEY, b"") == 200
