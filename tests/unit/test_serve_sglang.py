"""SGLang in the benchmark of servers: what can be seen of it without a GPU."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import engine, prepare, run, sglang_engine, table
from benchmarks.serving.names import Name, result_path

LAYERS, STEP, REST = 2, 500e-6, 3e-3  # seconds of a step, and of the rest of a call
PASS = 2 * LAYERS + 1  # all-reduces


class Engine:
    """SGLang's engine with a clock of its own, and workers that answer at once."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.now, self.asked, self.ended = settings, 0.0, [], False
        self.profiled: list[tuple[int, int, int]] = []  # sequences, tokens and length of a prompt

    def generate(self, input_ids: Any, sampling_params: Any, return_logprob: bool = False) -> list[Any]:
        assert (sampling_params["temperature"], sampling_params["ignore_eos"]) == (0, True)
        tokens = sampling_params["max_new_tokens"]
        self.now += REST + tokens * STEP
        if self.asked[-1] == "profile_start":
            self.profiled.append((len(input_ids), tokens, len(input_ids[0])))
        one = {"output_ids": [7] * tokens, "meta_info": {"output_token_logprobs": [(-0.5, 7, None)] * tokens}}
        return [one if return_logprob else {"output_ids": [7] * tokens} for _ in input_ids]

    def update_weights_from_tensor(self, tensors: list[Any], load_format: str) -> tuple[bool, str]:
        assert load_format in self.settings["custom_weight_loader"]
        module, _, what = load_format.rpartition(".")
        assert f"\ndef {what}(" in Path(prepare.ROOT, *module.split(".")).with_suffix(".py").read_text()
        self.asked.append(what)
        answer = {
            "state": {"gpu": "H200", "seat": "a.B", "used_mb": 1.0},
            "profile_stop": {"all_us": 8.0 * PASS, "allreduce_us": 1.0 * PASS, "allreduces": PASS, "kernels": []},
        }.get(what)
        for rank in range(self.settings["tp_size"]):
            if answer:
                Path(os.environ[sglang_engine.ANSWERS], f"{rank}.json").write_text(json.dumps(answer))
        return True, "Success"

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that have been made."""
    found: list[Engine] = []
    sglang = types.ModuleType("sglang")
    sglang.Engine = lambda **settings: found.append(Engine(**settings)) or found[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    monkeypatch.setattr(engine, "version", lambda name: f"{name} 1")
    clock: Callable[[], float] = lambda: found[-1].now if found else 0.0  # noqa: E731
    monkeypatch.setattr(engine.time, "perf_counter", clock)
    monkeypatch.setenv(sglang_engine.ANSWERS, "")  # which the program sets
    return found


def test_an_engine_is_measured(made: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["engine", "ours-sglang", str(tmp_path), "--layers", "2", "--batches", "1,8"])
    sglang_engine.main()
    [one] = made
    assert one.ended
    assert one.asked[:2] == ["fill", "state"]
    assert one.profiled == [(1, 20, 1), (8, 20, 1)]
    run_of = json.loads(result_path(tmp_path, Name.of("ours-sglang"), LAYERS).read_text())
    assert run_of["done"]
    assert run_of["versions"]["sglang"] == "sglang 1"
    kept = table.keep([run_of, {**run_of, "name": "stock-sglang"}])
    ours, _ = kept["rows"]
    assert ours["decode"]["8"] == {
        "us": [500.0, 500.0, 500.0], "device_us": 40.0, "allreduce_us": 5.0, "allgather_us": 0.0, "part": 0.125
    }  # fmt: skip
    assert ours["compared"]["64"]["same_logprobs"] == 64
    assert ours["prefill_us"]["512"] == [3500.0, 3500.0, 3500.0]
    config = json.loads((tmp_path / "model-2" / "config.json").read_text())
    assert (config["architectures"], config["hidden_size"]) == (["Qwen3ForCausalLM"], 8192)


def test_a_worker_that_fails_is_told(made: list[Engine], tmp_path: Path):
    one = Engine(custom_weight_loader=["benchmarks.serving.sglang_worker.fill"], tp_size=2)
    one.update_weights_from_tensor = lambda *_, **__: (False, "it broke")  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="did not do fill: it broke"):
        sglang_engine.ask_workers(one, tmp_path, 2, "fill")


def test_settings_of_the_engines(tmp_path: Path):
    ours, fused, flashinfer, stock, nccl = (
        sglang_engine.settings(Name.of(f"{name}-sglang"), tmp_path, [1, 256], 2)
        for name in ("ours", "fused", "flashinfer", "stock", "nccl")
    )
    every = ours, fused, flashinfer, stock, nccl
    backend, off = "flashinfer_allreduce_fusion_backend", "enforce_disable_flashinfer_allreduce_fusion"
    assert [one[backend] for one in every] == [None, "auto", "auto", None, None]
    assert [one[off] for one in every] == [True, False, False, True, True]
    assert [one["disable_custom_all_reduce"] for one in every] == [False, False, False, False, True]
    assert ours["cuda_graph_bs_decode"] == [1, 2, 4, 8, 64, 256]


def test_its_environment_and_program(tmp_path: Path):
    """SGLang imports FlashInfer in any case, so that is there for each engine."""
    for name, fused in (("stock", "0"), ("fused", "1")):
        found = run.environment(Name.of(f"{name}-sglang"), tmp_path)
        assert found["PYTHONPATH"].startswith(f"{tmp_path / 'flashinfer'}{os.pathsep}{tmp_path}{os.pathsep}")
        assert (found["IPCREDUCE_ENGINES"], found["IPCREDUCE_FUSED"]) == (fused, fused)
    assert Name.of("ours-sglang").program == "benchmarks.serving.sglang_engine"
    assert not table.is_trial({"name": "ours-sglang"})


def test_what_sglang_does_not_need_is_removed(tmp_path: Path):
    kept = "sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so", "sglang/srt/server_args.py"
    gone = "sgl_kernel/sm100/common_ops.abi3.so", "sgl_kernel/flash_ops.abi3.so", "sglang/test/a.py", "bin/sglang"
    for name in (*kept, *gone):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    prepare.remove(tmp_path, prepare.NOT_NEEDED_BY_SGLANG)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
