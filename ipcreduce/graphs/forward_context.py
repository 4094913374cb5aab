"""The forward context: information about the current forward pass, as in inference engines.

Each thread and each asyncio task has its own, in a ``ContextVar``. Blocks may be left in any order, and in another task
than they were entered in: an asynchronous generator that is dropped is closed in one of the event loop's. So a block
that was left is marked, and whoever reads the variable passes over it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


class _Block:
    """A block of :func:`forward_context`."""

    __slots__ = "context", "is_left", "outer"

    def __init__(self, context: ForwardContext) -> None:
        self.context, self.outer, self.is_left = context, _innermost(), False


_entered: ContextVar[_Block | None] = ContextVar("ipcreduce.forward_context", default=None)


def _innermost() -> _Block | None:
    """The block in effect: the last that was entered here and is not left."""
    block = _entered.get()
    while block is not None and block.is_left:
        block = block.outer
    return block


@contextmanager
def forward_context(
    batch_descriptor: Hashable, mode: str = "piecewise", attn_metadata: Any = None
) -> Iterator[ForwardContext]:
    """Set the forward context of this thread, or asyncio task, for a block. Blocks may be nested.

    A task that is created in the block has the context too, until the block is left. A generator has no context of its
    own: between its steps, a block that is open in it is in effect for its caller.

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
    block = _Block(ForwardContext(batch_descriptor, mode, attn_metadata))
    try:
        _entered.set(block)
        yield block.context
    finally:
        block.is_left = True
        _entered.set(_innermost())


def get_forward_context() -> ForwardContext | None:
    """The forward context of this thread or asyncio task, or None outside of :func:`forward_context`.

    A break sees the context of the replay that runs it.
    """
    block = _entered.get()
    if block is not None and block.is_left:
        block = _innermost()
    return None if block is None else block.context


def check_word(name: str, word: Any, words: tuple[str, ...]) -> None:
    """Check that an argument called ``name`` is one of ``words``. :raises ArgumentError: if not."""
    if not issubclass(type(word), str) or str.__str__(word) not in words:
        raise ArgumentError(f"{name} must be one of {', '.join(words)}, not {shown(word)}")
