"""Names of runs, such as "ours-eager": an engine, and what it does. Standard library only."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import NamedTuple

ENGINES = ("ours", "fused", "flashinfer", "stock", "nccl")
MEASURED = ("graphs", "alone", "piecewise", "eager", "spawn", "sglang")
TRIALS = {  # by the module that has them
    "restarts": "lives", "pair": "lives", "sleep": "lives", "invariant": "lives",
    "server": "server", "killed": "server",
    **dict.fromkeys(("sglang-server", "sglang-killed", "sglang-sleep"), "sglang_server"),
}  # fmt: skip
MODES = (*MEASURED, *TRIALS)
PROGRAMS = {**TRIALS, "sglang": "sglang_engine"}


class Name(NamedTuple):
    """The all-reduce of an engine, and its mode.

    "ours" is ipcreduce, "fused" ipcreduce with its all-reduce and RMSNorm in one call, "flashinfer" the server's own
    with FlashInfer's call for both, "stock" the server's own, and "nccl" NCCL. Of the modes that are measured "graphs"
    is vLLM's default, "alone" makes no communicator of NCCL, "spawn" has spawned workers, and "sglang" is SGLang with
    its default. The others are trials: they see whether something works.
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

    @property
    def program(self) -> str:
        """The module that runs it."""
        return f"benchmarks.serving.{PROGRAMS.get(self.mode, 'engine')}"

    @property
    def server(self) -> str:
        """The package of the server."""
        return "sglang" if self.mode.startswith("sglang") else "vllm"

    def __str__(self) -> str:
        return self.engine if self.mode == "graphs" else f"{self.engine}-{self.mode}"


def result_path(folder: Path, name: Name, layers: int, turn: int = 1) -> Path:
    """The file of one run; ``turn`` counts runs of the same name."""
    return folder / f"{name}-{layers}-layers-{turn}.json"
