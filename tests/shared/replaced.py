"""What gevent and freezegun put in the places of Python's own, as stand-ins: a clock that stands, and errors.

They replace in place, in modules that everybody shares, and functions of time wherever they are found. To import this
module loads what other libraries use of that.
"""

from __future__ import annotations

import _thread
import concurrent.futures  # noqa: F401
import contextlib
import importlib  # noqa: F401
import logging  # noqa: F401
import pkgutil  # noqa: F401
import queue
import random  # noqa: F401
import select
import selectors
import signal
import socket
import sys
import tempfile  # noqa: F401
import threading
import time
import types
from typing import Any

import numpy.random  # noqa: F401

with contextlib.suppress(ImportError, RuntimeError):
    import mpi4py.MPI  # noqa: F401
with contextlib.suppress(ImportError):
    import cuda.bindings.driver  # noqa: F401

_CLOCKS = {id(getattr(time, name)) for name in ("time", "monotonic", "perf_counter")}
_SLEEP = id(time.sleep)


def _refuse(*_: Any, **__: Any) -> None:
    raise SystemError("the package uses what has been replaced")


def _stands() -> float:
    return 0.0


def replace() -> None:
    """Replace them in this process, for good."""
    for module in [one for one in sys.modules.values() if isinstance(one, types.ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in _CLOCKS:
                setattr(module, name, _stands)
            elif id(value) == _SLEEP:
                setattr(module, name, _refuse)
    for module, names in (
        (_thread, ("start_new_thread",)), (queue, ("SimpleQueue",)), (selectors, ("DefaultSelector",)),
        (threading, ("_start_new_thread", "_start_joinable_thread", "Lock", "RLock", "Event")),
        (socket, ("socket", "create_server")), (signal, ("signal", "getsignal")),
    ):  # fmt: skip
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _refuse)
    for name in ("epoll", "poll", "select"):
        delattr(select, name)
