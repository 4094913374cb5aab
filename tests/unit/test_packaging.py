"""The wheel holds every module, the type marker and all kernel sources; each way of installing finds the kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree, as far as it is packaged."""
    path = tmp_path / "tree"
    for folder in ("ipcreduce", "kernels"):
        shutil.copytree(ROOT / folder, path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, path)
    return path


@pytest.fixture
def build(tree: Path) -> Callable[[str], Path]:
    """build("wheel") or build("editable"): what pip makes of the tree, and unpacks."""
    pytest.importorskip("setuptools", minversion="77")

    def built(kind: str) -> Path:
        program = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
        subprocess.run([sys.executable, "-c", program], cwd=tree, check=True)
        [wheel] = tree.glob("dist/*.whl")
        return wheel

    return built


def test_the_wheel_is_complete(build: Callable[[str], Path]):
    found = set(zipfile.ZipFile(build("wheel")).namelist())
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("ipcreduce/**/*.py")}
    kernels = {f"ipcreduce/kernels/{path.name}" for path in ROOT.glob("kernels/*.cu*")}
    assert kernels
    assert modules | kernels | {"ipcreduce/py.typed"} <= found


# ---- where the kernels are, beside another project's package named kernels: Hugging Face's has that name
PROGRAM = """
import site, sys
directory, libraries, *first = sys.argv[1:]
sys.path[:0] = first
site.addsitedir(directory)
sys.path.append(libraries)  # NumPy, and nothing that is editable there
from ipcreduce.cuda import compiler
from ipcreduce.errors import UnsupportedError
try:
    print(compiler.kernel_directory())
except UnsupportedError as error:
    print(error)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with that package in it."""
    path = tmp_path / "site"
    (path / "kernels").mkdir(parents=True)
    (path / "kernels" / "__init__.py").touch()
    return path


def kernels_found(site: Path, *first: Path) -> str:
    """The kernels' directory, or the error, of a program with these on its path and only libraries of ours."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, site, sysconfig.get_path("purelib"), *first]
    return subprocess.run(command, cwd=site, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_a_wheel_finds_its_own_kernels(build: Callable[[str], Path], site: Path):
    zipfile.ZipFile(build("wheel")).extractall(site)
    assert kernels_found(site) == str(site / "ipcreduce" / "kernels")


def test_an_editable_install_finds_those_of_its_tree(build: Callable[[str], Path], site: Path, tree: Path):
    zipfile.ZipFile(build("editable")).extractall(site)
    assert kernels_found(site) == str(tree / "kernels")


def test_a_source_tree_finds_its_own(build: Callable[[str], Path], site: Path, tree: Path, tmp_path: Path):
    """Also where another tree is installed."""
    assert kernels_found(site, tree) == str(tree / "kernels")
    zipfile.ZipFile(build("editable")).extractall(site)
    mine = shutil.copytree(tree, tmp_path / "mine")
    assert kernels_found(site, mine) == str(mine / "kernels")


def test_kernels_that_are_missing_are_an_error_with_advice(build: Callable[[str], Path], site: Path):
    zipfile.ZipFile(build("wheel")).extractall(site)
    shutil.rmtree(site / "ipcreduce" / "kernels")
    found = kernels_found(site)
    assert found.startswith("the kernels' sources are missing: expected one_shot.cu and sync.cuh in ")
    assert str(site / "ipcreduce" / "kernels") in found
    assert "pip install --force-reinstall" in found
