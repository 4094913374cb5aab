"""The log of faults: each one once on each rank, at WARNING, with every rank's last call."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest

from ipcreduce.errors import ArgumentError, PeerFailedError, PeerLostError, PeerTimeoutError, RankMismatchError
from tests.tools import machine
from tests.unit.pages import in_threads
from tests.unit.test_calls import OTHER, Rank, make_ranks


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages since the last time; all of them at WARNING."""
    caplog.set_level(logging.DEBUG, "ipcreduce")

    def taken() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        caplog.clear()
        return found

    return taken


def raised(kind: type[Exception], rank: Rank, *calls) -> None:
    for call in calls:
        with pytest.raises(kind):
            call()


def test_a_refused_call_is_logged_once_by_each_rank(lines) -> None:
    first, second = ranks = make_ranks(2)
    in_threads([rank.call for rank in ranks])
    assert lines() == []
    first.refuse(ArgumentError("no such op"))
    (line,) = lines()
    assert line == (
        "ArgumentError: rank 0, call 2: no such op [last calls: rank 0: 1 (sum of float32 (10,)); "
        "rank 1: 1 (sum of float32 (10,))]"
    )
    raised(PeerFailedError, second, second.call)
    (line,) = lines()
    assert line.startswith("PeerFailedError: rank 1, call 2: ")
    assert "rank 0: 1 (" in line
    assert "rank 1: 1 (" in line
    in_threads([rank.call for rank in ranks])  # they meet: this is over
    assert lines() == []
    first.refuse(KeyError("x"))
    (line,) = lines()
    assert line.startswith("rank 0: KeyError: 'x' [last calls: ")


def test_a_fault_that_is_met_again_is_not_logged_again(lines) -> None:
    """synchronize() raises each time until the ranks have met."""
    first, _ = make_ranks(2)
    first.call()
    first.kernel_waits_in_vain(1)
    raised(PeerTimeoutError, first, *[first.calls.check_faults] * 3)
    (line,) = lines()
    assert line.startswith("PeerTimeoutError: rank 0, call 1: rank 1 did not call within 120 s")
    assert line.endswith("[last calls: rank 0: 1 (sum of float32 (10,)); rank 1: none]")


def test_a_loss_after_a_fault_is_logged_too(lines) -> None:
    first, second = make_ranks(2)
    first.refuse()
    assert len(lines()) == 1
    second.page.post_lost(1, "its process has ended")
    raised(PeerLostError, first, *[first.call] * 3)
    (line,) = lines()
    assert "PeerLostError: rank 0, call 2: rank 1 is gone" in line


def test_a_mismatch_is_logged_by_both(lines) -> None:
    first, second = make_ranks(2)
    first.call()
    raised(RankMismatchError, second, lambda: second.call(OTHER))
    (line,) = lines()
    assert "[last calls: rank 0: 1 (sum of float32 (10,)); rank 1: 1 (sum of int8 (3,))]" in line
    raised(RankMismatchError, first, first.calls.check_faults)
    assert len(lines()) == 1


def test_nothing_is_printed_by_default() -> None:
    """Python prints warnings of loggers without any handler."""
    program = "import ipcreduce, logging; logging.getLogger('ipcreduce').warning('a fault')"
    run = subprocess.run([sys.executable, "-c", program], env=machine.environment(), capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
