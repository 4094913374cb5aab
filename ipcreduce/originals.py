"""Python's own clock, locks, threads, queues, waits, signals and sockets, whatever a library has put in their places.

gevent and eventlet put there what switches between functions of one thread, and freezegun a clock that stands. They do
so before this package is imported, or later. With these, a watchdog or a deadline may stop. So this package has its own
copies of Python's modules in C, which such libraries do not know.
"""

from __future__ import annotations

import _socket
import _thread as shared
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

__all__ = ["Lock", "RLock", "queue", "select", "signal", "time"]

if TYPE_CHECKING:
    import _thread as _own
    import queue
    import select
    import signal
    import time
    from threading import Lock, RLock
else:
    import _signal as signal

    def _copy(name: str) -> Any:
        spec = find_spec(name)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    queue, select, time, _own = (_copy(name) for name in ("_queue", "select", "time", "_thread"))
    Lock, RLock = _own.allocate_lock, _own.RLock

monotonic = time.perf_counter  # of the same clock; time-machine changes time.monotonic() within C
running: dict[int, Thread] = {}  # the threads of this package, by identifier
_POLL_SECONDS = 1e-3


class Thread:
    """A thread of the operating system that runs ``function()`` once. The interpreter's exit does not wait for it.

    :ivar is_alive: True from :meth:`start` to the function's end.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.name, self.is_alive = name, False
        self._function: Callable[[], object] | None = function

    def start(self) -> None:
        """Start it. :raises OSError: if the system has no more threads; or at the interpreter's exit."""
        self.is_alive = True
        try:
            hooks = [getattr(module, "excepthook", None) for module in (sys, threading)]
            if isinstance(shared.start_new_thread, BuiltinFunctionType) and all(hook is not None for hook in hooks):
                threading.Thread(target=self._run, name=self.name, daemon=True).start()
            else:  # a library has replaced it, or the program has taken a hook away, without which there is no Thread
                _own.start_new_thread(self._run, ())
        except RuntimeError as error:
            self.is_alive = False
            raise OSError(
                f"this process can start no further thread ({error}). Raise the limit of its user or container "
                "(ulimit -u, docker run --pids-limit)"
            ) from None

    def join(self, seconds: float) -> None:
        """Wait for its end, up to ``seconds``. Without a lock: Ctrl-C at the wrong moment might leave it taken."""
        until = monotonic() + seconds
        while self.is_alive and monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _run(self) -> None:
        function, self._function = self._function, None  # so its references are gone once it has run
        assert function is not None
        own = identifier()
        running[own] = self
        try:
            function()
        finally:
            del function, running[own]
            self.is_alive = False


def identifier() -> int:
    """The identifier of the calling thread."""
    return int(_own.get_ident())


def current() -> Thread | None:
    """The calling thread, if it is one of this package."""
    return running.get(identifier())


class Socket(_socket.socket):
    """A socket that waits in the operating system."""

    def accept(self) -> tuple[Socket, Any]:
        """A connection, and the address of its other end."""
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        return Socket(fileno=descriptor), address

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
