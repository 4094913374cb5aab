"""Ctrl-C within a step that has to end first."""

from __future__ import annotations

import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce import interrupts
from ipcreduce.cuda import driver, streams
from ipcreduce.graphs.direct import driver_calls
from ipcreduce.graphs.direct.mappings import Mappings
from ipcreduce.interrupts import uninterrupted
from tests.interrupts.points import Points


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_step_ends_before_it_raises():
    done = []

    def act() -> None:
        with uninterrupted():
            interrupt()
            interrupt()
            done.append("first")
        done.append("behind")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert done == ["first"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_the_outermost_step_counts():
    done = []

    def act() -> None:
        with uninterrupted():
            with uninterrupted():
                interrupt()
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert done == ["outer"]


def test_an_error_of_the_step_and_an_interrupt():
    def act() -> None:
        with uninterrupted():
            interrupt()
            raise ValueError("of the step")

    with pytest.raises(KeyboardInterrupt) as caught:
        act()
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_is_the_programs():
    heard: list[Any] = []
    signal.signal(signal.SIGINT, lambda *given: heard.append(given))
    with uninterrupted():
        interrupt()
        assert not heard
    [(number, frame)] = heard
    assert number == signal.SIGINT
    assert frame is not None


@pytest.mark.parametrize("how", [signal.SIG_IGN, signal.SIG_DFL])
def test_without_a_handler_of_python_nothing_changes(how: signal.Handlers):
    signal.signal(signal.SIGINT, how)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is how
    assert signal.getsignal(signal.SIGINT) is how


def test_another_thread_leaves_the_handler_alone():
    found: list[Any] = []

    def step() -> None:
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_another_signal_at_its_beginning(monkeypatch: pytest.MonkeyPatch):
    """Its handler may raise behind the line that has replaced the handler of Ctrl-C."""
    replace = interrupts.signal.signal

    def terminated(number: int, handler: Any) -> Any:
        before = replace(number, handler)
        if handler is not signal.default_int_handler:
            raise SystemExit
        return before

    monkeypatch.setattr(interrupts.signal, "signal", terminated)
    with pytest.raises(SystemExit), uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_signal_at_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch):
    """Its handler may raise before Ctrl-C's is in its place again."""
    replace, fired = interrupts.signal.signal, []

    def terminated(number: int, handler: Any) -> Any:
        if handler is signal.default_int_handler and not fired:
            fired.append(number)
            raise SystemExit
        return replace(number, handler)

    monkeypatch.setattr(interrupts.signal, "signal", terminated)
    with pytest.raises(SystemExit), uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="sys.settrace shows the opcodes of other frames there")
def test_a_wait_of_streams_leaves_no_event(monkeypatch: pytest.MonkeyPatch):
    """At whatever place it is interrupted. The stand-ins for the driver are C functions, as the bindings' are."""

    def trial(points: Points) -> Points:
        made, freed, done = iter([(0, 7)]), iter([(0,)]), struct.Struct(">3h").pack  # results begin with 0: success
        monkeypatch.setattr(driver, "_bindings", SimpleNamespace(
            cuEventCreate=partial(next, made), cuEventRecord=partial(done, 0), cuStreamWaitEvent=done,
            cuEventDestroy=partial(next, freed),
        ))  # fmt: skip
        with suppress(KeyboardInterrupt):
            points.run(partial(streams.let_wait, 1, 2))
        assert freed.__length_hint__() == made.__length_hint__()
        return points

    places = trial(Points()).seen
    for key in places:
        assert trial(Points(key)).fired


def test_a_slab_that_is_mapped_is_known(monkeypatch):
    """Else nothing would ever unmap it."""
    monkeypatch.setattr(driver, "open_memory", lambda handle: interrupt() or int(handle))
    monkeypatch.setattr(driver_calls, "allocation_bytes", lambda address: 100)
    mappings = Mappings()
    with pytest.raises(KeyboardInterrupt):
        mappings.open((1, 0), b"4096", 100)
    assert mappings.address((1, 0)) == 4096


def test_slabs_are_unmapped_behind_a_block_in_which_an_interrupt_comes(monkeypatch):
    def trial(points: Points) -> Points:
        closed = []
        monkeypatch.setattr(driver, "close_memory", closed.append)
        mappings = Mappings()
        mappings.open((1, 0), b"4096", 100)

        def held() -> None:
            with mappings.holding():
                pass

        with suppress(KeyboardInterrupt):
            points.run(held)
        mappings.unmap_all()
        assert closed == [4096], points.fired
        return points

    monkeypatch.setattr(driver, "open_memory", int)
    monkeypatch.setattr(driver_calls, "allocation_bytes", lambda address: 100)
    places = trial(Points()).seen
    assert places
    for key in places:
        assert trial(Points(key)).fired


def test_every_slab_is_unmapped(monkeypatch):
    closed = []
    monkeypatch.setattr(driver, "open_memory", int)
    monkeypatch.setattr(driver, "close_memory", lambda address: interrupt() or closed.append(address))
    monkeypatch.setattr(driver_calls, "allocation_bytes", lambda address: 100)
    mappings = Mappings()
    for number in range(2):
        mappings.open((1, number), b"%d" % (4096 * number), 100)
    with pytest.raises(KeyboardInterrupt):
        mappings.unmap_all()
    assert closed == [0, 4096]
