"""Names of runs, such as "ours-eager": an engine, and how it runs. Standard library only."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import NamedTuple

ENGINES = ("ours", "fused", "stock", "nccl")
MODES = ("graphs", "piecewise", "eager", "spawn")


class Name(NamedTuple):
    """The all-reduce of an engine, and its mode: "graphs" is vLLM's default, "spawn" has spawned workers besides.

    "ours" is ipcreduce, "fused" ipcreduce with its pass for RMSNorm, "stock" vLLM's own, and "nccl" NCCL.
    """

    engine: str
    mode: str

    @classmethod
    def of(cls, text: str) -> Name:
        """Read one. :raises ArgumentTypeError: if there is no such engine or mode."""
        engine, _, mode = text.partition("-")
        if engine not in ENGINES or (mode or "graphs") not in MODES:
            engines, modes = ", ".join(ENGINES), ", -".join(MODES[1:])
            raise ArgumentTypeError(f"{text!r} is no run. Name one of {engines}, alone or with one of -{modes}")
        return cls(engine, mode or "graphs")

    def __str__(self) -> str:
        return self.engine if self.mode == "graphs" else f"{self.engine}-{self.mode}"


def result_path(folder: Path, name: Name, layers: int) -> Path:
    return folder / f"{name}-{layers}-layers.json"
