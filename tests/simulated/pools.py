"""CuPy's errors, which allocator a thread uses, and memory that is given back in the order of a stream."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.simulated import machine, machine_streams

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
    return getattr(_thread, "allocator", None) or _everywhere


def set_allocator(allocator: Callable[[int], Any] | None = None) -> None:
    """None: there is no pool here that gives more than was asked for."""
    global _everywhere
    _everywhere = allocator


_everywhere: Callable[[int], Any] | None = None
# By device and bytes: address, stream that it was freed on, event behind that.
_freed: dict[tuple[int, int], list[tuple[int, int, int]]] = {}


class MemoryAsync:
    """Of cudaMallocAsync. As CuPy does it keeps its stream weakly: freed on that object, or else on the current one.

    A block serves the stream that it was freed on at once, and others when all before its end there is done.
    """

    def __init__(self, nbytes: int, device_id: int, stream: Any, current: Callable[[], Any]) -> None:
        self.size, self.device_id, self.stream_ref, self._current = nbytes, device_id, weakref.ref(stream), current
        self._key = device_id, nbytes
        free = _freed.setdefault(self._key, [])
        for index in reversed(range(len(free))):
            self.ptr, where, event = free[index]
            if where == stream.ptr or machine_streams.is_over(event):
                del free[index]
                machine_streams.drop_event(event)
                return
        self.ptr = machine.allocate(nbytes)

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's exit
            stream, event = self.stream_ref() or self._current(), machine_streams.create_event()
            machine_streams.record_event(event, stream.ptr)
            _freed[self._key].append((self.ptr, stream.ptr, event))
