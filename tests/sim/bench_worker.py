"""Odd contenders: ``... THIS_FILE RESULT.json [ours | graph | misplaced | breaks | norm_ours | norm_pair]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

import ipcreduce
from ipcreduce import cli
from ipcreduce.bench import command, contenders, norms

QUICK = ["--replays", "2", "--calls", "5"]
COMMAND = ["bench", "--mode", "graph", *QUICK, "--dtype", "float32"]


class Wrong(contenders.Contender):
    """Does nothing."""

    name = "wrong"

    def prepare(self, source: Any, target: Any) -> Callable[[], Any]:
        return lambda: None


class Elsewhere(contenders.Contender):
    """Right, in an array of its own."""

    name = "elsewhere"

    def __init__(self) -> None:
        self._comm = ipcreduce.Communicator()

    def prepare(self, source: Any, target: Any) -> Callable[[], Any]:
        own = source.copy()
        self._own, self._target = own, target
        return lambda: self._comm.allreduce(source, out=own)

    def collect(self) -> None:
        self._target[...] = self._own


class Misplaced(Elsewhere):
    """Right, but for the two halves of the result, which change places."""

    name = "misplaced"

    def collect(self) -> None:
        half = self._own.size // 2
        self._target[:half] = self._own[half:]
        self._target[half:] = self._own[:half]


class Breaks(Elsewhere):
    """Cannot be captured on the last rank from the second size on."""

    name = "breaks"
    captures = 0

    def captured(self, call: Callable[[], Any], calls: int) -> Callable[[], None]:
        self.captures += 1
        if self.captures > 1 and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
            raise ValueError("not today")
        return super().captured(call, calls)


def run(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    """True if the command ends well. Otherwise every rank says how."""
    try:
        command.main(parser.parse_args(arguments))
    except ipcreduce.IpcReduceError as error:
        print(f"{MPI.COMM_WORLD.rank}: {error}")
        return False
    return True


def main() -> None:
    contenders.PEERS.update({"wrong": lambda mpi: Wrong(), "elsewhere": lambda mpi: Elsewhere()})
    contenders.PEERS.update({"misplaced": lambda mpi: Misplaced(), "breaks": lambda mpi: Breaks()})
    if sys.argv[2:] == ["misplaced"]:  # of twice as many elements as are drawn, and a power of two
        size = ["--dtype", "int8", "--smallest", "128K", "--largest", "128K"]
        cli.main([*COMMAND, "--peers", "misplaced", *size, "--json", sys.argv[1]])
        return
    if sys.argv[2:] == ["breaks"]:
        cli.main([*COMMAND, "--peers", "breaks", "--smallest", "64", "--largest", "128", "--json", sys.argv[1]])
        return
    if sys.argv[2:] == ["ours"]:
        contenders.Ours.prepare = Wrong.prepare
    if sys.argv[2:] == ["graph"]:
        contenders.Ours.captured = lambda self, call, calls: lambda: None
    if sys.argv[2:] == ["norm_ours"]:
        norms.Ours.prepare = Wrong.prepare
    if sys.argv[2:] == ["norm_pair"]:
        norms.Pair.prepare = Wrong.prepare
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    kept = sys.argv[1]
    if sys.argv[2:] in (["norm_ours"], ["norm_pair"]):
        run(parser, ["--op", "allreduce_rmsnorm", "--rows", "2", "--hidden", "64", "--mode", "graph", *QUICK])
        return
    wanted = ["--smallest", "64", "--largest", "64", *QUICK, "--dtype", "float32", "--json", kept]
    if run(parser, [*wanted, "--peers", "wrong,elsewhere"]) and MPI.COMM_WORLD.rank == 0:
        print("peers", [sorted(row["peers_us"]) for row in json.loads(Path(kept).read_text())["rows"]])


main()
