"""The simulated device itself."""

from __future__ import annotations

from collections.abc import Callable


def test_it_behaves_as_cuda_does(mpirun: Callable) -> None:
    assert mpirun("tests/sim/device_worker.py", 2).stdout.count("done") == 2
