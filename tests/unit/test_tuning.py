"""Tuned tables: kept and found again, sent and received, and never used if anything about them is odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipcreduce.errors import UnsupportedError
from ipcreduce.ipc import norm_plan, plan, tuning
from ipcreduce.ranks import exchange
from ipcreduce.texts import text_in

MESSAGES = plan.checked_table(
    [plan.Choice(1536, "one_shot", 96, 512, 1), plan.Choice(1 << 33, "two_shot", 256, 264, 4)], 4
)
NORMS = norm_plan.checked_table(
    norm_plan.NormChoice(*one)
    for one in ((4096, 8, "one_shot", 1), (4096, 512, "two_shot", 1), (8192, 4, "one_shot", 8))
)
TABLE, EMPTY = tuning.Tables(MESSAGES, NORMS), tuning.Tables()
GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_kept_and_found_again(cache: Path):
    assert tuning.load(GPU, 4, pytest.fail) == EMPTY
    path = tuning.save(GPU, 4, TABLE)
    assert path == cache / "tuned-NVIDIA-H200-4.json"
    assert tuning.load(GPU, 4, pytest.fail) == TABLE
    assert tuning.load(GPU, 2, pytest.fail) == tuning.load("NVIDIA H100", 4, pytest.fail) == EMPTY
    tuning.save(GPU, 4, tuning.Tables(MESSAGES[:1]))
    assert tuning.load(GPU, 4, pytest.fail) == tuning.Tables(MESSAGES[:1])
    assert [*cache.iterdir()] == [path]


def test_a_table_that_cannot_be_kept(cache: Path):
    (cache / "tuned-NVIDIA-H200-4.json").mkdir()
    with pytest.raises(UnsupportedError, match=r"cannot be stored \(.*\. Set IPCREDUCE_CACHE_DIR"):
        tuning.save(GPU, 4, TABLE)


def test_of_another_version():
    path = tuning.save(GPU, 4, TABLE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    assert tuning.load(GPU, 4, pytest.fail) == EMPTY


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "{}", '{"version": 3, "choices": [{"up_to": 4}]}', None]
)
def test_not_usable(text: str | None):
    path = tuning.save(GPU, 4, TABLE)
    if text is None:
        text = path.read_text().replace("96", "97")
    path.write_text(text)
    told: list[str] = []
    assert tuning.load(GPU, 4, told.append) == EMPTY
    assert [text.startswith(f"the table {path} cannot be used") for text in told] == [True]
    sent = tuning.message(EMPTY, *told)[0]
    assert text_in(sent) == told[0][: exchange.TEXT_BYTES], "for every rank to warn of"
    assert sent["ok"]


@pytest.mark.parametrize("table", [EMPTY, TABLE, tuning.Tables(
    tuple(plan.Choice(size, "two_shot", 64, 3, 1) for size in range(1, plan.MAX_CHOICES + 1)),
    tuple(norm_plan.NormChoice(4096, rows, "two_shot", 1) for rows in range(1, norm_plan.MAX_CHOICES + 1)),
)])  # fmt: skip
def test_sent_and_received(table: tuning.Tables):
    assert tuning.received(tuning.message(table)[0], 4) == table


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 1),
        ("crc", 5),
        ("up_to", 7),
        ("shape", 1),
        ("count", 99),
        ("shape", 64),
        ("norm_count", 2),
        ("norms", 1),
    ],
)
def test_spoilt_on_the_way(field: str, value: int):
    record = tuning.message(TABLE)
    record[field] = value
    with pytest.raises((ValueError, IndexError)):
        tuning.received(record[0], 4)


@pytest.mark.parametrize(
    "odd",
    [
        (4096, 4, "one_shot", 3), (4096, 4, "three_shot", 1), (4100, 4, "one_shot", 1), (32768, 4, "one_shot", 1),
        (4096, 0, "one_shot", 1), (4096, 4.0, "one_shot", 1), (512, 4, "one_shot", 8), (4096, 4, ["one_shot"], 1),
        (4096, 1 << 40, "one_shot", 1),
    ],
)  # fmt: skip
def test_choices_for_rows_without_a_kernel(odd: tuple[Any, ...]):
    table = (norm_plan.NormChoice(*odd),)
    with pytest.raises(ValueError, match=r"no kernel runs|no whole number"):
        norm_plan.checked_table(table)
    tuning.save(GPU, 4, tuning.Tables(MESSAGES, table))
    told: list[str] = []
    assert tuning.load(GPU, 4, told.append) == EMPTY
    assert len(told) == 1


def test_choices_for_rows_in_disorder():
    for table in (NORMS[::-1], (*NORMS, NORMS[-1]), NORMS[1::-1]):
        with pytest.raises(ValueError, match="do not ascend"):
            norm_plan.checked_table(table)
