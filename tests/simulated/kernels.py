"""Builds and runs kernels.cpp and norms.cpp, tests of kernels alone, optionally under ThreadSanitizer."""

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
    """A build of one kernel for sums.

    ``members``: the arrays in the table of gather or scatter. ``scale`` and ``cluster``: of fused kernels, the first a
    code of rmsnorm.cuh.
    """

    kernel: str
    dtype: str = "bfloat16"
    whole: bool = True
    depth: int = 1
    members: int = 0
    scale: int = -1
    cluster: int = 1

    @property
    def further(self) -> dict[str, str]:
        """The macros that not all kernels have."""
        found = {"MEMBERS": str(self.members)} if self.members else {}
        return found | ({"SCALE": str(self.scale), "CLUSTER": str(self.cluster)} if self.scale >= 0 else {})


class Sources(NamedTuple):
    """Directories of the kernels, of the stand-in for sync.cuh, and of the builds: by default the project's own."""

    kernels: Path = compiler.KERNELS
    include: Path = compiler.INCLUDE
    builds: Path | None = None


@functools.cache
def program(tests: str, tsan: bool) -> Path:
    """The executable of "kernels" or "norms"; the runtime in it is never instrumented (see runtime.cpp)."""
    builds, name = compiler.builds_directory(), "tsan" if tsan else "plain"
    source, macro = compiler.SIM / "runtime.cpp", ["-DSIM_TSAN"] if tsan else []
    runtime = compiler.gxx(builds / f"runtime-{name}.o", [source], "-c", "-O2", *macro)
    flags = compiler.TSAN if tsan else ()
    return compiler.gxx(builds / f"{tests}-{name}", [compiler.SIM / f"{tests}.cpp", runtime], "-rdynamic", *flags)


@functools.cache
def tsan_launcher() -> tuple[str, ...]:
    """The command prefix of a program under ThreadSanitizer: older versions need address randomisation switched off.

    :raises RuntimeError: if it runs with no prefix; the message is its output.
    """
    problem = ""
    for launcher in ((), ("setarch", "-R")):
        try:
            done = subprocess.run([*launcher, program("kernels", True)], capture_output=True, text=True)
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
    """Run kernels.cpp in this mode. Returns the finding, one of FINDINGS, and the output."""
    arguments = mode, ranks, operations, packets, seed, seconds
    return _run("kernels", arguments, libraries, tsan, sources, {"SIM_SPLIT_PACKETS": "1"} if split else {})


def run_norms(
    libraries: Sequence[Library], *, ranks: int, operations: int, seed: int = 1, tsan: bool = False,
    sources: Sources = Sources(),  # noqa: B008 - immutable
) -> tuple[str, str]:  # fmt: skip
    """Run norms.cpp: see :func:`run`."""
    return _run("norms", (ranks, operations, seed), libraries, tsan, sources, {})


def _run(
    tests: str, arguments: tuple[object, ...], libraries: Sequence[Library], tsan: bool, sources: Sources,
    environ: dict[str, str],
) -> tuple[str, str]:  # fmt: skip
    def build(library: Library) -> Path:
        return compiler.build_kernel(
            library.kernel,
            library.dtype,
            "sum",
            whole=library.whole,
            depth=library.depth,
            tsan=tsan,
            further=library.further,
            directory=sources.builds,
            kernels=sources.kernels,
            include=sources.include,
        )

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        built = list(compilers.map(build, libraries))
    done = subprocess.run(
        [*(tsan_launcher() if tsan else ()), program(tests, tsan), *map(str, arguments), *built],
        env={"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"} | environ,
        capture_output=True,
        text=True,
    )
    return FINDINGS.get(done.returncode, f"exit code {done.returncode}"), done.stdout + done.stderr
