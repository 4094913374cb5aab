"""make release: wheel and sdist of the version that the tree names, checked, and tried in a fresh environment.

At the end it lists what nobody has decided yet. It publishes nothing: ``twine upload dist/*`` does that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.shared import documents
from tests.tools import machine


def release(python: str) -> int:
    """Leave both files in dist/, if all that is asked of them holds. ``python`` has build, pytest and twine."""
    version = version_of_the_tree(machine.ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step("builds the sdist, and the wheel from it", python, "-m", "build", "--outdir", folder, machine.ROOT)
        files = sorted(folder.glob("*"))
        expected = [f"ipcreduce-{version}-py3-none-any.whl", f"ipcreduce-{version}.tar.gz"]
        if [file.name for file in files] != expected:
            sys.exit(
                f"expected {expected}, found {[file.name for file in files]}: is __version__ written as PEP 440 has it?"
            )
        step("checks the metadata", python, "-m", "twine", "check", "--strict", *files)
        try_sdist(files[1], folder, python)
        try_wheel(files[0], folder / "fresh")
        dist = machine.ROOT / "dist"
        dist.mkdir(exist_ok=True)
        for file in files:
            print(shutil.copy(file, dist))
    print("release: before it is published, these are missing:", *(missing(machine.ROOT) or ["none"]), sep="\n  ")
    return 0


def version_of_the_tree(root: Path) -> str:
    """The version in ipcreduce/__init__.py. If CHANGELOG.md has no section of it, the program ends."""
    [version] = re.findall(r'^__version__ = "(.*)"$', (root / "ipcreduce" / "__init__.py").read_text(), re.MULTILINE)
    sections = re.findall(r"^## \[?([^\]\s]+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if version not in sections:
        sys.exit(
            f"ipcreduce/__init__.py has version {version}, and CHANGELOG.md has no section '## {version}'. "
            f"Its sections are: {', '.join(sections) or 'none'}. Rename one of them, or change the version."
        )
    return version


def missing(root: Path) -> list[str]:
    """What a published version needs, and this tree does not have."""
    section = rf"^## {re.escape(version_of_the_tree(root))} - \d{{4}}-\d\d-\d\d$"
    asked = (  # what, the file, and a pattern that is in it once that is there
        ("the addresses for readers, in [project.urls]", "pyproject.toml", r"^\[project\.urls\]\n+[^\n\[]"),
        ("FILES, the address of the files", "setup.py", r'^FILES = "https://'),
        ("an address for private reports", "SECURITY.md", r"^## Reports\n(.|\n)*(https://|@)"),
        ("PUBLISHED = True, for what messages say to install", "ipcreduce/errors.py", r"^PUBLISHED = True"),
        ("the date of this version", "CHANGELOG.md", section),
    )
    return [f"{file}: {what}" for what, file, there in asked if not re.search(there, (root / file).read_text(), re.M)]


def try_sdist(sdist: Path, folder: Path, python: str) -> None:
    """Unpack it, and run the tests of the documents there. They fail if a file is missing that a page names."""
    shutil.unpack_archive(sdist, folder)
    tree = folder / sdist.name.removesuffix(".tar.gz")
    tests = tree / "tests" / "unit" / "test_documents.py"
    step("tests the documents in the unpacked sdist", python, "-m", "pytest", "--quiet", tests, cwd=tree)


def try_wheel(wheel: Path, venv: Path) -> None:
    """Install it in an environment of its own; run ``ipcreduce info``, and the README's first program on two ranks."""
    python, folder = venv / "bin" / "python", venv.parent
    extra = "[mpi]" if machine.find_mpirun(str(python)) is None else ""
    step("makes a fresh environment", sys.executable, "-m", "venv", venv)
    step("installs the wheel", python, "-m", "pip", "install", "--quiet", f"{wheel}{extra}")
    step("runs it", venv / "bin" / "ipcreduce", "info", cwd=folder)
    program = folder / "app.py"
    program.write_text(documents.first_program(machine.ROOT / "README.md"))
    try:
        launcher = machine.mpirun(str(python))
    except RuntimeError as error:
        sys.exit(f"release: the README's first program needs an MPI: {error}")
    step("runs the README's first program on two ranks", *launcher, "-n", "2", python, program, cwd=folder)


def step(what: str, *command: str | Path, cwd: Path | None = None) -> None:
    """A command that must succeed, outside the tree's own path."""
    print(f"release: {what}", flush=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if status := subprocess.run(command, cwd=cwd, env=environ).returncode:
        sys.exit(f"release: exit code {status} of the step that {what}")
