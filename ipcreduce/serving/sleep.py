"""The servers' sleep: while a server gives its memory back, its all-reduces give theirs back, too.

vLLM's workers have ``sleep`` and ``wake_up``; SGLang releases and resumes "memory occupation". Each is called on every
rank. The methods are wrapped when a rank makes its first all-reduce, since their module is loaded by then.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from typing import Any, Protocol

from ..errors import UnsupportedError

_SGLANG_METHODS = "release_memory_occupation", "resume_memory_occupation"
_PLACES = (  # the module, the class, and the methods that give memory back and get it again
    ("vllm.v1.worker.gpu_worker", "Worker", ("sleep", "wake_up")),
    ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager", _SGLANG_METHODS),
    ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin", _SGLANG_METHODS),
)
_log = logging.getLogger("ipcreduce.serving")


class Reducer(Protocol):
    """An all-reduce of a server."""

    def suspend(self) -> None: ...
    def resume(self) -> None: ...


_reducers: list[weakref.ref[Reducer]] = []  # in the order in which they were made, which is the same on every rank
_followed: list[type] = []  # the classes whose methods are wrapped
_said: set[str] = set()


def follow(reducer: Reducer) -> None:
    """Suspend ``reducer`` whenever the server sleeps, and resume it when the server wakes up, as long as it lives."""
    _reducers[:] = [*(one for one in _reducers if one() is not None), weakref.ref(reducer)]
    for module, name, methods in _PLACES:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and kind not in _followed and all(hasattr(kind, method) for method in methods):
            _wrap(kind, *methods)
            _followed.append(kind)
    if not _followed:
        names = ", ".join(f"{module}.{name}" for module, name, _ in _PLACES)
        _warn(f"ipcreduce's memory stays while the server sleeps: it has none of {names}, with their methods for that")


def _wrap(kind: type, sleep: str, wake_up: str) -> None:
    """Wrap two methods: memory is given back after ``sleep``, which may refuse, and taken again before ``wake_up``."""
    fall_asleep, wake = getattr(kind, sleep), getattr(kind, wake_up)

    @functools.wraps(fall_asleep)
    def asleep(*given: Any, **named: Any) -> Any:
        result = fall_asleep(*given, **named)
        for reducer in _living():
            try:
                reducer.suspend()
            except UnsupportedError as error:
                _warn(f"ipcreduce's memory stays while the server sleeps: {error}")
        return result

    @functools.wraps(wake)
    def awake(*given: Any, **named: Any) -> Any:
        for reducer in _living():
            reducer.resume()  # an error goes to the server, which may wake up again: without memory no call works
        return wake(*given, **named)

    setattr(kind, sleep, asleep)
    setattr(kind, wake_up, awake)


def _living() -> list[Reducer]:
    return [reducer for one in _reducers if (reducer := one()) is not None]


def _warn(text: str) -> None:
    """Log a warning, once in a process."""
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)
