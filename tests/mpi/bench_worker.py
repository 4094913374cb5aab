"""``ipcreduce`` with something wrong in it: ``... THIS_FILE SCENARIO FILE``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from ipcreduce import cli
from ipcreduce.bench import command, contenders
from ipcreduce.errors import UnsupportedError

LAST = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
BENCH = ["bench", "--smallest", "1K", "--largest", "1K", "--replays", "2"]


def nothing(self: Any, source: Any, target: Any) -> Callable[[], Any]:
    return lambda: None


def wrong_ours() -> None:
    contenders.Ours.prepare = nothing


def wrong_mpi() -> None:
    contenders.Mpi.prepare = nothing


def wrong_later() -> None:
    """Right while it is checked, and wrong on the last rank while it is timed."""
    timed, prepare = command._time, contenders.Ours.prepare

    def spoilt(self: Any, source: Any, target: Any) -> Callable[[], Any]:
        call = prepare(self, source, target)

        def spoil() -> None:
            call()
            target[-1] += LAST

        return spoil

    def time(*arguments: Any) -> Any:
        contenders.Ours.prepare = spoilt
        return timed(*arguments)

    command._time = time


def fails_everywhere() -> None:
    def fail(options: Any) -> None:
        raise UnsupportedError(f"no luck on rank {MPI.COMM_WORLD.rank}")

    command.main = fail


def fails_on_the_last_rank() -> None:
    """With an error of ours; the others wait in MPI for good."""

    def fail(options: Any) -> None:
        if LAST:
            raise UnsupportedError("no luck on the last rank")
        MPI.COMM_WORLD.recv(source=MPI.COMM_WORLD.size - 1)

    command.main = fail


def breaks_on_the_last_rank() -> None:
    """With an error of any other kind."""

    def fail(options: Any) -> None:
        if LAST:
            raise ValueError("not today")
        MPI.COMM_WORLD.recv(source=MPI.COMM_WORLD.size - 1)

    command.main = fail


def main() -> None:
    globals()[sys.argv[1]]()
    cli.main([*BENCH, "--json", sys.argv[2]])


main()
