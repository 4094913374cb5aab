"""Loaded kernels, which the communicators of a process share: loading waits for all that runs on the device.

A communicator whose kernels another one uses already loads none, so that no call in flight is waited for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ..cuda import driver

Key = tuple[Any, ...]  # context, and all that a kernel was compiled for; its name comes last


@dataclass
class _Loaded:
    module: int
    function: int
    users: int = 0


_loaded: dict[Key, _Loaded] = {}
_lock = threading.RLock()  # finalisers may come in between


def take(key: Key) -> int | None:
    """The function of a kernel that is loaded, for one user more; None if it is not."""
    with _lock:
        found = _loaded.get(key)
        if found is None:
            return None
        found.users += 1
        return found.function


def load(key: Key, cubin: bytes) -> int:
    """:func:`take`, loaded from ``cubin`` if need be. :raises CudaError: if it does not load."""
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
    """One user less; with the last the kernel is unloaded. :raises CudaError: if that fails."""
    with _lock:
        found = _loaded[key]
        found.users -= 1
        if not found.users:
            del _loaded[key]
            driver.unload_module(found.module)
