"""The ``info`` command: versions, MPI and its launcher, GPUs, and the backend with the reasons for it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__
from ..communicator import Communicator
from ..cuda import compiler, driver
from ..errors import IpcReduceError
from ..ipc import plan
from ..options import workspace_bytes
from ..ranks.launchers import library
from . import report
from .ranks import Ranks

_PACKAGES = (
    "numpy", "mpi4py", "cuda-core", "cuda-bindings", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12", "ml-dtypes",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("--json", action="store_true", help="for programs")


def main(options: argparse.Namespace, ranks: Ranks) -> None:
    """Run the command. Collective; rank 0 prints. If MPI or GPUs are missing, the report says why."""
    if ranks.rank and ranks.size <= 1:  # the launcher's ranks do not see each other, and its rank 0 reports that
        return
    found = collect(ranks)
    ranks.tell(json.dumps(found, indent=1) if options.json else _text(found))


def collect(ranks: Ranks) -> dict[str, Any]:
    """The report of ``info --json``. Collective; only ``rank`` differs between the ranks."""
    return {
        "ipcreduce": __version__,
        "python": platform.python_version(),
        "packages": report.versions(_PACKAGES),
        "mpi": _mpi(ranks),
        "gpus": _gpus(),
        "cache": _attempt(lambda: str(compiler.cache_directory())),
        "workspace_mb": _attempt(lambda: workspace_bytes() // plan.MB),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("IPCREDUCE_")},
        "ranks": _ranks(),
    }


def _attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except IpcReduceError as error:
        return f"error: {error}"


def _mpi(ranks: Ranks) -> dict[str, Any]:
    """mpi4py's library, the launcher that a shell would find, and the ranks according to launcher and MPI."""
    launch = ranks.launch
    return {
        "library": _attempt(library),
        "launcher": _launcher() if ranks.rank == 0 else "",
        "started_by": launch.name,
        "started_ranks": launch.size,
        "seen_ranks": ranks.size,
        "problem": ranks.mismatch(),
    }


def _launcher() -> str:
    """The path and version of mpirun: the one beside this Python, or else the first on PATH; "" if there is none."""
    beside = str(Path(sys.executable).parent)
    path = shutil.which("mpirun", path=os.pathsep.join([beside, *os.get_exec_path()]))
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{path} (does not run)"
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    if lines and lines[0].startswith("HYDRA"):  # MPICH's launcher, which prints its version in another line
        lines[0] = " ".join(["Hydra", *(line.split()[-1] for line in lines if line.startswith("Version:"))])
    return f"{path} ({lines[0]})" if lines else path


def _gpus() -> dict[str, Any]:
    """The driver, the GPUs and their P2P matrix as this process sees them, or the reason why there are none."""
    try:
        devices = [driver.device_info(ordinal) for ordinal in range(driver.device_count())]
        return {
            "driver": "{}.{}".format(*driver.driver_version()),
            "devices": [
                {
                    "ordinal": device.ordinal,
                    "name": device.name,
                    "uuid": f"GPU-{uuid.UUID(bytes=device.uuid)}",
                    "capability": "{}.{}".format(*device.capability),
                    "memory_gb": round(device.memory_bytes / 2**30, 1),
                    "p2p": [
                        other.ordinal == device.ordinal or driver.can_access_peer(device.ordinal, other.ordinal)
                        for other in devices
                    ],
                }
                for device in devices
            ],
        }
    except IpcReduceError as error:
        return {"none": str(error)}


def _ranks() -> dict[str, Any]:
    """Backend and reasons of a communicator over MPI.COMM_WORLD with device="auto", or why none can be made."""
    try:
        with Communicator(device="auto") as comm:
            return {
                "rank": comm.rank,
                "size": comm.size,
                "backend": comm.backend,
                "description": comm.describe().splitlines()[1:],
            }
    except IpcReduceError as error:
        return {"error": str(error)}


def _text(found: dict[str, Any]) -> str:
    lines = [f"ipcreduce {found['ipcreduce']}, Python {found['python']}"]
    lines.append(", ".join(f"{name} {version}" for name, version in found["packages"].items()))
    mpi, gpus, ranks = found["mpi"], found["gpus"], found["ranks"]
    lines.append(f"MPI: {mpi['library']}; launcher: {mpi['launcher'] or 'no mpirun is on PATH'}")
    started = f"{mpi['started_ranks']} by {mpi['started_by']}" if mpi["started_by"] else "1, by no launcher"
    lines.append(f"ranks: started {started}; seen by MPI {mpi['seen_ranks']}")
    if mpi["problem"]:
        lines.append(f"PROBLEM: {mpi['problem']}")
    if "none" in gpus:
        lines.append(f"no GPU: {gpus['none']}")
    else:
        rows = []
        for device in gpus["devices"]:
            peers = [str(other) for other, access in enumerate(device["p2p"]) if access and other != device["ordinal"]]
            rows.append([
                str(device["ordinal"]), device["name"], device["capability"], f"{device['memory_gb']} GB",
                device["uuid"], " ".join(peers) or "none",
            ])  # fmt: skip
        lines.append(f"GPUs (driver of CUDA {gpus['driver']})")
        lines.append(report.table(("GPU", "name", "capability", "memory", "UUID", "P2P with"), rows))
    if "error" in ranks:
        lines += [] if mpi["problem"] else [f"no communicator: {ranks['error']}"]  # mpi's problem is the same error
    else:
        lines.append(f"{report.ranks_text(ranks['size'])}: backend {ranks['backend']}")
        lines += [f"  {line}" for line in ranks["description"]]
    workspace = found["workspace_mb"]
    lines.append(f"workspace: {f'{workspace} MB a rank' if isinstance(workspace, int) else workspace}")
    lines.append(f"kernel cache: {found['cache']}")
    lines += [f"{name}={value}" for name, value in found["environment"].items()]
    return "\n".join(lines)
