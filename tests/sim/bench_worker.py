"""Contenders that are wrong, or leave their result elsewhere: ``... THIS_FILE RESULT.json [ours | graph]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import command, contenders


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


def main() -> None:
    contenders.PEERS.update({"wrong": lambda mpi: Wrong(), "elsewhere": lambda mpi: Elsewhere()})
    if sys.argv[2:] == ["ours"]:
        contenders.Ours.prepare = Wrong.prepare
    if sys.argv[2:] == ["graph"]:
        contenders.Ours.captured = lambda self, call, calls: lambda: None
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    kept = sys.argv[1]
    wanted = ["--smallest", "64", "--largest", "64", "--replays", "2", "--dtype", "float32", "--json", kept]
    try:
        command.main(parser.parse_args([*wanted, "--peers", "wrong,elsewhere"]))
    except ipcreduce.IpcReduceError as error:
        print(f"{MPI.COMM_WORLD.rank}: {error}")
        return
    if MPI.COMM_WORLD.rank == 0:
        print("peers", [sorted(row["peers_us"]) for row in json.loads(Path(kept).read_text())["rows"]])


main()
