"""Exceptions on one rank at every place of start-up between two exchanges: the others hear of each at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ipcreduce import PeerFailedError
from ipcreduce.coordination import exchange

KINDS = (MemoryError("none left"), KeyboardInterrupt(), RuntimeWarning("taken for an error"), LookupError("\udcff"))


@contextmanager
def failing(at: int, behind: bool, error: BaseException | None) -> Iterator[Callable[[], int]]:
    """In the block, ``error`` is raised right before exchange ``at``, from 0, or right ``behind`` it; None for never.

    Gives a function that says how many exchanges there have been.
    """
    made, allgather = [0], exchange.allgather

    def counted(*given: Any, **more: Any) -> Any:
        number, made[0] = made[0], made[0] + 1
        if error is not None and number == at and not behind:
            raise error
        found = allgather(*given, **more)
        if error is not None and number == at and behind:
            raise error
        return found

    with mock.patch.object(exchange, "allgather", counted):
        yield lambda: made[0]


def everywhere(make: Callable[[], Any], works: Callable[[Any], None], victim: bool, size: int) -> int:
    """Raise on the victim at every place, on all ranks; how many places there were. Collective.

    :param make: makes a communicator, with a timeout that must not be waited for.
    :param works: checks one.
    """
    with failing(0, False, None) as exchanges:
        make().close()
        steps = exchanges()
    # Behind the last exchange the others have a communicator, and this rank too.
    places = [(at, behind) for at in range(steps) for behind in (False, True) if at < steps - 1 or not behind]
    for turn, (at, behind) in enumerate(places):
        due = KINDS[turn % len(KINDS)]
        found = None
        with failing(at, behind, due if victim else None):
            try:
                make()
            except BaseException as error:
                found = error
        if victim:
            assert found is due, f"{found!r} where {due!r} was due, at {at}, {behind}"
        else:
            assert type(found) is PeerFailedError, f"{found!r} at {at}, {behind}: {due!r} on another rank"
            assert f"rank {size - 1} has left start-up ({type(due).__name__}" in str(found), found
        if turn % 5 == 0:  # nothing of the failed one is in the way of the next one
            with make() as comm:
                works(comm)
    with make() as comm:
        works(comm)
    return len(places)
