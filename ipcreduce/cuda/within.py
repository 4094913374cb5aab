"""A context for a while, and no harm to captures: what may run in any thread runs within this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import CudaError
from . import driver


@contextmanager
def within(context: int) -> Iterator[None]:
    """Makes ``context`` this thread's current one, in which it may wait, allocate and free while anybody captures.

    As far as that works: at interpreter exit the context may be gone.
    """
    previous = None
    with suppress(CudaError):
        previous = driver.current_context()
        driver.set_context(context)
    try:
        with driver.relaxed():
            yield
    finally:
        if previous is not None:
            with suppress(CudaError):
                driver.set_context(previous)
