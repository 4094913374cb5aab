"""CuPy's MemoryPool and PythonFunctionAllocator over simulated memory, and which allocator a thread uses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.sim import machine

_thread = threading.local()


class _Raw:
    """What an allocator of the user's gave; goes back to it with the last reference."""

    def __init__(self, nbytes: int, device: int, allocate: Callable[..., int], free: Callable[..., None]) -> None:
        self.device_id, self.size, self._give_back = device, nbytes, free
        self.ptr = allocate(nbytes, device)

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            self._give_back(self.ptr, self.device_id)


class CUDARuntimeError(machine.Fault, RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class OutOfMemoryError(MemoryError):
    def __init__(self, nbytes: int) -> None:
        super().__init__(f"simulated CuPy: out of memory allocating {nbytes} bytes")


@dataclass(eq=False)
class _Chunk:
    """A part of what the allocator gave. A pool cuts it where a smaller piece is wanted, and joins it again."""

    raw: Any
    offset: int
    size: int
    key: int
    before: _Chunk | None = None
    after: _Chunk | None = None


class _Pooled:
    """A chunk in use, which the pool takes back; one that outlives its pool gives its memory back itself."""

    def __init__(self, pool: MemoryPool, chunk: _Chunk) -> None:
        self._pool, self._chunk = weakref.ref(pool), chunk
        self.ptr, self.size, self.device_id = chunk.raw.ptr + chunk.offset, chunk.size, chunk.raw.device_id

    def __del__(self) -> None:
        pool = self._pool() if self._pool is not None else None
        if pool is not None:
            pool.take_back(self._chunk)


class PythonFunctionAllocator:
    def __init__(self, malloc_func: Callable[..., int], free_func: Callable[..., None]) -> None:
        self.functions = malloc_func, free_func

    def malloc(self, nbytes: int) -> Any:
        from . import cupy

        return cupy.MemoryPointer(_Raw(nbytes, cupy._require_context(), *self.functions), 0)  # type: ignore[arg-type]


class MemoryPool:
    """Keeps free chunks apart by stream, takes the smallest that fits, and cuts it: as CuPy's arenas do."""

    def __init__(self, allocator: Callable[[int], Any]) -> None:
        self._allocator = allocator
        self._free: dict[int, list[_Chunk]] = defaultdict(list)

    def malloc(self, nbytes: int) -> Any:
        from . import cupy

        key, size = cupy.get_current_stream().ptr, -(-nbytes // 512) * 512
        free = self._free[key]
        chunk = min((c for c in free if c.size >= size), key=lambda c: c.size, default=None)
        if chunk is None:
            chunk = _Chunk(self._new(size), 0, size, key)
        else:
            free.remove(chunk)
        if chunk.size > size:
            rest = _Chunk(chunk.raw, chunk.offset + size, chunk.size - size, key, chunk, chunk.after)
            if rest.after is not None:
                rest.after.before = rest
            chunk.size, chunk.after = size, rest
            free.append(rest)
        return cupy.MemoryPointer(_Pooled(self, chunk), 0)  # type: ignore[arg-type]

    def _new(self, size: int) -> Any:
        for prepare in (lambda: None, self.free_all_blocks, lambda: (gc.collect(), self.free_all_blocks())):
            prepare()
            try:
                return self._allocator(size).mem
            except CUDARuntimeError as error:  # no other: so does CuPy
                if error.status != 2:
                    raise
        raise OutOfMemoryError(size)

    def take_back(self, chunk: _Chunk) -> None:
        free = self._free[chunk.key]
        if chunk.after in free:
            free.remove(chunk.after)
            _join(chunk, chunk.after)
        if chunk.before in free:
            free.remove(chunk.before)
            chunk = _join(chunk.before, chunk)
        free.append(chunk)

    def free_all_blocks(self) -> None:
        """Those that are whole."""
        for free in self._free.values():
            free[:] = [chunk for chunk in free if chunk.before or chunk.after]


def _join(chunk: _Chunk, after: _Chunk) -> _Chunk:
    chunk.size, chunk.after = chunk.size + after.size, after.after
    if chunk.after is not None:
        chunk.after.before = chunk
    return chunk


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
