"""How launches of repeated calls that fail are told."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.cuda import cupy_runtime
from ipcreduce.device import fast_path
from ipcreduce.device.launch_cache import LaunchCache
from ipcreduce.errors import CaptureError, CudaError

OURS, OTHER = 5, 6


class Failed(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> fast_path.FastPath:
    runtime = SimpleNamespace(CUDARuntimeError=Failed)
    monkeypatch.setattr(cupy_runtime, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(fast_path, "using", lambda context: nullcontext())
    monkeypatch.setattr(fast_path.driver, "current_context", lambda: OTHER)
    words = SimpleNamespace(recorded=[], number=[0], slots=[], agreed={})
    page: Any = SimpleNamespace(abort_word=[0], calls=words, rank=0, n=2)
    unused: Any = None
    return fast_path.FastPath(unused, 0, OURS, unused, page, LaunchCache(0, unused, unused))


def attempt(calls: fast_path.FastPath, monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | None) -> None:
    """A graph's launch that ends so, each time it is tried."""
    left = iter(outcomes)

    def launch_graph(handle: int, stream: int) -> None:
        assert (handle, stream) == (7, 9)
        outcome = next(left)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(cupy_runtime, "launch_graph", launch_graph)
    start = partial(cupy_runtime.launch, SimpleNamespace(handle=7))
    try:
        start(9)
    except CudaError as error:
        calls._launch_anyway(start, 9, error)
    assert next(left, "all") == "all"


def test_another_context_is_no_failure(calls: fast_path.FastPath, monkeypatch: pytest.MonkeyPatch):
    for code in (201, 400, 709):
        attempt(calls, monkeypatch, Failed(code), None)


@pytest.mark.parametrize(
    ("outcomes", "kind", "text"),
    [
        ([Failed(700)], CudaError, r"cudaGraphLaunch failed: status 700 \(700\)"),
        ([Failed(900)], CaptureError, "part of another"),
        ([Failed(400), Failed(719)], CudaError, "cudaGraphLaunch failed: status 719"),
        ([Failed(400), Failed(900)], CaptureError, "part of another"),
        ([RuntimeError("of somebody")], RuntimeError, "of somebody"),
        ([Failed(400), RuntimeError("of somebody")], RuntimeError, "of somebody"),
    ],
)
def test_a_failure_has_its_name(
    calls: fast_path.FastPath,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Exception],
    kind: type[Exception],
    text: str,
):
    """CuPy's errors are none of ours; and the second attempt's are told as the first one's."""
    with pytest.raises(kind, match=text):
        attempt(calls, monkeypatch, *outcomes)


def test_in_our_context_the_first_failure_counts(calls: fast_path.FastPath, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fast_path.driver, "current_context", lambda: OURS)
    with pytest.raises(CudaError, match="status 400"):
        attempt(calls, monkeypatch, Failed(400))
