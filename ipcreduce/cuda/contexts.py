"""Context managers that make a CUDA context current for a block, for code that may run in any thread.

They are classes, because a generator of contextlib takes a microsecond more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..errors import CudaError
from . import driver


class using:
    """Make ``context`` current in this thread for a block, if it still exists: it may be gone when Python exits."""

    __slots__ = ("_context", "_previous")

    def __init__(self, context: int) -> None:
        self._context = self._previous = context

    def __enter__(self) -> None:
        try:
            self._previous = previous = driver.current_context()
            if previous != self._context:
                driver.set_context(self._context)
        except CudaError:
            pass
        except BaseException:  # after an interrupt here, Python does not call __exit__()
            using.__exit__(self)
            raise

    def __exit__(self, *error: Any) -> None:
        if self._previous != self._context:
            with suppress(CudaError):
                driver.set_context(self._previous)


class using_relaxed(using):
    """Make ``context`` current for a block in relaxed capture mode: waits, allocations and frees end no capture."""

    __slots__ = ("_relaxed",)

    def __enter__(self) -> None:
        super().__enter__()
        try:
            self._relaxed = driver.relaxed()
            self._relaxed.__enter__()
        except BaseException:
            super().__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._relaxed.__exit__(*error)
        finally:
            super().__exit__(*error)
