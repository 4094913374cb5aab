"""The servers' sleep, in stand-ins of their classes."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest

from ipcreduce.errors import PeerLostError, UnsupportedError
from ipcreduce.serving import sleep

VLLM, SGLANG, OLDER_SGLANG = (place for place, _, _ in sleep._PLACES)


class Reducer:
    def __init__(self, name: str, done: list[Any], error: Exception | None = None) -> None:
        self.name, self.done, self.error = name, done, error

    def suspend(self) -> None:
        self.done.append(f"{self.name} suspends")
        if self.error is not None:
            raise self.error

    def resume(self) -> None:
        self.done.append(f"{self.name} resumes")
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_reducers", "_followed"):
        monkeypatch.setattr(sleep, name, [])
    monkeypatch.setattr(sleep, "_said", set())
    for place, _, _ in sleep._PLACES:
        monkeypatch.delitem(sys.modules, place, raising=False)


def server(monkeypatch: pytest.MonkeyPatch, place: str, done: list[Any]) -> Any:
    """A server's class at its place, whose methods note their arguments."""
    name, (gives, gets) = next((name, methods) for where, name, methods in sleep._PLACES if where == place)

    def falls_asleep(self: Any, *given: Any, **named: Any) -> str:
        done.append((gives, given, named))
        return "asleep"

    def wakes_up(self: Any, *given: Any, **named: Any) -> str:
        done.append((gets, given, named))
        return "awake"

    kind = type(name, (), {gives: falls_asleep, gets: wakes_up})
    module = types.ModuleType(place)
    setattr(module, name, kind)
    monkeypatch.setitem(sys.modules, place, module)
    return kind()


@pytest.mark.parametrize("place", [VLLM, SGLANG, OLDER_SGLANG])
def test_every_reducer_sleeps_behind_the_server_and_wakes_before_it(place: str, monkeypatch: pytest.MonkeyPatch):
    done: list[Any] = []
    engine = server(monkeypatch, place, done)
    reducers = [Reducer("first", done), Reducer("second", done)]
    for reducer in reducers:
        sleep.follow(reducer)
    gives, gets = next(methods for where, _, methods in sleep._PLACES if where == place)
    assert getattr(engine, gives)(2, tags=["x"]) == "asleep"
    assert getattr(engine, gets)(tags=None) == "awake"
    assert done == [
        (gives, (2,), {"tags": ["x"]}), "first suspends", "second suspends",
        "first resumes", "second resumes", (gets, (), {"tags": None}),
    ]  # fmt: skip
    assert getattr(engine, gives).__name__ == "falls_asleep"
    done.clear()
    del reducer, reducers[0]
    getattr(engine, gives)()
    assert done == [(gives, (), {}), "second suspends"], "one that was dropped is left out"


def test_a_server_that_refuses_to_sleep(monkeypatch: pytest.MonkeyPatch):
    done: list[Any] = []
    engine = server(monkeypatch, VLLM, done)
    monkeypatch.setattr(type(engine), "sleep", lambda self: 1 / 0)
    reducer = Reducer("reducer", done)
    sleep.follow(reducer)
    with pytest.raises(ZeroDivisionError):
        engine.sleep()
    assert done == []


def test_without_virtual_memory_it_sleeps_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    done: list[Any] = []
    engine = server(monkeypatch, VLLM, done)
    reducers = [Reducer("first", done, UnsupportedError("no memory to give")), Reducer("second", done)]
    for reducer in reducers:
        sleep.follow(reducer)
    for _ in range(2):
        assert engine.sleep() == "asleep"
    assert done[1:3] == ["first suspends", "second suspends"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "ipcreduce's memory stays while the server sleeps: no memory to give"
    ]
    reducers[1].error = PeerLostError("rank 1 is gone")
    with pytest.raises(PeerLostError):
        engine.sleep()


def test_a_reducer_that_gets_no_memory_keeps_the_server_asleep(monkeypatch: pytest.MonkeyPatch):
    done: list[Any] = []
    engine = server(monkeypatch, VLLM, done)
    reducer = Reducer("reducer", done)
    sleep.follow(reducer)
    engine.sleep()
    done.clear()
    reducer.error = UnsupportedError("this process can open no further file")
    with pytest.raises(UnsupportedError, match="no further file"):
        engine.wake_up()
    reducer.error = None
    assert engine.wake_up() == "awake"
    assert done == ["reducer resumes", "reducer resumes", ("wake_up", (), {})]


def test_a_server_without_these_names_goes_on_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = server(monkeypatch, VLLM, [])
    del type(engine).wake_up
    reducers = [Reducer("first", []), Reducer("second", [])]
    for reducer in reducers:
        sleep.follow(reducer)
    assert engine.sleep() == "asleep"
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"it has none of {VLLM}.Worker, " in record.getMessage()
