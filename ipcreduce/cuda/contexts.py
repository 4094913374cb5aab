"""A context for a while: what may run in any thread runs within one of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import CudaError
from . import driver


@contextmanager
def using(context: int) -> Iterator[None]:
    """Makes ``context`` this thread's current one. As far as that works: at interpreter exit it may be gone."""
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
def within(context: int) -> Iterator[None]:
    """:func:`using` it, this thread may also wait, allocate and free while anybody captures, and harms no capture."""
    with using(context), driver.relaxed():
        yield
