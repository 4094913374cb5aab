"""Deliberate faults of the whole project, each with the command that has to fail by it.

``python -m tests.mutants`` makes them, one after the other, and says what has found each. They are in the text files
here, whose form tables.py describes. Those of the kernels that are found by threads in one process are in
tests/sim/faults.py.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from tests.tools import machine


@dataclass(frozen=True)
class Mutant:
    """One change of the project: ``old``, which ``file`` has exactly once, becomes ``new``; then ``command`` fails.

    :param name: what is broken.
    :param command: as :func:`words` takes it.
    """

    name: str
    file: str
    old: str
    new: str
    command: str


def words(command: str) -> tuple[dict[str, str], list[str]]:
    """A command's environment and words.

    :param command: ``NAME=value ... pytest TEST``, or ``... mpirun -n RANKS PROGRAM ARGUMENT...``, where the program is
        a script or a module.
    """
    environ: dict[str, str] = {}
    first, *rest = shlex.split(command)
    while "=" in first:
        name, _, environ[name] = first.partition("=")
        first, *rest = rest
    if first == "pytest":
        return environ, [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *rest]
    if first != "mpirun":
        raise ValueError(f"expected pytest or mpirun; found {first!r} in {command!r}")
    option, ranks, program, *arguments = rest
    named = [program] if program.endswith(".py") else ["-m", program]
    return environ, [*machine.mpirun(sys.executable), option, ranks, sys.executable, *named, *arguments]
