"""The wheel holds every module, the type marker and all kernel sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.machine import ROOT


def test_the_wheel_is_complete(tmp_path: Path):
    pytest.importorskip("setuptools", minversion="77")
    for folder in ("ipcreduce", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True)

    [wheel] = tmp_path.glob("dist/*.whl")
    found = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("ipcreduce/**/*.py")}
    kernels = {f"ipcreduce/kernels/{path.name}" for path in ROOT.glob("kernels/*.cu*")}
    assert kernels
    assert modules | kernels | {"ipcreduce/py.typed"} <= found
