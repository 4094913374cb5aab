"""Loaded kernels, which the communicators of a process share.

Loading a kernel waits for all work on the device. A communicator that uses a loaded kernel does not have to wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cuda import driver
from ..originals import RLock

Key = tuple[Any, ...]  # the context and the parameters of compilation. The kernel's name comes last


@dataclass
class _Loaded:
    module: int
    function: int
    users: int = 0


_loaded: dict[Key, _Loaded] = {}
_lock = RLock()  # re-entrant, because a finaliser may run while this thread holds it


def take(key: Key, cubin: bytes | None = None) -> int | None:
    """Add a user to a kernel, and return its function; None if the kernel is not loaded.

    :param cubin: the kernel is loaded from it if need be. :raises CudaError: if that fails.
    """
    with _lock:
        if key not in _loaded and cubin is not None:
            module = driver.load_module(cubin)
            try:
                _loaded[key] = _Loaded(module, driver.get_function(module, key[-1]))
            except BaseException:
                driver.close_module(module)
                raise
        found = _loaded.get(key)
        if found is None:
            return None
        found.users += 1
        return found.function


def release(key: Key) -> None:
    """Remove a user from a kernel, and unload the kernel after its last user. :raises CudaError: if that fails."""
    with _lock:
        found = _loaded[key]
        found.users -= 1
        if not found.users:
            del _loaded[key]
            driver.close_module(found.module)
