"""The forward context: per-thread information about the current forward pass, as in inference engines."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..texts import shown

MODES = ("none", "piecewise", "full")


@dataclass(frozen=True)
class ForwardContext:
    """The arguments of the :func:`forward_context` in effect.

    ``batch_descriptor`` selects the recording. ``mode`` selects the runners that record and replay. ``attn_metadata``
    is for the program's own use.
    """

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
    """Set this thread's forward context for a block. Blocks may be nested.

    :param batch_descriptor: the key of a recording: a :class:`GraphRunner` has one recording for each descriptor. It
        must be hashable, and the same on every rank.
    :param mode: "piecewise" or "full": runners of that mode record and replay. "none": no runner does.
    :param attn_metadata: any object, passed on to the code in the block.
    :raises ArgumentError: if ``mode`` is another word, or the descriptor is not hashable.
    """
    check_word("mode", mode, MODES)
    try:
        hash(batch_descriptor)
    except TypeError:
        raise ArgumentError(f"batch_descriptor must be hashable: {shown(batch_descriptor)} is not") from None
    previous, _stack.top = _stack.top, ForwardContext(batch_descriptor, mode, attn_metadata)
    try:
        yield _stack.top
    finally:
        _stack.top = previous


def get_forward_context() -> ForwardContext | None:
    """This thread's forward context, or None outside of :func:`forward_context`.

    A break sees the context of the replay that runs it.
    """
    return _stack.top


def check_word(name: str, word: Any, words: tuple[str, ...]) -> None:
    """Check that an argument called ``name`` is one of ``words``. :raises ArgumentError: if not."""
    if not isinstance(word, str) or word not in words:
        raise ArgumentError(f"{name} must be one of {', '.join(words)}, not {shown(word)}")
