"""The models of the protocols: small ones have no wrong state, and a search finds what is broken on purpose."""

from __future__ import annotations

import re

import pytest

from tests.models import __main__ as models
from tests.models.table import BREAKS, SEARCHES, Search

needs_spin = pytest.mark.skipif(models.missing() is not None, reason=str(models.missing()))
SMALL = [
    next(one for one in SEARCHES if (one.model, one.n) == (model, 2))
    for model in ("one_shot", "two_shot", "direct", "mixed", "spread", "tiles", "resynchronise", "close")
]


@needs_spin
@pytest.mark.parametrize("one", SMALL, ids=lambda one: one.model)
def test_no_state_is_wrong(one: Search) -> None:
    result = models.search(one)
    assert result.right, result
    assert result.states > 10


@needs_spin
@pytest.mark.parametrize(("model", "name"), [("one_shot", "NO_RESTORE"), ("resynchronise", "CLEAR_FIRST")])
def test_a_break_is_found(model: str, name: str) -> None:
    (one,) = (one for one in BREAKS if (one.model, one.broken) == (model, name))
    result = models.search(one)
    assert result.right
    assert result.found


@needs_spin
def test_a_search_that_is_cut_short_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DEPTH", 20)
    result = models.search(SMALL[0])
    assert not result.found
    assert not result.right


def test_every_break_in_a_model_is_in_the_table() -> None:
    written = {name for path in models.HERE.glob("*.pml") for name in re.findall(r"BREAK_(\w+)", path.read_text())}
    assert written == {one.broken for one in BREAKS}
    assert {one.model for one in SEARCHES} == {one.model for one in BREAKS}


def test_the_runner_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tests.models"])
    monkeypatch.setenv("PATH", "")
    assert models.main() == 1
    assert capsys.readouterr().err == "spin is not installed: apt-get install spin\n"
