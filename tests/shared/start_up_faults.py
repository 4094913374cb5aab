"""Exceptions on one rank at every place of start-up between two exchanges: the others hear of each at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ipcreduce import PeerFailedError
from ipcreduce.ranks import exchange

_turn = Path()  # a file that the victim makes, when it leaves in this turn
KINDS = (MemoryError, KeyboardInterrupt, RuntimeWarning, LookupError)


@contextmanager
def failing(at: int, behind: bool, error: BaseException | None) -> Iterator[list[str]]:
    """In the block, ``error`` is raised right before exchange ``at``, from 0, or right ``behind`` it; None for never.

    Gives the names of the exchanges that there have been.
    """
    names: list[str] = []
    allgather = exchange.allgather

    def counted(*given: Any, **more: Any) -> Any:
        number = len(names)
        names.append(given[3])
        if error is not None and number == at and not behind:
            _turn.touch()
            raise error
        found = allgather(*given, **more)
        if error is not None and number == at and behind:
            _turn.touch()
            raise error
        return found

    with mock.patch.object(exchange, "allgather", counted):
        yield names


def has_left() -> bool:
    """True once the victim has left start-up in this turn."""
    return _turn != Path() and _turn.exists()


def everywhere(
    make: Callable[[], Any], works: Callable[[Any], None], victim: bool, size: int, folder: str, but: str = ""
) -> int:  # fmt: skip
    """Raise on the victim at every place, on all ranks; how many places there were. Collective.

    :param make: makes a communicator, with a timeout that must not be waited for.
    :param works: checks one.
    :param folder: an empty one, the same on all ranks.
    :param but: not behind the exchange of this name.
    """
    global _turn
    with failing(0, False, None) as names:
        make().close()
    # Behind the last exchange the others have a communicator, and this rank too.
    places = [(at, False) for at in range(len(names))]
    places += [(at, True) for at, name in enumerate(names[:-1]) if name != but]
    for turn, (at, behind) in enumerate(places):
        due, found = KINDS[turn % len(KINDS)]("\udcff"), None
        _turn = Path(folder, f"{make.__name__}{turn}")
        with failing(at, behind, due if victim else None):
            try:
                make()
            except BaseException as error:
                found = error
        if victim:
            assert found is due, f"{found!r} where {due!r} was due, at {at}, {behind}"
        else:
            assert type(found) is PeerFailedError, f"{found!r} at {at}, {behind}: {due!r} on another rank"
            assert f"rank {size - 1} has left start-up (" in str(found), found
            assert f" ({type(due).__name__}: \\udcff)" in str(found), found
        due = found = None  # with their frames, and all that these hold
        _turn = Path()
        if turn % 5 == 0:  # nothing of the failed one is in the way of the next one
            with make() as comm:
                works(comm)
    with make() as comm:
        works(comm)
    return len(places)
