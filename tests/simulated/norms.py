"""Builds and runs norms.cpp, tests of the fused kernels alone, optionally under ThreadSanitizer."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.simulated import compiler
from tests.simulated.kernels import FINDINGS, Sources, tsan_launcher


class Library(NamedTuple):
    """A build of one fused kernel for bfloat16. ``scale``: a code of rmsnorm.cuh."""

    kernel: str
    cluster: int = 1
    scale: int = 0
    depth: int = 1


@functools.cache
def program(tsan: bool) -> Path:
    """The executable; the runtime in it is never instrumented (see runtime.cpp)."""
    builds, name = compiler.builds_directory(), "tsan" if tsan else "plain"
    source, macro = compiler.SIM / "runtime.cpp", ["-DSIM_TSAN"] if tsan else []
    runtime = compiler.gxx(builds / f"runtime-{name}.o", [source], "-c", *macro)
    flags = compiler.TSAN if tsan else ()
    return compiler.gxx(builds / f"norms-{name}", [compiler.SIM / "norms.cpp", runtime], "-rdynamic", *flags)


def run(
    libraries: Sequence[Library], *, ranks: int, operations: int, seed: int = 1, tsan: bool = False,
    sources: Sources = Sources(),  # noqa: B008 - immutable
) -> tuple[str, str]:  # fmt: skip
    """Run norms.cpp. Returns the finding, one of FINDINGS, and the output."""

    def build(library: Library) -> Path:
        return compiler.build_kernel(
            library.kernel,
            "bfloat16",
            "sum",
            depth=library.depth,
            tsan=tsan,
            further={"SCALE": str(library.scale), "CLUSTER": str(library.cluster)},
            directory=sources.builds,
            kernels=sources.kernels,
            include=sources.include,
        )

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        built = list(compilers.map(build, libraries))
    done = subprocess.run(
        [*(tsan_launcher() if tsan else ()), program(tsan), *map(str, (ranks, operations, seed)), *built],
        env={"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
        capture_output=True,
        text=True,
    )
    return FINDINGS.get(done.returncode, f"exit code {done.returncode}"), done.stdout + done.stderr
