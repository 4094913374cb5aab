"""The code in README.md, CONTRIBUTING.md and docs/ runs, and its checks hold."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shared import documents
from tests.tools import machine

Run = Callable[..., subprocess.CompletedProcess[str]]
GPU = "ipc tests.simulated.cupy"


def test_every_block_runs(mpirun: Run) -> None:
    pages = documents.pages()
    output = mpirun("tests.sim.documents", 2, *pages).stdout
    pieces = [piece for page in pages for piece in documents.pieces(page)]
    assert len(pieces) > 20
    for piece in pieces:
        verdict = "right" if piece.fragment is None else "a fragment"
        assert f"{piece.page}, line {piece.line}: {verdict}\n" in output


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
@pytest.mark.parametrize(("gpus", "arrays"), [(None, GPU), (1, GPU), (0, "host numpy")])
def test_the_first_program(mpirun: Run, tmp_path: Path, page: str, gpus: int | None, arrays: str) -> None:
    """As it is, with GPUs, and with CuPy but no GPU. tests/mpi/test_documents.py runs it without either."""
    program = tmp_path / "app.py"
    program.write_text(documents.first_program(machine.ROOT / page) + "\nprint(comm.backend, comm.xp.__name__)\n")
    env = {"IPCREDUCE_WORKSPACE_MB": "1"} | ({} if gpus is None else {"SIM_DEVICES": str(gpus)})
    lines = mpirun("tests.simulated", 2, program, env=env).stdout.splitlines()
    largest = "" if page == "README.md" else " 1.0"
    assert sorted(lines) == sorted([f"0 1.0{largest}", f"1 1.0{largest}", arrays, arrays])


@pytest.mark.parametrize("wrong", ["assert y[0] == 4", "undefined_name"])
def test_a_block_that_fails_is_found(mpirun: Run, tmp_path: Path, wrong: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- not shown:\nx = [3]\n-->\n\n```python\ny = x\n```\n\n```python\n{wrong}\n```\n")
    run = mpirun("tests.sim.documents", 2, page, check=False)
    assert run.returncode != 0
    assert f'File "{page}", line 10' in run.stdout
