"""How Sphinx builds the documents: ``make docs``. It needs no GPU and no MPI."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import sphinx.application

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import results  # noqa: E402

import ipcreduce  # noqa: E402

project, author, copyright = "ipcreduce", "the ipcreduce authors", "the ipcreduce authors, Apache-2.0"
release = version = ipcreduce.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ipcreduce {release}"

myst_heading_anchors = 3  # links to headings, as forges make them
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"


def put_in_runs(_: sphinx.application.Sphinx, page: str, source: list[str]) -> None:
    """Puts the table of benchmarks/results into validation.md, in the place of a comment."""
    if page == "validation":
        place = "<!-- table of benchmarks/results -->"
        if source[0].count(place) != 1:
            raise ValueError(f"docs/validation.md must have one line {place}")
        source[0] = source[0].replace(place, results.run_table())


def put_fields_apart(*arguments: object) -> None:
    """Begins a paragraph at each field of a docstring: ``:raises ...:`` may stand in a line with a sentence."""
    lines = arguments[-1]
    assert isinstance(lines, list)
    text = "\n".join(lines)
    lines[:] = re.sub(r"(?<=[.:]) (?=:(?:raises|param|returns)\b)", "\n\n", text).splitlines()


def setup(app: sphinx.application.Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", put_in_runs)
    app.connect("autodoc-process-docstring", put_fields_apart)
