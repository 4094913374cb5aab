"""Two turns of tests/tools/failures.py for each kind of failure; ``make failures`` makes twenty."""

from __future__ import annotations

import pytest

from tests.tools import failures


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", failures.KINDS)
def test_the_others_hear_of_it(kind: str, size: int):
    for seed in (1, 2):
        assert failures.turn(kind, size, seed)["wrong"] == ""


@pytest.mark.parametrize("kind", failures.KINDS)
def test_the_others_hear_of_it_on_another_host(kind: str):
    for seed in (1, 2):
        assert failures.turn(kind, 4, seed, hosts=2)["wrong"] == ""


def test_a_turn_that_is_not_right_is_told():
    notes = {"error": "PeerLostError", "text": "expected rank 1 to take part", "close": 0.0}
    assert failures.problems("killed", 1, notes, 0.1, 1) == []
    assert failures.problems("killed", 0, notes, 0.1, 1) != []
    assert failures.problems("stopped", 1, notes, 0.1, 1) != []
    assert failures.problems("killed", 1, notes, 61.1, 1) == ["heard after 61.10 s"]
    assert failures.problems("killed", 1, {**notes, "close": 61.0}, 0.1, 1) == ["close() took 61.0 s"]
    assert failures.problems("raised", 1, {**notes, "error": "PeerFailedError"}, 0.1, 1) != []
