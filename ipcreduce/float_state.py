"""The floating-point state of a thread: how the processor rounds, and whether it keeps denormals.

The program can change it, and so can a library that it loads: one built with -ffast-math flushes denormals to zero.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import UnsupportedError

_F = TypeVar("_F", bound=Callable[..., Any])
_ONE, _LITTLE, _TINY, _ZERO = 1.0, 2.0**-55, 5e-324, 0.0  # variables, since Python would add literals when it compiles
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of the C libraries
_BYTES = 256  # more than a fenv_t has


def in_standard_state(function: _F) -> _F:
    """Let a function round to nearest and keep denormals, whatever the state of its thread is.

    :raises UnsupportedError: if that state cannot be changed.
    """

    @functools.wraps(function)
    def run(*given: Any) -> Any:
        if _ONE + _LITTLE - _LITTLE == _ONE and _TINY + _TINY > _ZERO:  # quicker than to ask for the state
            return function(*given)
        library, before = ctypes.PyDLL(None), ctypes.create_string_buffer(_BYTES)
        library.fegetenv(before)
        try:
            library.fesetenv(_DEFAULT)
            if _ONE + _LITTLE - _LITTLE != _ONE or not _TINY + _TINY > _ZERO:
                raise UnsupportedError(
                    "this thread rounds in another way than to nearest, or flushes denormals to zero, and the C "
                    "library cannot change that. Look for the library that has set it"
                )
            return function(*given)
        finally:
            library.fesetenv(before)

    return cast(_F, run)
