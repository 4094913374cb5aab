"""What the parts of a forward pass know about it: a context for each thread, as inference engines have."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError

MODES = ("none", "piecewise", "full")


@dataclass(frozen=True)
class ForwardContext:
    """``batch_descriptor`` names the recording, ``mode`` which runners record; ``attn_metadata`` is the user's."""

    batch_descriptor: Hashable
    mode: str
    attn_metadata: Any


class _Stack(threading.local):
    top: ForwardContext | None = None


_stack = _Stack()


@contextmanager
def forward_context(
    batch_descriptor: Hashable, mode: str = "piecewise", attn_metadata: Any = None
) -> Iterator[ForwardContext]:
    """Within the block, :func:`get_forward_context` of this thread gives these. Blocks may be nested.

    :param batch_descriptor: what a :class:`GraphRunner` has one recording for; the same on every rank.
    :param mode: "piecewise" or "full": runners of that mode record and replay; "none": none does.
    :raises ArgumentError: if ``mode`` is another word, or the descriptor is not hashable.
    """
    check_mode(mode)
    try:
        hash(batch_descriptor)
    except TypeError:
        raise ArgumentError(f"batch_descriptor must be hashable; found {batch_descriptor!r}") from None
    previous, _stack.top = _stack.top, ForwardContext(batch_descriptor, mode, attn_metadata)
    try:
        yield _stack.top
    finally:
        _stack.top = previous


def get_forward_context() -> ForwardContext | None:
    """This thread's context; None outside of :func:`forward_context`. In a break, that of the present replay."""
    return _stack.top


def check_mode(mode: Any) -> None:
    """:raises ArgumentError: if it is none of :data:`MODES`."""
    if mode not in MODES:
        raise ArgumentError(f"mode must be one of {', '.join(MODES)}; found {mode!r}")
