"""Ctrl-C at some of the places that ``python -m tests.interrupts --host`` tries, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable


def test_all_go_on(mpirun: Callable):
    output = mpirun("tests.interrupts", 2, "--host", "--every", 25).stdout
    assert output.count(" places, ") == 12, output
    assert "WRONG" not in output


def test_the_end_of_start_up(mpirun: Callable):
    """The last places, at which the other ranks may have the communicator that this one has not."""
    output = mpirun("tests.interrupts", 2, "--host", "--from", -24, "starting").stdout
    assert "starting: 24 of " in output, output
    assert "right" in output


def test_close_goes_on_where_it_was_interrupted(mpirun: Callable):
    output = mpirun("tests.interrupts", 2, "--host", "--every", 6, "closing").stdout
    assert "closing: " in output, output
    assert "right" in output
