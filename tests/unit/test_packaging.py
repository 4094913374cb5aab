"""The wheel and the sdist are complete; each way of installing finds the kernels; an editable one shows its types."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shared import documents
from tests.tools.machine import ROOT

FOLDERS = (".ci", "benchmarks", "docs", "ipcreduce", "kernels", "mpi_examples", "tests")
FILES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree."""
    path = tmp_path / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, path / folder, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for file in FILES:
        shutil.copy(ROOT / file, path)
    return path


@pytest.fixture
def build(tree: Path) -> Callable[[str], Path]:
    """build("wheel"), build("editable") or build("sdist"): what pip makes of the tree, and unpacks."""
    pytest.importorskip("setuptools", minversion="77")

    def built(kind: str) -> Path:
        program = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
        subprocess.run([sys.executable, "-c", program], cwd=tree, check=True)
        [built] = tree.glob("dist/*")
        return built

    return built


def test_the_wheel_is_complete(build: Callable[[str], Path]):
    found = set(zipfile.ZipFile(build("wheel")).namelist())
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("ipcreduce/**/*.py")}
    kernels = {f"ipcreduce/kernels/{path.name}" for path in ROOT.glob("kernels/*.cu*")}
    assert kernels
    assert modules | kernels | {"ipcreduce/py.typed"} <= found


def test_the_sdist_has_the_tests_and_all_that_they_read(build: Callable[[str], Path], tree: Path):
    (tree / "docs" / "_build").mkdir()
    (tree / "docs" / "_build" / "index.html").touch()
    files = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    with tarfile.open(build("sdist")) as sdist:
        found = {Path(*Path(name).parts[1:]) for name in sdist.getnames()}
    assert files - found == {Path("docs/_build/index.html")}
    assert {page.relative_to(ROOT) for page in documents.pages()} <= found


def test_only_the_extras_for_gpus_and_tests_need_cuda(build: Callable[[str], Path]):
    wheel = zipfile.ZipFile(build("wheel"))
    [metadata] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    required = re.findall(r"^Requires-Dist: (.*)$", wheel.read(metadata).decode(), re.MULTILINE)
    cuda = [line.partition(";") for line in required if re.match(r"cuda|cupy|nvidia", line)]
    assert {name.split(">")[0] for name, _, _ in cuda} >= {"cuda-core", "cupy-cuda12x", "cupy-cuda13x"}
    extras = {re.sub(r".*extra == ['\"]([\w-]+)['\"].*", r"\1", marker) for _, _, marker in cuda}
    assert extras == {"cuda12", "cuda13", "nccl-cuda12", "nccl-cuda13", "test", "test-cuda12", "test-tools"}


def test_the_description_has_no_relative_links(build: Callable[[str], Path]):
    """A package index shows it without the tree."""
    wheel = zipfile.ZipFile(build("wheel"))
    [metadata] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    text = wheel.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "ipcreduce is a fast all-reduce" in text
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []


def test_links_and_pictures_of_the_description():
    found = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = "![a picture](a/b.png) [a page](docs/a.md#part), [a site](https://b.invalid)"
    assert found(text, "") == " a page, [a site](https://b.invalid)"
    assert found(text, "https://a.invalid/x/blob/main/") == (
        "![a picture](https://a.invalid/x/raw/main/a/b.png) [a page](https://a.invalid/x/blob/main/docs/a.md#part), "
        "[a site](https://b.invalid)"
    )


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


def test_an_editable_install_is_a_directory_on_the_path(build: Callable[[str], Path], site: Path, tree: Path):
    """mypy and editors read a .pth file's directories, and no import hooks. It holds nothing but the package."""
    zipfile.ZipFile(build("editable")).extractall(site)
    [pth] = site.glob("*.pth")
    directory = Path(pth.read_text().strip())
    assert [path.name for path in directory.iterdir()] == ["ipcreduce"]
    for name in ("__init__.py", "py.typed", "graphs/graph.py"):
        assert (directory / "ipcreduce" / name).resolve() == tree / "ipcreduce" / name


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
    assert found.startswith("the kernels' sources are missing: neither ")
    assert str(site / "ipcreduce" / "kernels") in found
    assert "pip install --force-reinstall" in found


def test_a_zip_has_no_kernels_for_the_compiler(build: Callable[[str], Path], site: Path):
    found = kernels_found(site, build("wheel"))
    assert found.startswith("the kernels' sources cannot be read, as ipcreduce is imported from a zip")
    assert str(build("wheel") / "ipcreduce") in found
    assert "Unpack the zip" in found
