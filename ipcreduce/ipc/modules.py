"""Loaded kernels, shared by the communicators of a process, since loading waits for all work on the device.

A communicator loads no kernel that another one already uses, so it does not wait for calls in flight.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ..cuda import driver

Key = tuple[Any, ...]  # context and compilation parameters; the kernel's name comes last


@dataclass
class _Loaded:
    module: int
    function: int
    users: int = 0


_loaded: dict[Key, _Loaded] = {}
_lock = threading.RLock()  # re-entrant: a finaliser may run while this thread holds it


def take(key: Key) -> int | None:
    """Add a user to a loaded kernel and return its function; None if it is not loaded."""
    with _lock:
        found = _loaded.get(key)
        if found is None:
            return None
        found.users += 1
        return found.function


def load(key: Key, cubin: bytes) -> int:
    """Add a user to a kernel, loading it from ``cubin`` if necessary. :raises CudaError: if that fails."""
    with _lock:
        if key not in _loaded:
            module = driver.load_module(cubin)
            try:
                _loaded[key] = _Loaded(module, driver.get_function(module, key[-1]))
            except BaseException:
                driver.unload_module(module)
                raise
        function = take(key)
        assert function is not None
        return function


def give_up(key: Key) -> None:
    """Remove a user from a kernel, and unload it after the last. :raises CudaError: if unloading fails."""
    with _lock:
        found = _loaded[key]
        found.users -= 1
        if not found.users:
            del _loaded[key]
            driver.unload_module(found.module)
