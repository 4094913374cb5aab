"""Copies of the project, in which mutants are made and commands run."""

from __future__ import annotations

import compileall
import py_compile
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutants import Mutant, words
from tests.tools import machine, processes

_LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", ".coverage*", "_build", "build", "dist", "*.egg-info")
_PACKAGES = ("ipcreduce", "tests")


class Run(NamedTuple):
    """The end of a command. ``status``: its exit code, or None if it hung."""

    status: int | None
    seconds: float
    output: str


class Tree:
    """A copy of the project in the folder ``root``; what its commands leave behind is in the folder beside it."""

    def __init__(self, root: Path) -> None:
        self.root, self._temporary = root, root.with_name("temporary")
        shutil.copytree(machine.ROOT, root, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        self._temporary.mkdir(exist_ok=True)
        for package in _PACKAGES:  # by checksum: a mutant can have the time and size of what it replaces
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(root / package, quiet=1, invalidation_mode=mode)

    def run(self, command: str, seconds: float) -> Run:
        """Run a command in the copy for up to ``seconds``. None of its processes outlives it."""
        own, line = words(command)
        token = f"MUTANT_OF_IPCREDUCE={uuid.uuid4()}"
        environ = {name: value for name, value in machine.environment().items() if not name.startswith("COVERAGE")}
        environ |= {**own, **dict([token.split("=")]), "PYTHONPATH": str(self.root)}
        environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self._temporary)}
        started = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:  # a pipe would keep us waiting for any process that holds it
            process = subprocess.Popen(
                line, cwd=self.root, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            status = None
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                processes.kill(token)
                process.wait()
            output.seek(0)
            return Run(status, time.monotonic() - started, output.read())

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """The mutant, in the block. :raises ValueError: if its file does not have the old text exactly once."""
        path = self.root / mutant.file
        before = path.read_text()
        if before.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} has {before.count(mutant.old)} of {mutant.old!r}, not one")
        path.write_text(before.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            path.write_text(before)
