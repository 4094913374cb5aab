"""Two turns of tests/tools/failures.py for each kind of failure; ``make failures`` makes twenty."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import failures, machine, processes


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("kind", failures.KINDS)
def test_the_others_hear_of_it(kind: str, size: int):
    for seed in (1, 2):
        assert failures.turn(kind, size, seed)["wrong"] == ""


@pytest.mark.parametrize("kind", failures.KINDS)
def test_the_others_hear_of_it_on_another_host(kind: str):
    for seed in (1, 2):
        assert failures.turn(kind, 4, seed, hosts=2)["wrong"] == ""


ENDS = {
    "raise KeyError('weights')": "its program ended with KeyError: 'weights', after its call 1",
    "raise ValueError('/data/\\udcff')": r"its program ended with ValueError: /data/\udcff, after its call 1",
    "pass": "its program ended, after its call 1",
    "raise SystemExit(3)": "its program ended, after its call 1",
    "comm.close()": "it closed the communicator, after its call 1",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_program_is_told(tmp_path: Path, end: str):
    program = f"""
import sys, numpy as np
from ipcreduce import Communicator, PeerLostError
from tests.shared.by_files import ByFiles
comm = Communicator(ByFiles({str(tmp_path)!r}, sys.argv[1], "2"), timeout=3600)
comm.allreduce(np.ones(3))
if comm.rank == 1:
    {end}
else:
    try:
        comm.allreduce(np.ones(3))
    except PeerLostError as error:
        print(error)
"""
    environ = machine.environment() | {"CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)], cwd=machine.ROOT, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        heard = ranks[0].communicate(timeout=60)[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        processes.remove_left()
    assert f"rank 1 is gone: {ENDS[end]}" in heard


def test_a_turn_that_is_not_right_is_told():
    notes = {
        "error": "PeerLostError",
        "text": "rank 1 is gone: its process has ended",
        "close": 0.0,
    }
    assert failures.problems("killed", 1, notes, 0.1, 1) == []
    assert failures.problems("killed", 0, notes, 0.1, 1) != []
    assert failures.problems("stopped", 1, notes, 0.1, 1) != []
    assert failures.problems("killed", 1, notes, 61.1, 1) == ["heard after 61.10 s"]
    assert failures.problems("killed", 1, {**notes, "close": 61.0}, 0.1, 1) == ["close() took 61.0 s"]
    assert failures.problems("raised", 1, {**notes, "error": "PeerFailedError"}, 0.1, 1) != []


def test_who_may_be_named_where_a_rank_was_stopped():
    """Another one, only if the rank that was stopped had come to the call."""
    notes = {"error": "PeerTimeoutError", "close": 0.0, "goes on": True}
    cases = {
        ("Ranks 0, 1 are", 1): True,
        ("Rank 0 is in call 7 (max of int8 (3,)). Rank 1 is", 1): True,
        ("Rank 0 is", 1): False,
        ("Ranks 0, 11 are", 1): False,
        ("Rank 0 is", 2): True,
    }
    for (there, victim), right in cases.items():
        text = f"rank 2 did not call within 9 s (its last call was 6). {there} in call 7 (sum of int8 (3,))"
        assert (failures.problems("stopped", victim, {**notes, "text": text}, 0.1, 1) == []) == right, text
