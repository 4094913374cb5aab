"""Tuned tables: kept and found again, sent and received, and never used if anything about them is odd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ipcreduce.errors import UnsupportedError
from ipcreduce.ipc import plan, tuning
from ipcreduce.ranks import exchange
from ipcreduce.texts import text_in

TABLE = plan.checked_table(
    [plan.Choice(1536, "one_shot", 96, 512, 1), plan.Choice(1 << 33, "two_shot", 256, 264, 4)], 4
)
GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_kept_and_found_again(cache: Path):
    assert tuning.load(GPU, 4, pytest.fail) == ()
    path = tuning.save(GPU, 4, TABLE)
    assert path == cache / "tuned-NVIDIA-H200-4.json"
    assert tuning.load(GPU, 4, pytest.fail) == TABLE
    assert tuning.load(GPU, 2, pytest.fail) == tuning.load("NVIDIA H100", 4, pytest.fail) == ()
    tuning.save(GPU, 4, TABLE[:1])
    assert tuning.load(GPU, 4, pytest.fail) == TABLE[:1]
    assert [*cache.iterdir()] == [path]


def test_a_table_that_cannot_be_kept(cache: Path):
    (cache / "tuned-NVIDIA-H200-4.json").mkdir()
    with pytest.raises(UnsupportedError, match=r"cannot be stored \(.*\. Set IPCREDUCE_CACHE_DIR"):
        tuning.save(GPU, 4, TABLE)


def test_of_another_version():
    path = tuning.save(GPU, 4, TABLE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    assert tuning.load(GPU, 4, pytest.fail) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 3, "choices": [{"up_to": 4}]}', None])
def test_not_usable(text: str | None):
    path = tuning.save(GPU, 4, TABLE)
    if text is None:
        text = path.read_text().replace("96", "97")
    path.write_text(text)
    told: list[str] = []
    assert tuning.load(GPU, 4, told.append) == ()
    assert [text.startswith(f"the table {path} cannot be used") for text in told] == [True]
    sent = tuning.message((), *told)[0]
    assert text_in(sent) == told[0][: exchange.TEXT_BYTES], "for every rank to warn of"
    assert sent["ok"]


@pytest.mark.parametrize("table", [(), TABLE, tuple(
    plan.Choice(size, "two_shot", 64, 3, 1) for size in range(1, plan.MOST_CHOICES + 1)
)])  # fmt: skip
def test_sent_and_received(table: plan.Table):
    assert tuning.received(tuning.message(table)[0], 4) == table


@pytest.mark.parametrize(
    ("field", "value"), [("count", 1), ("crc", 5), ("up_to", 7), ("shape", 1), ("count", 99), ("shape", 64)]
)
def test_spoilt_on_the_way(field: str, value: int):
    record = tuning.message(TABLE)
    record[field] = value
    with pytest.raises((ValueError, IndexError)):
        tuning.received(record[0], 4)
