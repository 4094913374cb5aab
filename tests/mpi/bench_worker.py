"""``ipcreduce`` with something wrong in it: ``... THIS_FILE SCENARIO FILE``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from ipcreduce import cli
from ipcreduce.bench import command, contenders, output, ranks
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


def no_memory_on_the_last_rank() -> None:
    """For the arrays of a size."""
    make = command._Bench._message

    def message(self: Any, nbytes: int) -> Any:
        if LAST:
            raise MemoryError("Unable to allocate them")
        return make(self, nbytes)

    command._Bench._message = message


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


def interrupted_on_the_last_rank() -> None:
    """By Ctrl-C, twice."""

    def fail(options: Any) -> None:
        if LAST:
            put, output.put = output.put, lambda *given: (put(*given), signal.raise_signal(signal.SIGINT))[0]
            signal.raise_signal(signal.SIGINT)
        MPI.COMM_WORLD.recv(source=MPI.COMM_WORLD.size - 1)

    command.main = fail


def interrupted_on_its_way_out() -> None:
    """Where the last rank waits for the others, behind an error of its own."""
    fails_on_the_last_rank()
    if LAST:
        ranks.time.sleep = lambda _: signal.raise_signal(signal.SIGINT)


def no_room_for(descriptor: int, *arguments: str) -> None:
    """Run a command whose rank 0 cannot write there, and say how each rank ends, where that can be seen."""
    seen = os.dup(1)
    if MPI.COMM_WORLD.rank == 0:
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    try:
        cli.main([*arguments])
    except SystemExit as end:
        os.write(seen, f"ended with {end.code}\n".encode())
        raise


def no_room_for_info() -> None:
    no_room_for(1, "info")


def no_room_for_times() -> None:
    no_room_for(1, *BENCH)


def no_room_for_progress() -> None:
    no_room_for(2, *BENCH)


def no_cache_for_a_table() -> None:
    """Rank 0 alone hears of it."""

    def fail(options: Any) -> None:
        output.on_rank_0(save, MPI.COMM_WORLD, "the table")

    def save() -> None:
        raise UnsupportedError("no cache here")

    command.main = fail
    no_room_for(0, *BENCH)


def main() -> None:
    globals()[sys.argv[1]]()
    cli.main([*BENCH, "--json", sys.argv[2]])


main()
