"""The trials of make serve-vllm, each run as on GPUs, with stand-ins for the servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import run, server, sglang_server
from benchmarks.serving.names import TRIALS, Name, result_path
from tests.shared import bounds, stand_in_vllm

LAYERS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of all of them."""
    site, out = (tmp_path_factory.mktemp(name) for name in ("site", "out"))
    stand_in_vllm.lay_out(site)
    args = run.parse([str(out), "ours", "--archives", str(out), "--site", str(site), "--batches", "1"])
    results = {}
    for trial in TRIALS:
        path = result_path(out, Name("ours", trial), LAYERS)
        status = run.run_one(args, Name("ours", trial), LAYERS, 1, bounds.HANG)
        assert status == "exit code 0", path.with_suffix(".log").read_text()
        results[trial] = json.loads(path.read_text())
    return results


def facts(found: dict[str, Any], trial: str) -> list[Any]:
    return list(found[trial]["facts"].values())


def test_every_trial_tells_of_its_end(found: dict[str, Any]):
    for one in found.values():
        assert one["done"]
        assert one["after"]["processes"] == 0
        assert [worker["gpu"] for worker in one["workers"]] == ["H100"] * 2


def test_restarts(found: dict[str, Any]):
    assert facts(found, "restarts") == [[[0.0] * 5, [0.0] * 5], True]


def test_two_engines(found: dict[str, Any]):
    assert facts(found, "pair") == [[True, True, True], True]


def test_sleep(found: dict[str, Any]):
    for trial in ("sleep", "sglang-sleep"):
        assert facts(found, trial)[:2] == [[[9.0, 9.0], [1.0, 1.0], [9.0, 9.0]], True]


def test_one_prompt_in_several_batches(found: dict[str, Any]):
    """The stand-in's logprobs depend on the batch, and its tokens do not."""
    assert facts(found, "invariant") == [[True, False], [True, False]]


@pytest.mark.parametrize("trial", ["server", "sglang-server"])
def test_a_cancelled_request(found: dict[str, Any], trial: str):
    same, clients, seconds, (tokens, asked), (_, code) = facts(found, trial)
    assert (same, clients, asked, code) == (8, 8, server.LONG, 0)
    assert seconds is not None
    assert tokens is None if trial == "sglang-server" else server.CHUNKS <= tokens < asked


@pytest.mark.parametrize("trial", ["killed", "sglang-killed"])
def test_a_killed_worker(found: dict[str, Any], trial: str):
    seconds, heard, (_, code), log = facts(found, trial)
    assert len(seconds) == server.CLIENTS
    assert heard == ['{"error": "EngineDeadError"}']
    assert code == 1
    assert log == ["(Worker_TP0) PeerLostError: rank 1 is gone"]


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch):
    import subprocess

    monkeypatch.setattr(server, "PATIENCE", 0.1)
    process = subprocess.Popen(["sleep", "600"])
    assert server.ending(process) is None
    assert process.returncode == -9


def test_what_does_not_come_ends_the_wait():
    assert server.wait_for(lambda: False, patience=0) is None
    assert server.wait_for(lambda: True) == 0


def test_the_words_of_the_server(tmp_path: Path):
    words = server.Client(80, tmp_path).command(Name.of("nccl-server"))
    assert words[words.index("--port") + 1] == "80"
    assert {"--skip-tokenizer-init", "--disable-custom-all-reduce", "--no-enforce-eager"} <= set(words)
    assert json.loads(words[words.index("--attention-config") + 1]) == {"backend": "FLASH_ATTN"}
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    words = sglang_server.Client(80, tmp_path).command(Name.of("ours-sglang-server"))
    sizes = words[words.index("--cuda-graph-bs-decode") + 1 : words.index("--cuda-graph-bs-prefill")]
    assert sizes == ["1", "2", "4", "8", "64"]
    assert {"--skip-tokenizer-init", "--disable-radix-cache"} <= set(words)
    assert not {"None", "True", "False", "--enable-memory-saver", "--disable-custom-all-reduce"} & set(words)
