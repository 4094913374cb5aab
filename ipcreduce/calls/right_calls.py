"""The last call that was right on every rank, which the ranks find out together when they meet after an error."""

from __future__ import annotations

from collections.abc import Sequence

from .backend import Backend


class RightCalls:
    """One rank's knowledge of which of its calls were right, since the ranks last met.

    A call that has raised on every rank alike, without a fault, counts as right once the program has made another one:
    the programs have gone on together.

    :ivar last: the last call such that this one and all before it, since the meeting before the last one, were right on
        every rank.
    """

    def __init__(self) -> None:
        self.last = 0
        self._met = 0  # the last call before the ranks met
        self._wrong: int | None = None  # the first call that a fault has kept from being right here
        self._alike = 0, 0  # the first and the last of the calls that have raised alike

    def spoil(self, first: int, last: int, fault: bool) -> None:
        """Note that calls ``first`` to ``last`` are not right here. ``fault``: the ranks have to meet because of it."""
        if fault:
            self._wrong = min(first, self._wrong or first)
        else:
            self._alike = first, last

    def here(self, made: int, backends: Sequence[Backend]) -> int:
        """The last right call on this rank, which has made ``made`` calls, and has quiesced."""
        first, last = self._alike
        right = first - 1 if last == made else made
        if self._wrong is not None:
            right = min(right, self._wrong - 1)
        return max(self._met, min([right, *(backend.right(right) for backend in backends)]))

    def meet(self, number: int, rights: Sequence[int]) -> None:
        """Begin anew with call ``number``. :param rights: :meth:`here` of every rank."""
        self.last, self._met, self._wrong, self._alike = min(rights), number - 1, None, (0, 0)
