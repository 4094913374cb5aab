"""make serve-vllm: what can be seen of it without a GPU. The names, the archives' content, results and tables."""

from __future__ import annotations

import ast
import json
import os
import struct
import sys
import types
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import engine, fatbins, run, table
from benchmarks.serving.names import Name, result_path
from tests.tools import machine

LAYERS = 2
ALLREDUCES = 2 * LAYERS + 1  # of a pass: two a layer, and one for the embedding


def test_names():
    assert Name.of("ours") == Name("ours", "graphs")
    assert Name.of("stock-eager") == Name("stock", "eager")
    for text in ("ours", "nccl-piecewise"):
        assert str(Name.of(text)) == text
    for wrong in ("theirs", "ours-slow", "-eager"):
        with pytest.raises(ArgumentTypeError, match="Name one of ours, fused, flashinfer, stock, nccl, alone or"):
            Name.of(wrong)
    programs = [Name.of(text).program.rpartition(".")[2] for text in ("ours-eager", "ours-sleep", "ours-killed")]
    assert programs == ["engine", "lives", "server"]


def test_what_makes_engines_differ_is_not_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    stock, ours, fused = (run.environment(Name.of(text), tmp_path) for text in ("stock", "ours-spawn", "fused"))
    assert [one["IPCREDUCE_FUSED"] for one in (stock, ours, fused)] == ["0", "0", "1"]
    assert fused["IPCREDUCE_ENGINES"] == "1"
    assert (stock["IPCREDUCE_ENGINES"], stock["VLLM_WORKER_MULTIPROC_METHOD"]) == ("0", "fork")
    assert (ours["IPCREDUCE_ENGINES"], ours["VLLM_WORKER_MULTIPROC_METHOD"]) == ("1", "spawn")
    assert ours["VLLM_USE_DEEP_GEMM"] == "1"
    assert ours["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_HAS_FLASHINFER_CUBIN" not in stock


def test_what_the_trials_need(tmp_path: Path):
    names = "ours", "ours-invariant", "flashinfer", "ours-alone"
    plain, invariant, flashinfer, alone = (run.environment(Name.of(text), tmp_path) for text in names)
    every = "VLLM_BATCH_INVARIANT", "IPCREDUCE_BATCH_INVARIANT", "VLLM_DISABLE_PYNCCL"
    found = [[one[name] for name in every] for one in (plain, invariant, alone)]
    assert found == [["0", "0", "0"], ["1", "1", "0"], ["0", "1", "1"]]
    assert flashinfer["PYTHONPATH"].startswith(f"{tmp_path / 'flashinfer'}{os.pathsep}{tmp_path}{os.pathsep}")
    assert flashinfer["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm"
    assert flashinfer["IPCREDUCE_ENGINES"] == "0"


def test_settings_of_the_engines(tmp_path: Path):
    folder = engine.model(tmp_path, 8)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 8
    graphs, pieces, eager, nccl = (
        engine.settings(Name.of(text), folder, [1, 256]) for text in ("ours", "ours-piecewise", "ours-eager", "nccl")
    )
    assert graphs["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 4, 8, 64, 256]}
    assert pieces["compilation_config"] == {**graphs["compilation_config"], "cudagraph_mode": "PIECEWISE"}
    assert eager["enforce_eager"]
    assert not graphs["enforce_eager"]
    fused = engine.settings(Name.of("flashinfer"), folder, [1, 256])
    assert fused["compilation_config"] == {**graphs["compilation_config"], "pass_config": {"fuse_allreduce_rms": True}}
    assert [one["disable_custom_all_reduce"] for one in (graphs, eager, nccl)] == [False, False, True]


class Engine:
    """vLLM's engine with two batches under way: a step plans one, and gives the tokens of the one before."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}  # the tokens that a request still gets
        self.planned: list[list[str]] = []
        self.engine_core = types.SimpleNamespace(shutdown=lambda: None)
        self.profiled: list[set[int]] = []  # how many requests each batch had, while the workers profiled
        self.profiling = False

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert (prompt["type"], len(prompt["prompt_token_ids"])) == ("token", 16)
        self.left[name] = params.max_tokens

    def step(self) -> None:
        self.planned.append(list(self.left))
        if self.profiling:
            self.profiled[-1].add(len(self.planned[-1]))
        if len(self.planned) == 2:
            for name in self.planned.pop(0):
                if name in self.left:
                    self.left[name] -= 1
                    if not self.left[name]:
                        del self.left[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


class LLM:
    """What the benchmark takes of vLLM's class."""

    def __init__(self, **settings: Any) -> None:
        self.llm_engine = Engine()

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        logprobs = [{7: types.SimpleNamespace(logprob=-0.5)}] * params.max_tokens
        one = types.SimpleNamespace(token_ids=(7,) * params.max_tokens, logprobs=logprobs)
        return [types.SimpleNamespace(outputs=[one]) for _ in prompts]

    def collective_rpc(self, name: str, args: tuple = ()) -> list[Any]:
        assert hasattr_of_worker(name)
        self.llm_engine.profiling = name == "bench_profile_start"
        if self.llm_engine.profiling:
            self.llm_engine.profiled.append(set())
        answers = {
            "bench_state": {"gpu": "H100", "seat": "a.B", "used_mb": 1.0},
            "bench_allreduce": dict.fromkeys(args[0], 2.0) if args else None,
            "bench_profile_stop": {"all_us": 8.0, "allreduce_us": 1.0, "allreduces": 1.0, "kernels": []},
        }
        return 2 * [answers.get(name)]


def hasattr_of_worker(name: str) -> bool:
    """Its module needs PyTorch."""
    return f"def {name}(" in (Path(engine.__file__).with_name("worker.py")).read_text()


def test_an_engine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[LLM] = []
    vllm = types.ModuleType("vllm")
    vllm.LLM = lambda **settings: made.append(LLM(**settings)) or made[-1]  # type: ignore[attr-defined]
    vllm.SamplingParams = lambda **names: types.SimpleNamespace(**names)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(engine, "version", lambda name: "1")
    monkeypatch.setattr(sys, "argv", ["engine", "ours", str(tmp_path), "--layers", "2", "--batches", "1,8"])
    engine.main()
    assert made[0].llm_engine.profiled == [{1}, {8}], "no request has ended while the steps are profiled"
    run_of = json.loads(result_path(tmp_path, Name.of("ours"), LAYERS).read_text())
    assert run_of["done"]
    kept = table.keep([run_of])
    [row] = kept["rows"]
    assert row["decode"].keys() == {"1", "8"}
    assert row["allreduce_us"].keys() == {"1", "8", "512", "2048"}
    assert len(run_of["tokens"]["64"]) == 64
    assert table.tables(kept)[0].count("device") == 2


def test_the_kernels_that_are_counted_are_ours():
    """By their names in the sources. The module that has them needs PyTorch."""
    tree = ast.parse(Path(engine.__file__).with_name("worker.py").read_text())
    [kinds] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and "KINDS" in ast.unparse(node.targets)
    ]
    sources = "".join(path.read_text() for path in (machine.ROOT / "kernels").glob("*.cu"))
    names = {name for ours, _ in kinds.values() for name in ours}
    assert {"one_shot", "gather"} <= names
    assert [name for name in names if f"KERNEL({name}," not in sources] == []


def test_tokens_are_compared_with_those_of_the_same_turn():
    stock = [{"name": "stock", "layers": 8, "turn": turn} for turn in (1, 2)]
    for turn, compared in ((1, 1), (2, 2), (3, 1)):
        ours = {"name": "ours", "layers": 8, "turn": turn}
        assert table.reference(ours, stock) == stock[compared - 1]
    assert table.reference({"name": "ours", "layers": 4, "turn": 1}, stock) is None
    assert table.reference({"name": "ours-alone", "layers": 8, "turn": 2}, stock) == stock[1]


# ---- the runner
@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the engines that have run, in place of vLLM; nothing is unpacked."""
    ran: list[str] = []

    def run_one(args: Any, name: Name, layers: int, turn: int, limit: float) -> str:
        ran.append(f"{name} {limit:.0f}" if (layers, turn) == (8, 1) else f"{name} {layers} {turn}")
        path = result_path(args.out, name, layers, turn)
        path.with_suffix(".log").write_text("it\nbroke")
        path.write_text(json.dumps({} if name.engine == "nccl" else {"done": True, "after": {}}))
        return "exit code 0"

    monkeypatch.setattr(run, "run_one", run_one)
    monkeypatch.setattr(run, "unpack", lambda archives, site: None)
    monkeypatch.setattr(
        run.sys, "argv", ["run", str(tmp_path / "out"), "ours", "nccl", "stock", "--archives", str(tmp_path)]
    )
    return ran


def test_the_runner_goes_on_where_it_stopped(engines: list[str], capsys: pytest.CaptureFixture[str]):
    assert run.main() == 1, "one is not whole"
    assert engines == ["ours 240", "nccl 240", "stock 240"]
    assert "it\nbroke" in capsys.readouterr().out
    engines.clear()
    run.main()
    assert engines == ["nccl 240"]


def test_the_names_take_turns(engines: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.sys, "argv", [*run.sys.argv, "--layers", "4,16", "--turns", "2"])
    run.main()
    names = [f"{name} {layers} {turn}" for turn in (1, 2) for layers in (4, 16) for name in ("ours", "nccl", "stock")]
    assert engines == names


def test_no_engine_begins_too_late(engines: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.sys, "argv", [*run.sys.argv, "--total", "30"])
    assert run.main() == 1
    assert engines == []


def test_what_an_engine_leaves_behind_is_told_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine here is a module of that name which starts a process and writes its result."""
    package = tmp_path / "benchmarks" / "serving"
    package.mkdir(parents=True)
    result = result_path(tmp_path, Name.of("ours"), LAYERS)
    (package / "engine.py").write_text(
        "import pathlib, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(result)!r}).write_text('{{\"done\": true}}')\n"
        "print('(Worker_TP0 pid=3) INFO ipcreduce has served 12 calls of the server; one')\n"
    )
    args = run.parse([str(tmp_path), "ours", "--archives", str(tmp_path), "--site", str(tmp_path)])
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert run.run_one(args, Name.of("ours"), LAYERS, 1, 600) == "exit code 0"
    assert run.is_whole(result)
    after = json.loads(result.read_text())["after"]
    assert (after["status"], after["processes"], after["served"]) == ("exit code 0", 1, [12])
    (package / "engine.py").write_text("import time\ntime.sleep(600)\n")
    assert run.run_one(args, Name.of("ours"), LAYERS, 1, 0.1) == "ended after 0 s"
    assert not result.exists()


# ---- tables
def a_run(name: str, **changed: Any) -> dict[str, Any]:
    """What an engine writes, after a way through its file."""
    device = {"all_us": 4000.0, "allreduce_us": 100.0 * ALLREDUCES, "allreduces": 10.0 * ALLREDUCES}
    device |= {"allgather_us": 30.0, "allgathers": 10.0}
    found = {
        "name": name, "layers": LAYERS, "machine": {"processor": "a processor", "cores": 3}, "versions": {"vllm": "1"},
        "date": "2030-01-02", "import_s": 3.0, "start_s": 70.0, "shutdown_s": 2.0,
        "workers": 2 * [{"gpu": "H100"}], "workers_at_end": [{"seat": "a.B", "used_mb": mb} for mb in (10.0, 11.0)],
        "tokens": {8: [[1, 2, 3], [4, 5, 6]]}, "logprobs": {8: [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]},
        "decode": {1: {"step_us": [500.0, 520.0, 510.0], "device": [device, {**device, "allreduce_us": 9000.0}]}},
        "allreduce_us": [{1: 3.0}, {1: 2.0}], "prefill_us": {512: [9.0, 8.0, 7.0]},
        "after": {"status": "exit code 0", "processes": 0, "shared": [], "served": [1234, 5]},
    }  # fmt: skip
    return json.loads(json.dumps(found | changed))


def test_a_row_has_what_the_runs_say():
    kept = table.keep([a_run("stock"), a_run("ours")])
    assert (kept["machine"]["gpus"], kept["machine"]["cores"], kept["date"]) == (["H100", "H100"], 3, "2030-01-02")
    ours, _ = kept["rows"]
    assert ours["name"] == "ours"
    step = {"device_us": 400.0, "allreduce_us": 10.0 * ALLREDUCES, "allgather_us": 3.0, "part": 0.125}
    assert ours["decode"] == {"1": {"us": [510.0, 500.0, 520.0], **step}}
    assert ours["allreduce_us"] == {"1": 2.0}
    assert ours["used_mb"] == 11.0
    assert ours["compared"]["8"] == {
        "sequences": 2, "same_tokens": 2, "same_logprobs": 2, "largest_difference": 0.0
    }  # fmt: skip


def test_differences_of_two_engines_are_counted():
    """Behind the first token that differs, the logprobs are of other texts."""
    tokens, logprobs = {8: [[1, 2, 3], [4, 9, 6]]}, {8: [[-1.0, -2.25, -3.0], [-4.5, -7.0, -60.0]]}
    [ours, _] = table.keep([a_run("ours", tokens=tokens, logprobs=logprobs), a_run("stock")])["rows"]
    assert ours["compared"]["8"] == {
        "sequences": 2, "same_tokens": 1, "same_logprobs": 0, "largest_difference": 0.5
    }  # fmt: skip


def test_only_the_same_mode_and_layers_are_compared():
    runs = [a_run("ours-eager"), a_run("stock"), a_run("ours", layers=4)]
    assert [one["name"] for one in table.keep(runs)["rows"] if "compared" in one] == ["stock"]


def test_tables_of_whole_and_of_broken_runs():
    broken = {key: value for key, value in a_run("nccl").items() if key in ("name", "layers")}
    steps, calls, rest = table.tables(table.keep([a_run("stock"), a_run("ours"), broken]))
    assert "| ours | 2 | 1 | 510 ± 10, device 400, all-reduce 50 (12.5%), all-gather 3.0 |" in steps
    assert "| nccl | 2 | 1 |" in steps
    assert "| ours | 2 | 2.0 |" in calls
    assert "nccl" not in calls
    assert "| ours | 2 | 70.0 | 2.0 | 11.0 | 8 ± 1 | 2 and 2 of 2, 0 | 1,234 and 5 | exit code 0, 0 and 0 |" in rest
    assert "| nccl | 2 | – | – | – | – |  |  | not whole |" in rest
    with pytest.raises(SystemExit, match="no engine has started"):
        table.keep([broken])


def decoded(us: list[float], **changed: Any) -> dict[str, Any]:
    """Another time of a step for one sequence."""
    run_of = a_run("ours", **changed)
    run_of["decode"]["1"]["step_us"] = us
    return run_of


def test_of_several_runs_the_median_counts():
    runs = [decoded([500.0, 520.0, 900.0], turn=1), decoded([400.0] * 3, turn=2), decoded([700.0, 700.0, 1.0], turn=3)]
    [row] = table.keep(runs)["rows"]
    assert (row["runs"], row["whole"], row["decode"]["1"]["us"]) == (3, True, [520.0, 400.0, 700.0])
    assert row["prefill_us"]["512"] == [8.0, 8.0, 8.0]
    del runs[0]["after"]
    assert not table.keep(runs)["rows"][0]["whole"]


def test_a_layer_and_the_rest_of_a_step():
    runs = [decoded([100.0 + 10 * layers + (layers == 4) * 3], layers=layers) for layers in (2, 4, 8)]
    text = table.tables(table.keep([*runs, a_run("stock")]))[1]
    assert "| ours | 2, 4, 8 | 10, 100, off 3 |" in text
    assert "stock" not in text, "one count says nothing of a layer"


def test_trials_have_a_table_of_their_own():
    ends = {"status": "exit code 0", "processes": 0, "shared": ["x"], "served": []}
    trials = [a_run("ours-sleep", facts={"the same": True}, after=ends), a_run("ours-killed")]
    del trials[1]["after"]
    kept = table.keep([*trials, a_run("stock")])
    assert [one["name"] for one in kept["rows"]] == ["stock"]
    text = table.tables(kept)[-1]
    assert "| ours-sleep | the same | true |" in text
    assert '| ours-sleep | end, processes left, files left | ["exit code 0", 0, ["x"]] |' in text
    assert "| ours-killed | – | – |" in text


# ---- device code
def library(path: Path, *fat: list[tuple[int, int, bytes]]) -> None:
    """An ELF file with one section of fat binaries, each of (kind, architecture, content)."""
    section = b""
    for entries in fat:
        body = b"".join(
            struct.pack("<HHIQ", kind, 1, 64, len(content)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + content
            for kind, arch, content in entries
        )
        section += struct.pack("<IHHQ", fatbins.MAGIC, 1, 16, len(body)) + body + bytes(-len(body) % 8 + 8)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    heads = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, start, size, 0, 0, 0, 0)
        for name, start, size in ((0, 0, 0), (1, 64, len(section)), (12, 64 + len(section), len(names)))
    )
    elf = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q", 64 + len(section) + len(names)) + bytes(10)
    path.write_bytes(elf + struct.pack("<HHH", 64, 3, 2) + section + names + heads)


@pytest.mark.parametrize("keep_ptx", [True, False])
def test_device_code_of_other_gpus_is_zero(tmp_path: Path, keep_ptx: bool):
    path = tmp_path / "one.so"
    library(
        path,
        [(2, 80, b"cubin 80"), (2, 90, b"cubin 90"), (1, 90, b"ptx   90")],
        [(2, 80, b"other 80"), (1, 80, b"other p8"), (1, 100, b"other p10")],
    )
    before = path.read_bytes()
    zeroed = fatbins.blank(path, 90, keep_ptx=keep_ptx)
    after = path.read_bytes()
    assert len(after) == len(before)
    kept = [b"cubin 90"] + [b"other p8"] * keep_ptx
    gone = [b"cubin 80", b"ptx   90", b"other 80", b"other p10"] + [b"other p8"] * (not keep_ptx)
    assert all(one in after for one in kept)
    assert not any(one in after for one in gone)
    assert zeroed == sum(map(len, gone))
