"""Ctrl-C at some of the places that ``python -m tests.interrupts`` tries, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable


def test_all_go_on(mpirun: Callable) -> None:
    names = "call", "cached", "list", "norm", "expression", "record", "replay", "recover"
    output = mpirun("tests.interrupts", 2, "--every", 60, *names).stdout
    assert output.count(" places, ") == len(names), output


def test_recordings_that_are_registered(mpirun: Callable) -> None:
    output = mpirun("tests.interrupts", 2, "--algorithm", "direct", "--every", 80, "record", "capture").stdout
    assert output.count(" lost, right") == 2, output


def test_memory_that_is_given_back(mpirun: Callable) -> None:
    output = mpirun("tests.interrupts", 2, "--every", 60, "suspend", "resume").stdout
    assert output.count(" places, ") == 2, output


def test_the_end_of_a_graph(mpirun: Callable) -> None:
    assert " places, right" in mpirun("tests.interrupts", 2, "--every", 6, "ending").stdout


def test_close_goes_on_where_it_was_interrupted(mpirun: Callable) -> None:
    assert " places, right" in mpirun("tests.interrupts", 2, "--every", 12, "closing").stdout
