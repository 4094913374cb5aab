"""POSIX semaphores of libc: what C code can post without Python, and any process that shares their memory."""

from __future__ import annotations

import ctypes
from functools import cache

_BYTES = 64  # at least sizeof(sem_t): 32 with glibc and musl on 64-bit machines


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Semaphore:
    """A semaphore of this process, at 0. Its memory must outlive whoever may post to it."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_BYTES)
        self._value = ctypes.c_int()
        self.address = ctypes.addressof(self._memory)
        if _libc().sem_init(self._memory, 0, 0):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    @property
    def post_function(self) -> int:
        """The address of ``sem_post``, for C code that calls it with :attr:`address`."""
        return ctypes.cast(_libc().sem_post, ctypes.c_void_p).value or 0

    @property
    def value(self) -> int:
        """The number of posts so far."""
        _libc().sem_getvalue(self._memory, ctypes.byref(self._value))
        return self._value.value
