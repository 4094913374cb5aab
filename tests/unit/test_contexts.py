"""Contexts and capture modes that are current in a block: restored whatever interrupts it."""

from __future__ import annotations

from typing import Any

import pytest

from ipcreduce.cuda import contexts, driver
from ipcreduce.errors import CudaError

OURS, THEIRS = 1, 7


class Thread:
    """What is current in this thread; ``at``: the call of the driver's behind which an interrupt comes."""

    def __init__(self) -> None:
        self.context, self.mode = THEIRS, "global"
        self.calls, self.at = 0, 0

    def _called(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt

    def current(self) -> int:
        self._called()
        return self.context

    def set(self, context: int) -> None:
        self.context = context
        self._called()

    def relaxed(self) -> Any:
        thread = self

        class Relaxed:
            def __enter__(self) -> None:
                thread._called()
                thread.mode = "relaxed"

            def __exit__(self, *error: Any) -> None:
                thread.mode = "global"
                thread._called()

        return Relaxed()


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Thread:
    made = Thread()
    monkeypatch.setattr(driver, "current_context", made.current)
    monkeypatch.setattr(driver, "set_context", made.set)
    monkeypatch.setattr(driver, "relaxed", made.relaxed)
    return made


def test_both_are_current_in_the_block_only(thread: Thread):
    with contexts.using_relaxed(OURS):
        assert (thread.context, thread.mode) == (OURS, "relaxed")
    assert (thread.context, thread.mode) == (THEIRS, "global")
    with contexts.using(OURS):
        assert (thread.context, thread.mode) == (OURS, "global")
    assert thread.context == THEIRS


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_an_interrupt_leaves_the_threads_own(thread: Thread, at: int):
    thread.at = at
    with pytest.raises(KeyboardInterrupt), contexts.using_relaxed(OURS):
        pass
    assert thread.calls >= at
    assert (thread.context, thread.mode) == (THEIRS, "global")


def test_a_context_that_is_gone_is_let_be(thread: Thread, monkeypatch: pytest.MonkeyPatch):
    def fails(context: int) -> None:
        raise CudaError("cuCtxSetCurrent", 709, "gone")

    monkeypatch.setattr(driver, "set_context", fails)
    with contexts.using_relaxed(OURS):
        assert thread.mode == "relaxed"
    assert thread.mode == "global"
