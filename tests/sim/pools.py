"""CuPy's MemoryPool and PythonFunctionAllocator over simulated memory, and which allocator a thread uses."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_thread = threading.local()


class _Raw:
    """What an allocator of the user's gave; goes back to it with the last reference."""

    def __init__(self, nbytes: int, device: int, allocate: Callable[..., int], free: Callable[..., None]) -> None:
        self.device_id, self.size, self._give_back = device, nbytes, free
        self.ptr = allocate(nbytes, device)

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            self._give_back(self.ptr, self.device_id)


class _Pooled:
    """A block of a pool, which takes it back; a block that outlives its pool gives its memory back itself."""

    def __init__(self, pool: MemoryPool, key: tuple[int, int], raw: _Raw) -> None:
        self._pool, self._key, self._raw = weakref.ref(pool), key, raw
        self.ptr, self.size, self.device_id = raw.ptr, raw.size, raw.device_id

    def __del__(self) -> None:
        pool = self._pool() if self._pool is not None else None
        if pool is not None:
            pool.free_blocks[self._key].append(self._raw)


class PythonFunctionAllocator:
    def __init__(self, malloc_func: Callable[..., int], free_func: Callable[..., None]) -> None:
        self.functions = malloc_func, free_func

    def malloc(self, nbytes: int) -> Any:
        from . import cupy

        return cupy.MemoryPointer(_Raw(nbytes, cupy._require_context(), *self.functions), 0)  # type: ignore[arg-type]


class MemoryPool:
    """Keeps free blocks apart by stream and size, as CuPy's arenas do."""

    def __init__(self, allocator: Callable[[int], Any]) -> None:
        self._allocator = allocator
        self.free_blocks: dict[tuple[int, int], list[_Raw]] = defaultdict(list)

    def malloc(self, nbytes: int) -> Any:
        from . import cupy

        key = (cupy.get_current_stream().ptr, -(-nbytes // 512) * 512)
        if self.free_blocks[key]:
            raw = self.free_blocks[key].pop()
        else:
            try:
                raw = self._allocator(key[1]).mem
            except Exception:  # CuPy frees what it can and tries once more
                self.free_all_blocks()
                raw = self._allocator(key[1]).mem
        return cupy.MemoryPointer(_Pooled(self, key, raw), 0)  # type: ignore[arg-type]

    def free_all_blocks(self) -> None:
        self.free_blocks.clear()


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
