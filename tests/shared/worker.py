"""What the programs that tests run on several ranks share: their end, and a forked child."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.shared.bounds import HANG


def run(main: Callable[[], object]) -> None:
    """``main()``; an exception ends all ranks, and is shown first."""
    try:
        main()
    except BaseException:
        show()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


def play(scenarios: Iterable[Callable[..., object]], names: Iterable[str], *given: object) -> None:
    """On every rank: run the scenarios of these names, or all, one behind the other, each with these arguments."""
    from tests.shared.world import WORLD

    known = {scenario.__name__: scenario for scenario in scenarios}
    chosen = [*names] or [*known]
    for name in chosen:
        started = time.monotonic()
        known[name](*given)
        WORLD.Barrier()
        if WORLD.rank == 0:
            print(f"{name}: right, {time.monotonic() - started:.1f} s", flush=True)
    if WORLD.rank == 0:
        print(f"{len(chosen)} scenarios, all right", flush=True)


def show() -> None:
    """The exception on stderr, and a moment for the launcher to read it: MPICH's loses what it has not at an abort."""
    traceback.print_exc()
    sys.stderr.flush()
    time.sleep(0.3)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show an exception of the block at once: what closes behind it may wait for the other ranks."""
    try:
        yield
    except BaseException:
        show()
        raise


def await_others(world: Any) -> None:
    """On the last rank: wait until every other rank has called :func:`let_last_go`, however slow it is."""
    if world.rank == world.size - 1:
        for rank in range(world.size - 1):
            world.recv(source=rank)


def let_last_go(world: Any) -> None:
    """On every other rank: let the last one out of :func:`await_others`."""
    if world.rank != world.size - 1:
        world.send(None, world.size - 1)


def in_a_fork(check: Callable[[], object]) -> None:
    """``check()`` in a forked child. :raises AssertionError: if it raises there, or hangs."""
    child = os.fork()
    if not child:
        signal.alarm(int(HANG))
        status = 1
        try:
            check()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child"
