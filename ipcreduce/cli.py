"""The command line: ``python -m ipcreduce info``, ``bench`` and ``tune``.

``info`` shows versions, GPUs and the backend, with the reasons for it. ``bench`` times all-reduces beside other
libraries. ``tune`` finds the fastest kernel and grid for each message size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from importlib import metadata
from typing import Any

from . import __version__
from .bench import command as bench
from .bench import report, tune
from .cuda import compiler, driver
from .errors import IpcReduceError
from .ipc import plan
from .ipc.options import workspace_bytes

_PACKAGES = (
    "numpy", "mpi4py", "cuda-core", "cuda-bindings", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12", "ml-dtypes",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Exits with status 2 if the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="python -m ipcreduce", description="All-reduce for the GPUs of one host.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, GPUs, P2P, backend and why (also under mpirun)")
    info.add_argument("--json", action="store_true", help="for programs")
    timed = commands.add_parser("bench", help="times beside peers and the machine's limit (under mpirun)")
    bench.add_arguments(timed)
    tuned = commands.add_parser("tune", help="measures what is quickest on this machine, and keeps it (under mpirun)")
    tune.add_arguments(tuned)
    options = parser.parse_args(arguments)
    if options.command in ("bench", "tune"):
        _run(bench.main if options.command == "bench" else tune.main, options)
        return
    found = collect()
    if found["ranks"] and found["ranks"]["rank"] != 0:
        return
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found)


def _run(command: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    try:
        command(options)
    except IpcReduceError as error:
        sys.exit(f"ipcreduce: {error}")
    except Exception:  # perhaps on this rank only: abort, or the others would wait for the timeout
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(0.3)  # MPICH's launcher drops output that is still unread when a rank aborts
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


def collect() -> dict[str, Any]:
    """Gather the report of ``info --json``. Collective under mpirun; only ``rank`` differs between the ranks."""
    return {
        "ipcreduce": __version__,
        "python": platform.python_version(),
        "packages": _versions(),
        "gpus": _gpus(),
        "cache": _attempt(lambda: str(compiler.cache_directory())),
        "workspace_mb": _attempt(lambda: workspace_bytes() // plan.MB),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("IPCREDUCE_")},
        "ranks": _ranks(),
    }


def _attempt(function: Any) -> Any:
    try:
        return function()
    except IpcReduceError as error:
        return f"error: {error}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> dict[str, Any]:
    """Return the driver, the GPUs and their P2P matrix as this process sees them, or the reason for their absence."""
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
    """Return backend and reasons of a communicator over MPI.COMM_WORLD with device="auto"; empty without MPI."""
    from .communicator import Communicator

    try:
        with Communicator(device="auto") as comm:
            return {
                "rank": comm.rank,
                "size": comm.size,
                "backend": comm.backend,
                "description": comm.describe().splitlines()[1:],
            }
    except IpcReduceError as error:
        print(f"ipcreduce: {error}", file=sys.stderr)
        return {}


def _show(found: dict[str, Any]) -> None:
    print(f"ipcreduce {found['ipcreduce']}, Python {found['python']}")
    print(", ".join(f"{name} {version}" for name, version in found["packages"].items()))
    gpus = found["gpus"]
    if "none" in gpus:
        print(f"no GPU: {gpus['none']}")
    else:
        rows = []
        for device in gpus["devices"]:
            peers = [str(other) for other, access in enumerate(device["p2p"]) if access and other != device["ordinal"]]
            rows.append([
                str(device["ordinal"]), device["name"], device["capability"], f"{device['memory_gb']} GB",
                device["uuid"], " ".join(peers) or "none",
            ])  # fmt: skip
        print(f"GPUs (driver of CUDA {gpus['driver']})")
        print(report.table(("GPU", "name", "capability", "memory", "UUID", "P2P with"), rows))
    ranks = found["ranks"]
    if ranks:
        print(f"{ranks['size']} rank(s): backend {ranks['backend']}")
        for line in ranks["description"]:
            print(f"  {line}")
    print(f"workspace: {found['workspace_mb']} MB a rank; kernel cache: {found['cache']}")
    for name, value in found["environment"].items():
        print(f"{name}={value}")
