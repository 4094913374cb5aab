"""CuPy's errors, and which allocator a thread uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulated import machine

_thread = threading.local()


class CUDARuntimeError(machine.Fault, RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class OutOfMemoryError(MemoryError):
    def __init__(self, nbytes: int, held: int = 0) -> None:
        super().__init__(f"simulated CuPy: out of memory allocating {nbytes} bytes (allocated so far: {held} bytes)")


@contextmanager
def using_allocator(allocator: Callable[[int], Any]) -> Iterator[None]:
    previous, _thread.allocator = current_allocator(), allocator
    try:
        yield
    finally:
        _thread.allocator = previous


def current_allocator() -> Callable[[int], Any] | None:
    """This thread's allocator; None for the default pool."""
    return getattr(_thread, "allocator", None)
