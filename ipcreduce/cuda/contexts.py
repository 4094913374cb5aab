"""Context managers that make a CUDA context current for a block, for code that may run in any thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import CudaError
from . import driver


@contextmanager
def using(context: int) -> Iterator[None]:
    """Make ``context`` this thread's current one for a block, if it still exists: at interpreter exit it may not."""
    previous = context
    with suppress(CudaError):
        previous = driver.current_context()
        if previous != context:
            driver.set_context(context)
    try:
        yield
    finally:
        if previous != context:
            with suppress(CudaError):
                driver.set_context(previous)


@contextmanager
def using_relaxed(context: int) -> Iterator[None]:
    """As :func:`using`, and in relaxed capture mode: waits, allocations and frees then invalidate no capture."""
    with using(context), driver.relaxed():
        yield
