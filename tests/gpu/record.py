"""What every result kept under benchmarks/results/ begins with."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from typing import Any

from ipcreduce.cuda import driver


def header(command: list[str]) -> dict[str, Any]:
    """Machine, versions, date and command."""
    gpus = [driver.device_info(ordinal) for ordinal in range(driver.device_count())]
    versions = {"python": platform.python_version()}
    for name in ("cuda-bindings", "cuda-core", "cupy-cuda13x", "cupy-cuda12x", "mpi4py", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    version = ".".join(map(str, driver.driver_version()))
    return {
        "machine": {"gpus": [gpu.name for gpu in gpus], "driver_cuda": version},
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(command),
    }
