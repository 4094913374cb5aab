"""The code in README.md, CONTRIBUTING.md and docs/ runs, and its checks hold."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import documents

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_every_block_runs(mpirun: Run) -> None:
    pages = documents.pages()
    output = mpirun("tests.sim.documents", 2, *pages).stdout
    pieces = [piece for page in pages for piece in documents.pieces(page)]
    assert len(pieces) > 20
    for piece in pieces:
        verdict = "right" if piece.fragment is None else "a fragment"
        assert f"{piece.page}, line {piece.line}: {verdict}\n" in output


@pytest.mark.parametrize("wrong", ["assert y[0] == 4", "undefined_name"])
def test_a_block_that_fails_is_found(mpirun: Run, tmp_path: Path, wrong: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- not shown:\nx = [3]\n-->\n\n```python\ny = x\n```\n\n```python\n{wrong}\n```\n")
    run = mpirun("tests.sim.documents", 2, page, check=False)
    assert run.returncode != 0
    assert f'File "{page}", line 10' in run.stdout
