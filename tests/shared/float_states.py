"""Floating-point states that a library, or the program, may give a thread."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# By processor: the place of the word of control in a fenv_t of the C libraries, and the bits of each state in it.
_PLACES = {"x86_64": 28, "aarch64": 0}
_BITS = {
    "x86_64": {
        "flushed": 0x8000, "taken as 0": 0x40, "as -ffast-math": 0x8040,
        "down": 1 << 13, "up": 2 << 13, "to zero": 3 << 13,
    },
    "aarch64": {"as -ffast-math": 1 << 24, "up": 1 << 22, "down": 2 << 22, "to zero": 3 << 22},
}  # fmt: skip
NAMES = (*_BITS.get(platform.machine(), ()),)


def word() -> ctypes.c_uint32:
    """This thread's word of control, as it is now."""
    environment = ctypes.create_string_buffer(256)
    ctypes.PyDLL(None).fegetenv(environment)
    return ctypes.c_uint32.from_buffer_copy(environment, _PLACES[platform.machine()])


@contextmanager
def state(name: str | None) -> Iterator[None]:
    """Give this thread the state of this name for the block; None for the one that it has."""
    library, before = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    library.fegetenv(before)
    changed = ctypes.create_string_buffer(before.raw, 256)
    if name is not None:
        place = _PLACES[platform.machine()]
        ctypes.c_uint32.from_buffer(changed, place).value |= _BITS[platform.machine()][name]
    library.fesetenv(changed)
    try:
        yield
    finally:
        library.fesetenv(before)
