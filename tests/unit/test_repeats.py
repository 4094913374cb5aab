"""How launches of repeated calls that fail are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce import surroundings
from ipcreduce.errors import CaptureError, CudaError
from ipcreduce.ipc import repeats

OURS, OTHER = 5, 6


class Failed(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> repeats.Repeats:
    runtime = SimpleNamespace(CUDARuntimeError=Failed)
    monkeypatch.setattr(surroundings, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(repeats, "using", lambda context: nullcontext())
    monkeypatch.setattr(repeats.driver, "current_context", lambda: OTHER)
    page: Any = SimpleNamespace(abort_word=[0], recorder=SimpleNamespace(enter=None))
    return repeats.Repeats(0, OURS, SimpleNamespace(find=None), None, page)  # type: ignore[arg-type]


def start(*outcomes: Exception | None) -> Any:
    """A launch that ends so, each time it is tried."""
    left: Iterator[Exception | None] = iter(outcomes)

    def launch(stream: int) -> None:
        assert stream == 9
        outcome = next(left)
        if outcome is not None:
            raise outcome

    return launch


def test_another_context_is_no_failure(calls: repeats.Repeats):
    for first in (Failed(400), Failed(201), CudaError("cuLaunchKernelEx", 201, "")):
        calls.start_anyway(start(None), 9, first)


@pytest.mark.parametrize(
    ("first", "again", "kind", "text"),
    [
        (Failed(700), None, CudaError, r"cudaGraphLaunch failed: status 700 \(700\)"),
        (Failed(900), None, CaptureError, "part of another"),
        (CudaError("cuLaunchKernelEx", 700, "why"), None, CudaError, "cuLaunchKernelEx failed: why"),
        (Failed(400), Failed(719), CudaError, "cudaGraphLaunch failed: status 719"),
        (Failed(400), Failed(900), CaptureError, "part of another"),
        (ValueError("something else"), None, ValueError, "something else"),
        (RuntimeError("of somebody"), None, RuntimeError, "of somebody"),
    ],
)
def test_a_failure_has_its_name(
    calls: repeats.Repeats, first: Exception, again: Exception | None, kind: type[Exception], text: str
):
    """CuPy's errors are none of ours; and the second attempt's are told as the first one's."""
    with pytest.raises(kind, match=text):
        calls.start_anyway(start(again), 9, first)


def test_in_our_context_the_first_failure_counts(calls: repeats.Repeats, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeats.driver, "current_context", lambda: OURS)
    with pytest.raises(CudaError, match="status 400"):
        calls.start_anyway(start(None), 9, Failed(400))
