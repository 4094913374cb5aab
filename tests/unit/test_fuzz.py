"""Random programs are the same in every run and shrink to what fails; random bytes give errors of the library only."""

from __future__ import annotations

import json
import random
import runpy
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.fuzz import job, messages, programs, soak


def test_programs_come_from_their_seeds():
    made = [programs.program(seed, 3, simulated=True) for seed in range(300)]
    assert made == [programs.program(seed, 3, simulated=True) for seed in range(300)]
    assert json.loads(json.dumps(made)) == made, "they can be written down"
    kinds = Counter(step["kind"] for steps in made for step in steps)
    assert kinds.keys() == programs.WEIGHTS.keys(), "every kind comes"
    assert not any(
        step["kind"] == "driver fault" for seed in range(300) for step in programs.program(seed, 3, simulated=False)
    )
    deaths = [programs.program(seed, 3, simulated=True, death=True)[-1] for seed in range(100)]
    assert {step["how"] for step in deaths} == {*programs.DEATHS}
    assert {step["rank"] for step in deaths} == {0, 1, 2}


def test_a_program_shrinks_to_what_fails():
    steps = programs.program(1, 2, simulated=True, longest=10) * 3
    steps.insert(11, {"kind": "reduce", "slot": 1, "seed": 5, "stream": 2, "count": 100, "op": "max", "layout": "rows"})
    steps.insert(20, {"kind": "record", "slot": 1, "seed": 6, "body": [["add", 1], ["reduce", "sum"], ["scale", 2]]})

    def fails(shorter: list[programs.Step]) -> bool:
        reduces = [index for index, step in enumerate(shorter) if step.get("op") == "max" and step["seed"] == 5]
        records = [step for step in shorter[reduces[0] :] if step["seed"] == 6] if reduces else []
        return any(["reduce", "sum"] in step["body"] for step in records)

    assert programs.shrink(steps, fails, tries=200) == [
        {"kind": "reduce", "slot": 0, "seed": 5, "stream": 0, "count": 1, "op": "max", "layout": "plain"},
        {"kind": "record", "slot": 0, "seed": 6, "body": [["reduce", "sum"]]},
    ]


def test_a_script_runs_its_program(tmp_path: Path):
    steps = programs.program(7, 2, simulated=True)
    path = tmp_path / "found.py"
    path.write_text(programs.script(steps, 2, True, "it failed\nso"))
    with mock.patch.object(job, "alone") as alone:
        runpy.run_path(str(path))
    alone.assert_called_once_with(steps, ranks=2, simulated=True)


def test_growth_is_told():
    before = [{"threads": 5, "host KB": 1000}]
    assert soak.grown(before, [{"threads": 5, "host KB": 9000}]) == ""
    assert soak.grown(before, [{"threads": 6, "host KB": 1000}]) == "rank 0: threads 5 to 6"
    assert "the driver's streams 0 to 1" in soak.grown(before, [{**before[0], "the driver's streams": 1}])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    return messages.targets(tmp_path_factory.mktemp("tuned"))


@pytest.mark.parametrize("index", range(13))
def test_random_bytes(found: list[messages.Target], index: int, monkeypatch: pytest.MonkeyPatch):
    assert len(found) == 13
    monkeypatch.setattr(messages.control_page, "_RECORD_SECONDS", 0.0)
    monkeypatch.setattr(messages.control_page.time, "sleep", lambda seconds: None)
    assert messages.attack(found[index], 400, seed=1)[1] == ""


def test_the_command_for_random_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    monkeypatch.setattr("sys.argv", ["messages", "--turns", "200", "--json", str(tmp_path / "rows.json")])
    assert messages.main() == 0, capsys.readouterr()
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 13


def test_an_error_of_another_kind_is_told():
    def read(data: bytes) -> None:
        if data[:1] == b"\xff":
            raise KeyError("of Python")

    target = messages.Target("one that breaks", [bytes(8)], read)
    assert "one that breaks, seed 3, turn " in messages.attack(target, 2000, seed=3)[1]


def test_messages_are_changed_in_many_ways():
    draw = random.Random(1)
    valid = bytes(range(64))
    made = [messages.changed(valid, [valid, bytes(64)], draw) for _ in range(500)]
    assert len({*made}) > 400
    assert {len(one) for one in made} >= {64, 0, 30} - {30}
    assert any(len(one) > 64 for one in made)
    assert any(0 < len(one) < 64 for one in made)
