"""Builds and runs kernels.cpp, tests of the kernels alone, optionally under ThreadSanitizer."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.simulated import compiler

DTYPES = ("float32", "float64", "int8", "int32", "int64")  # those with a reference in kernels.cpp
FINDINGS = {
    0: "nothing",
    3: "value",
    4: "canary",
    5: "timeout",
    6: "unequal bits",
    7: "not at rest",
    8: "hang",
    9: "verdict",
    -signal.SIGABRT: "simulator",
    66: "ThreadSanitizer",
}


class Library(NamedTuple):
    """A build of one kernel for sums. ``members``: the arrays in the table of gather or scatter."""

    kernel: str
    dtype: str
    whole: bool = True
    depth: int = 1
    members: int = 0


class Sources(NamedTuple):
    """Directories of the kernels, of the stand-in for sync.cuh, and of the builds: by default the project's own."""

    kernels: Path = compiler.KERNELS
    include: Path = compiler.INCLUDE
    builds: Path | None = None


@functools.cache
def program(tsan: bool) -> Path:
    """The executable; the runtime in it is never instrumented (see runtime.cpp)."""
    builds, name = compiler.builds_directory(), "tsan" if tsan else "plain"
    source, macro = compiler.SIM / "runtime.cpp", ["-DSIM_TSAN"] if tsan else []
    runtime = compiler.gxx(builds / f"runtime-{name}.o", [source], "-c", "-O2", *macro)
    flags = compiler.TSAN if tsan else ()
    return compiler.gxx(builds / f"kernels-{name}", [compiler.SIM / "kernels.cpp", runtime], "-rdynamic", *flags)


@functools.cache
def tsan_launcher() -> tuple[str, ...]:
    """The command prefix of a program under ThreadSanitizer: older versions need address randomisation switched off.

    :raises RuntimeError: if it runs with no prefix; the message is its output.
    """
    problem = ""
    for launcher in ((), ("setarch", "-R")):
        try:
            done = subprocess.run([*launcher, program(True)], capture_output=True, text=True)
            if done.returncode == 2:  # its usage
                return launcher
            problem = done.stderr
        except OSError as error:
            problem = str(error)
    raise RuntimeError(f"ThreadSanitizer does not run here: {problem}")


def run(
    mode: str,
    libraries: Sequence[Library],
    *,
    ranks: int,
    operations: int,
    packets: int = 96,
    seed: int = 1,
    seconds: float = 40,
    tsan: bool = False,
    split: bool = False,
    sources: Sources = Sources(),  # noqa: B008 - immutable
) -> tuple[str, str]:
    """Run kernels.cpp. Returns the finding, one of FINDINGS, and the output."""

    def build(library: Library) -> Path:
        return compiler.build_kernel(
            library.kernel,
            library.dtype,
            "sum",
            whole=library.whole,
            depth=library.depth,
            tsan=tsan,
            further={"MEMBERS": str(library.members)} if library.members else {},
            directory=sources.builds,
            kernels=sources.kernels,
            include=sources.include,
        )

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        built = list(compilers.map(build, libraries))
    done = subprocess.run(
        [
            *(tsan_launcher() if tsan else ()),
            program(tsan),
            *map(str, (mode, ranks, operations, packets, seed, seconds)),
            *built,
        ],
        env={"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", **({"SIM_SPLIT_PACKETS": "1"} if split else {})},
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    return FINDINGS.get(done.returncode, f"exit code {done.returncode}"), output
