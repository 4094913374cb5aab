"""Guards against hangs, and waits for events. No verdict follows from how long something takes, but for a hang.

Two kinds of time stand apart in the tests. **Guards** are the one constant HANG, within which a slow or paused machine
does anything, so that reaching it means a hang; what the library would wait for by itself is longer there, see
:func:`patient`. **Clock tests** have time as their subject, and move the clock: :mod:`tests.shared.clock`.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

HANG = 60.0  # seconds
LONG = 5 * HANG  # for what the library would give up by itself: a test that reaches it has met HANG before

# The library's own patience with what takes milliseconds, but for a timeout that the program has passed.
_START_UP = {
    "ipcreduce.ranks.connections": ("_GREET_SECONDS", "_MAX_SECONDS"),
    "ipcreduce.ipc.peers": ("_VERIFY_SECONDS",),
}
_PATIENCE = _START_UP | {
    "ipcreduce.communicator_state": ("_CLOSE_SECONDS",),
    "ipcreduce.process": ("CLOSE_SECONDS",),
    "ipcreduce.device.backend": ("_ABORT_SECONDS", "_GIVE_UP_SECONDS"),
    "ipcreduce.device.deferred_free": ("_RECLAIM_SECONDS", "_CALL_SECONDS"),
    "ipcreduce.page.control_page": ("_RECORD_SECONDS", "_END_SECONDS"),
    "ipcreduce.calls.sequence": ("_PATIENCE_SECONDS",),
    "ipcreduce.page.watchdog": ("_JOIN_SECONDS", "_LAST_WORDS_SECONDS"),
    "ipcreduce.nccl.guard": ("_LAST_TURN_SECONDS",),
}
_shipped: dict[tuple[str, str], float] = {}


def _change(patched: contextlib.ExitStack, module: ModuleType, name: str, value: float) -> None:
    """As mock.patch.object, which takes longer to import than the rest of what a rank needs from here."""
    patched.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def patient(*, at_the_end: bool = True) -> contextlib.ExitStack:
    """From now on the library in this process gives nothing up before LONG; until the result is closed.

    So a rank that the machine has paused for some seconds changes nothing, and who waits where nobody may, hangs.

    :param at_the_end: False for programs of users, whose close() gives up as it is shipped.
    """
    patched = contextlib.ExitStack()
    for module, names in (_PATIENCE if at_the_end else _START_UP).items():
        found = importlib.import_module(module)
        for name in names:
            _shipped.setdefault((module, name), getattr(found, name))
            _change(patched, found, name, LONG)
    return patched


@contextlib.contextmanager
def as_shipped() -> Iterator[None]:
    """In the block, the library has its own patience again: for those whose subject it is. They move the clock."""
    with contextlib.ExitStack() as patched:
        for (module, name), seconds in _shipped.items():
            _change(patched, importlib.import_module(module), name, seconds)
        yield


def until(condition: Callable[[], Any], what: str | Callable[[], str] = "what was waited for") -> Any:
    """Wait for an event: ``condition()`` once it is true.

    :raises AssertionError: if it never comes; ``what`` is its name, or gives it then.
    """
    begun = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - begun < HANG, f"{what if isinstance(what, str) else what()} has not come"
        time.sleep(1e-3)
    return found


@contextlib.contextmanager
def no_hang(what: str = "it") -> Iterator[None]:
    """The block waits for nothing that does not come."""
    begun = time.monotonic()
    yield
    taken = time.monotonic() - begun
    assert taken < HANG, f"{what} took {taken:.1f} s"


def late(seconds: float) -> None:
    """Come later, most likely, than the other ranks or threads. A test is right in any order, only worth less."""
    time.sleep(seconds)
