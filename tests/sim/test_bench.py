"""``python -m ipcreduce bench`` on the simulated device: what it prints and keeps; the times mean nothing there."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.machine import letters_beyond_ascii

Run = Callable[..., subprocess.CompletedProcess[str]]
SMALL = {"IPCREDUCE_WORKSPACE_MB": "1"}
QUICK = ("--replays", 2, "--calls", 5, "--peers", "")


@pytest.mark.parametrize(
    ("ranks", "dtype", "sizes"), [(2, "bfloat16", (1024, 1536, 2048, 3072)), (3, "int8", (1024, 1536))]
)
def test_rows(mpirun: Run, tmp_path: Path, ranks: int, dtype: str, sizes: tuple[int, ...]) -> None:
    kept = tmp_path / "bench.json"
    wanted = ("--smallest", "1K", "--largest", sizes[-1], "--between", "--dtype", dtype, "--json", kept)
    output = mpirun("tests.simulated", ranks, "-m", "ipcreduce", "bench", *wanted, *QUICK, env=SMALL).stdout
    assert f"graph, {ranks} ranks, sum of {dtype}" in output
    assert f"eager, {ranks} ranks, sum of {dtype}" in output
    result = json.loads(kept.read_text())
    assert [(row["mode"], row["bytes"]) for row in result["rows"]] == [
        (mode, nbytes) for nbytes in sizes for mode in ("graph", "eager")
    ]
    for row in result["rows"]:
        assert (row["ranks"], row["dtype"], row["op"], row["algorithm"]) == (ranks, dtype, "sum", "one_shot")
        assert 0 < row["ours_min_us"] <= row["ours_us"] <= row["ours_p99_us"]
        assert (row["host_us"] is None) == (row["mode"] == "graph")
        assert row["peers_us"] == {}
        wire = min((ranks - 1) * row["bytes"], 2 * (ranks - 1) * row["bytes"] / ranks)
        limit = result["limit"]["barrier_us"] + wire / result["limit"]["push_GBps"] / 1e3
        assert row["limit_us"] == pytest.approx(limit)
    assert {"machine", "versions", "date", "command"} <= result.keys()


def test_lists(mpirun: Run, tmp_path: Path) -> None:
    """--arrays: the bytes of a row are those of all arrays, and each array is checked."""
    kept = tmp_path / "bench.json"
    wanted = ("--smallest", 4, "--largest", "2K", "--arrays", 300, "--json", kept)
    output = mpirun("tests.simulated", 2, "-m", "ipcreduce", "bench", *wanted, *QUICK, env=SMALL).stdout
    assert "eager, 2 ranks, sum of bfloat16 in 300 arrays" in output
    rows = json.loads(kept.read_text())["rows"]
    assert [(row["mode"], row["bytes"]) for row in rows] == [
        (mode, nbytes) for nbytes in (1024, 2048) for mode in ("graph", "eager")
    ]
    assert {(row["arrays"], row["algorithm"]) for row in rows} == {(300, "one_shot")}


@pytest.mark.parametrize(("backend", "ranks"), [("ipc", 3), ("nccl", 2)])
@pytest.mark.parametrize(("op", "what", "kernel", "wire"), [
    ("allgather", "all-gather", "gather", lambda n: n - 1), ("broadcast", "broadcast", "gather", lambda n: 1),
    ("reduce_scatter", "reduce-scatter", "scatter", lambda n: (n - 1) / n),
])  # fmt: skip
def test_other_collectives(
    mpirun: Run, tmp_path: Path, op: str, what: str, kernel: str, wire: Callable[[int], float], backend: str, ranks: int
) -> None:  # fmt: skip
    """--op: of one array, and of a list."""
    kept, environ = tmp_path / "bench.json", SMALL | {"IPCREDUCE_BACKEND": backend}
    for further, suffix in (((), ""), (("--arrays", 5), " in 5 arrays")):
        wanted = ("--op", op, "--smallest", "1K", "--largest", "2K", *further, "--json", kept)
        output = mpirun("tests.simulated", ranks, "-m", "ipcreduce", "bench", *wanted, *QUICK, env=environ).stdout
        assert f"graph, {ranks} ranks, {what} of bfloat16{suffix}\n" in output
        result = json.loads(kept.read_text())
        whole = 2 * ranks if op == "reduce_scatter" else 2  # a whole number of elements for each rank
        assert [(row["mode"], row["bytes"]) for row in result["rows"]] == [
            (mode, nbytes // whole * whole) for nbytes in (1024, 2048) for mode in ("graph", "eager")
        ]
        for row in result["rows"]:
            assert (row["op"], row["algorithm"]) == (op, kernel if backend == "ipc" else "nccl")
            assert 0 < row["ours_min_us"] <= row["ours_us"] <= row["ours_p99_us"]
            if backend == "ipc":
                limit = result["limit"]["barrier_us"] + wire(ranks) * row["bytes"] / result["limit"]["push_GBps"] / 1e3
                assert row["limit_us"] == pytest.approx(limit)


@pytest.mark.parametrize(("ranks", "dtype", "quantize"), [
    (2, "float16", "none"), (2, "bfloat16", "token"),
])  # fmt: skip
def test_norms(mpirun: Run, tmp_path: Path, ranks: int, dtype: str, quantize: str) -> None:
    """--op allreduce_rmsnorm: the fused call, beside the pair and the all-reduce, all of whose results are checked."""
    kept = tmp_path / "bench.json"
    wanted = ("--op", "allreduce_rmsnorm", "--hidden", 128, "--rows", "1,3", "--dtype", dtype, "--quantize", quantize)
    quick = ("--replays", 2, "--calls", 5, "--peers", "pair,allreduce", "--json", kept)
    output = mpirun("tests.simulated", ranks, "-m", "ipcreduce", "bench", *wanted, *quick, env=SMALL).stdout
    suffix = "" if quantize == "none" else f", quantised: {quantize}"
    assert f"graph, {ranks} ranks, RMSNorm of the sum of {dtype} in rows of 128{suffix}\n" in output
    result = json.loads(kept.read_text())
    assert result["left_out"] == {}
    rows = result["rows"]
    assert [(row["mode"], row["rows"], row["bytes"]) for row in rows] == [
        (mode, count, count * 256) for count in (1, 3) for mode in ("graph", "eager")
    ]
    for row in rows:
        assert (row["op"], row["hidden"], row["quantize"]) == ("allreduce_rmsnorm", 128, quantize)
        assert (row["algorithm"], row["peers_us"]) == ("fused_one_shot", {})
        assert {*row["own_us"]} == {"pair", "allreduce"}
        assert min(row["ours_us"], *row["own_us"].values()) > 0


def test_norms_that_are_a_pair_anyway(mpirun: Run, tmp_path: Path) -> None:
    kept = tmp_path / "bench.json"
    wanted = ("--op", "allreduce_rmsnorm", "--hidden", 100, "--rows", 3, "--mode", "graph", "--json", kept)
    for backend, by in (("ipc", "one_shot, rmsnorm"), ("nccl", "nccl, rmsnorm")):
        environ = SMALL | {"IPCREDUCE_BACKEND": backend}
        quick = ("--replays", 2, "--calls", 5, "--peers", "pair,allreduce,torch_nccl,mpi")
        output = mpirun("tests.simulated", 2, "-m", "ipcreduce", "bench", *wanted, *quick, env=environ).stdout
        assert "without torch_nccl: ModuleNotFoundError" in output
        assert "without mpi: it takes NumPy arrays" in output
        (row,) = json.loads(kept.read_text())["rows"]
        assert (row["algorithm"], [*row["own_us"]]) == (by, ["allreduce"])


@pytest.mark.parametrize("who", ["ours", "pair"])
def test_norms_that_are_wrong(mpirun: Run, tmp_path: Path, who: str) -> None:
    kept = tmp_path / "kept.json"
    output = mpirun("tests.simulated", 2, "tests/sim/bench_worker.py", kept, f"norm_{who}", env=SMALL).stdout
    if who == "ours":
        for rank in range(2):
            assert f"{rank}: the RMSNorm of 2 rows, before it was timed: ArithmeticError: its result is" in output
    else:
        assert "without pair: ArithmeticError: its result is wrong, at 256 bytes" in output


def test_over_nccl(mpirun: Run, tmp_path: Path) -> None:
    kept = tmp_path / "bench.json"
    wanted = ("--smallest", "1K", "--largest", "2K", "--json", kept)
    environ = SMALL | {"IPCREDUCE_BACKEND": "nccl"}
    output = mpirun("tests.simulated", 2, "-m", "ipcreduce", "bench", *wanted, *QUICK, env=environ).stdout
    assert "eager, 2 ranks" in output
    rows = json.loads(kept.read_text())["rows"]
    assert {row["bytes"] for row in rows} == {1024, 2048}
    assert all(row["limit_us"] > 0 and row["ours_us"] > 0 for row in rows)
    assert {row["algorithm"] for row in rows} == {"nccl"}


@pytest.mark.parametrize("terminal", [{"COLUMNS": "80"}, {"COLUMNS": "80", "TERM": "dumb", "FORCE_COLOR": "1"}])
def test_a_log_has_whole_numbers(mpirun: Run, tmp_path: Path, terminal: dict[str, str]) -> None:
    """In columns, wider than a terminal, with no control codes, whatever a launcher says of one."""
    kept = tmp_path / "bench.json"
    wanted = ("--smallest", 64, "--largest", 128, "--mode", "graph", "--json", kept)
    output = mpirun("tests.simulated", 2, "-m", "ipcreduce", "bench", *wanted, *QUICK, env=SMALL | terminal).stdout
    assert not letters_beyond_ascii(output), output
    assert "\x1b" not in output
    assert "\r" not in output
    lines = output.splitlines()
    first = lines.index("graph, 2 ranks, sum of bfloat16") + 1
    header, rule, *rows = lines[first : first + 4]
    edges = [match.span() for match in re.finditer("-+", rule)]
    names = [header[start:end].strip() for start, end in edges]
    assert names[:6] == ["bytes", "algorithm", "us", "min", "p99", "bus GB/s"]
    for text, row in zip(rows, json.loads(kept.read_text())["rows"], strict=True):
        cells = dict(zip(names, (text[start:end].strip() for start, end in edges), strict=True))
        assert (cells["bytes"], cells["algorithm"]) == (f"{row['bytes']} B", row["algorithm"])
        assert [float(cells[name]) for name in ("us", "min", "p99", "bus GB/s", "limit us")] == [
            pytest.approx(row[name], abs=0.051)
            for name in ("ours_us", "ours_min_us", "ours_p99_us", "bus_GBps", "limit_us")
        ]
    assert "size 2 of 2: 128 B" in lines


def test_one_mode_and_a_forced_algorithm(mpirun: Run, tmp_path: Path) -> None:
    kept = tmp_path / "bench.json"
    wanted = ("--smallest", 64, "--largest", 64, "--mode", "eager", "--algorithm", "two_shot", "--json", kept)
    output = mpirun(
        "tests.simulated", 2, "-m", "ipcreduce", "bench", *wanted, "--calls", 5, "--replays", 2, env=SMALL
    ).stdout
    assert "without nccl: " in output
    assert "without torch_symm_one_shot: ModuleNotFoundError" in output
    (row,) = json.loads(kept.read_text())["rows"]
    assert (row["mode"], row["algorithm"]) == ("eager", "two_shot")


def test_a_wrong_peer_is_left_out(mpirun: Run, tmp_path: Path) -> None:
    output = mpirun("tests.simulated", 2, "tests/sim/bench_worker.py", tmp_path / "kept.json", env=SMALL).stdout
    assert "peers [['elsewhere'], ['elsewhere']]" in output
    assert "without wrong: ArithmeticError: its result is wrong, at 64 bytes" in output


def test_what_is_misplaced_is_wrong(mpirun: Run, tmp_path: Path) -> None:
    """Data that repeat every power of two would not show it."""
    output = mpirun(
        "tests.simulated", 2, "tests/sim/bench_worker.py", tmp_path / "kept.json", "misplaced", env=SMALL
    ).stdout
    assert "without misplaced: ArithmeticError: its result is wrong, at 131072 bytes" in output


def test_an_exception_on_one_rank_ends_all_and_leaves_what_there_is(mpirun: Run, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    done = mpirun("tests.simulated", 2, "tests/sim/bench_worker.py", kept, "breaks", env=SMALL, check=False, timeout=60)
    assert done.returncode
    assert "ValueError: not today" in done.stdout
    assert [row["bytes"] for row in json.loads(kept.read_text())["rows"]] == [64]


def test_nothing_of_ours_is_timed_that_is_wrong(mpirun: Run, tmp_path: Path) -> None:
    output = mpirun("tests.simulated", 2, "tests/sim/bench_worker.py", tmp_path / "kept.json", "ours", env=SMALL).stdout
    for rank in range(2):
        assert f"{rank}: the sum of 64 bytes, before it was timed: ArithmeticError: its result is wrong" in output


def test_graphs_of_ours_are_checked_too(mpirun: Run, tmp_path: Path) -> None:
    output = mpirun(
        "tests.simulated", 2, "tests/sim/bench_worker.py", tmp_path / "kept.json", "graph", env=SMALL
    ).stdout
    for rank in range(2):
        assert f"{rank}: the sum of 64 bytes is wrong (graph, when timed)" in output


def test_figures(mpirun: Run, tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    wanted = ("--only", "dtypes,shapes,lists,eager,block", "--largest", "16K")
    few = ("--calls", 8, "--replays", 2, "--turns", 2, "--before", 3)
    mpirun("tests.simulated", 2, "-m", "benchmarks.figures", *wanted, *few, "--json", kept, timeout=300, env=SMALL)
    rows = json.loads(kept.read_text())["rows"]
    assert {"sum of float64", "max of uint8", "ragged", "in place", "list, 4 bfloat16"} <= {row["what"] for row in rows}
    assert all(row["ratio"] == row["us"] / row["base_us"] > 0 for row in rows)


def test_fused(mpirun: Run, tmp_path: Path) -> None:
    """All parts of the benchmark of fused kernels; each result in it is compared with NumPy's."""
    kept = tmp_path / "fused.json"
    few = ("--hidden", 256, "--rows", 3, "--calls", 2, "--replays", 2, "--seconds", 60)
    output = mpirun("tests.simulated", 2, "benchmarks/fused.py", kept, *few, timeout=200, env=SMALL).stdout
    assert ", 0 wrong" in output
    result = json.loads(kept.read_text())
    assert all(len(result[part]) == 1 for part in ("table", "fp8", "chain", "shapes", "eager"))
    assert result["peers"] == []
    assert "without FlashInfer: No module named 'flashinfer'" in output
    assert {"all-reduce", "fused", "pair", "fused, more"} <= result["table"][0].keys()
    assert {"one c1 d1 3x32", "one c2 d1 6x32", "two c1 d1 3x32"} <= result["shapes"][0]["alone"].keys()
    assert result["shapes"][0]["alone"].keys() == result["shapes"][0]["chained"].keys()


def test_fused_without_time(mpirun: Run, tmp_path: Path) -> None:
    kept = tmp_path / "fused.json"
    few = ("--only", "table", "--hidden", 256, "--rows", 3, "--seconds", 0)
    output = mpirun("tests.simulated", 2, "benchmarks/fused.py", kept, *few, env=SMALL).stdout
    assert "out of time: 1 shapes left out, from 256 x 3 on" in output
    assert json.loads(kept.read_text())["table"] == []
