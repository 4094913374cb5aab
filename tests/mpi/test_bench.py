"""``ipcreduce bench`` without GPUs: NumPy arrays against MPI's own Allreduce, and the refusals of what needs GPUs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.machine import letters_beyond_ascii

Run = Callable[..., subprocess.CompletedProcess[str]]
HOST = {"CUDA_VISIBLE_DEVICES": ""}  # on machines with GPUs too
NORM = ("bench", "--op", "allreduce_rmsnorm")
QUICK = ("bench", "--replays", 2, "--smallest", "1K")


@pytest.mark.parametrize("n", [1, 3])
def test_rows(mpirun: Run, tmp_path: Path, n: int) -> None:
    kept, sizes = tmp_path / "bench.json", [1024, 1536, 2048, 3072, 4096]
    output = mpirun("ipcreduce", n, *QUICK, "--largest", "4K", "--between", "--json", kept, env=HOST).stdout
    assert "NumPy arrays, since there is no GPU for these ranks:" in output
    lines = output.splitlines()
    assert lines.count(f"eager, {n} rank{'s' * (n > 1)}, sum of float32") == 1
    header = next(line for line in lines if line.lstrip().startswith("bytes"))
    assert " ".join(header.split()) == "bytes us min p99 bus GB/s limit us mpi best peer / us"
    assert "size 5 of 5: 4 KB" in lines
    assert not letters_beyond_ascii(output)
    result = json.loads(kept.read_text())
    assert (result["left_out"], result["machine"]["gpus"]) == ({}, [])
    assert {"machine", "versions", "date", "command"} <= result.keys()
    assert [row["bytes"] for row in result["rows"]] == sizes
    for row in result["rows"]:
        assert (row["ranks"], row["dtype"], row["op"], row["mode"]) == (n, "float32", "sum", "eager")
        assert 0 < row["ours_min_us"] <= row["ours_us"] <= row["ours_p99_us"]
        assert row["limit_us"] > 0
        assert row["peers_us"]["mpi"] > 0


@pytest.mark.parametrize("arrays", [0, 3])
@pytest.mark.parametrize(("op", "what"), [
    ("allgather", "all-gather"), ("reduce_scatter", "reduce-scatter"), ("broadcast", "broadcast"),
])  # fmt: skip
def test_other_collectives(mpirun: Run, tmp_path: Path, op: str, what: str, arrays: int) -> None:
    """Beside MPI's own, also on 3 ranks. MPI moves bfloat16, too, and does not add it."""
    kept, listed = tmp_path / "bench.json", ("--arrays", arrays) if arrays else ()
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        wanted = (*QUICK, "--op", op, "--largest", "2K", "--dtype", dtype, *listed, "--json", kept)
        output = mpirun("ipcreduce", 3, *wanted, env=HOST).stdout
        suffix = f" in {arrays} arrays" if arrays else ""
        assert f"eager, 3 ranks, {what} of {dtype}{suffix}\n" in output
        has_peer = op != "reduce_scatter" or dtype == "float32"
        assert output.count(f"without mpi: it has no {dtype}") == (not has_peer)
        rows = json.loads(kept.read_text())["rows"]
        unit = 3 * itemsize if op == "reduce_scatter" else itemsize
        assert [(row["op"], row["bytes"]) for row in rows] == [
            (op, nbytes // unit * unit) for nbytes in (1024, 2048)
        ]  # fmt: skip
        for row in rows:
            assert [*row["peers_us"]] == ["mpi"] * has_peer
            assert row["limit_us"] > 0


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint64", "bfloat16", "float16"])
def test_dtypes(mpirun: Run, tmp_path: Path, dtype: str) -> None:
    """MPI has no half types."""
    kept = tmp_path / "bench.json"
    output = mpirun("ipcreduce", 2, *QUICK, "--largest", "1K", "--dtype", dtype, "--json", kept, env=HOST).stdout
    half = dtype.endswith("float16")
    assert output.count(f"without mpi: it has no {dtype}") == half
    (row,) = json.loads(kept.read_text())["rows"]
    assert (row["dtype"], [*row["peers_us"]]) == (dtype, [] if half else ["mpi"])


def test_lists(mpirun: Run, tmp_path: Path) -> None:
    """--arrays: MPI's Allreduce is called for each array."""
    kept = tmp_path / "bench.json"
    output = mpirun("ipcreduce", 2, *QUICK, "--largest", "1K", "--arrays", 5, "--json", kept, env=HOST).stdout
    assert "eager, 2 ranks, sum of float32 in 5 arrays" in output
    (row,) = json.loads(kept.read_text())["rows"]
    assert (row["bytes"], row["arrays"], [*row["peers_us"]]) == (1024, 5, ["mpi"])
    few = mpirun("ipcreduce", 2, *QUICK, "--largest", "1K", "--arrays", 257, env=HOST, check=False)
    assert "has room for 257 float32" in few.stdout


@pytest.mark.parametrize("quantize", ["none", "128"])
def test_norms(mpirun: Run, tmp_path: Path, quantize: str) -> None:
    """On the host there is no pair, and no peer."""
    kept = tmp_path / "bench.json"
    wanted = ("bench", "--op", "allreduce_rmsnorm", "--hidden", 256, "--rows", "2,1", "--quantize", quantize)
    output = mpirun("ipcreduce", 2, *wanted, "--replays", 2, "--json", kept, env=HOST).stdout
    assert "eager, 2 ranks, RMSNorm of the sum of float32 in rows of 256" in output
    rows = json.loads(kept.read_text())["rows"]
    assert [(row["rows"], row["bytes"], [*row["own_us"]]) for row in rows] == [
        (2, 2048, ["allreduce"]), (1, 1024, ["allreduce"])
    ]  # fmt: skip


def test_a_smallest_size_above_the_usual_largest(mpirun: Run, tmp_path: Path) -> None:
    """It is measured, and no more than one size."""
    kept = tmp_path / "bench.json"
    quick = ("bench", "--replays", 1, "--smallest", "65M", "--peers", "", "--json", kept)
    mpirun("ipcreduce", 1, *quick, env=HOST)
    assert [row["bytes"] for row in json.loads(kept.read_text())["rows"]] == [128 << 20]


def test_a_plot(mpirun: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    mpirun("ipcreduce", 2, *QUICK, "--largest", "2K", "--plot", path, env=HOST)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_peers_of_gpus_are_left_out(mpirun: Run) -> None:
    output = mpirun("ipcreduce", 2, *QUICK, "--largest", "1K", "--peers", "nccl", env=HOST).stdout
    assert output.count("without nccl: it takes GPU arrays") == 1


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (("bench", "--mode", "graph"), "--mode graph needs GPUs", 1),
        (("bench", "--algorithm", "one_shot"), "--algorithm one_shot needs GPUs", 1),
        (("bench", "--calls", "4"), "--calls 4 needs GPUs", 1),
        (("tune",), "tune needs GPUs and at least 2 ranks. Start it", 1),
        (("bench", "--replays", "0"), "--replays: '0' is no whole number", 2),
        (("bench", "--smallest", "5", "--largest", "7"), "no power of two from --smallest to --largest", 2),
        (("bench", "--largest", "2", "--smallest", "1"), "1 to 2 bytes, has room for one float32", 2),
        (("bench", "--op", "allgather", "--algorithm", "bulk"), "--algorithm has no meaning with --op allgather", 2),
        (("bench", "--op", "broadcast", "--rows", "8"), "--rows has no meaning without --op allreduce_rmsnorm", 2),
        (("bench", "--hidden", "8"), "--hidden has no meaning without --op allreduce_rmsnorm", 2),
        ((*NORM, "--largest", "1M"), "--largest has no meaning with --op allreduce_rmsnorm", 2),
        ((*NORM, "--dtype", "int8"), "--dtype int8 cannot be normalised", 2),
        ((*NORM, "--quantize", "128", "--hidden", "64"), "--hidden 64 is no multiple of 128", 2),
        ((*NORM, "--rows", "1,0"), "'0' is no whole number from 1", 2),
        (("bench", "--json", "/no/such/x"), "--json cannot be written (No such file or directory: /no/such/x)", 2),
        (("bench", "--plot", "/no/such/x.png"), "--plot cannot be written (No such file or directory", 2),
        (("bench", "--json", "."), "--json cannot be written (Is a directory: .)", 2),
    ],
)
def test_refused(mpirun: Run, arguments: tuple[str, ...], words: str, status: int) -> None:
    """Before anything is measured, and by rank 0 for all."""
    done = mpirun("ipcreduce", 2, *arguments, env=HOST, check=False, timeout=60)
    assert done.returncode == status
    assert done.stdout.count(words) == 1, done.stdout
    assert "size 1 of" not in done.stdout
    assert "Traceback" not in done.stdout


def test_a_file_that_was_there_is_kept_by_a_refused_run(mpirun: Run, tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "new.png"
    kept.write_text("content")
    arguments = ("bench", "--mode", "graph", "--json", kept, "--plot", new)
    assert mpirun("ipcreduce", 2, *arguments, env=HOST, check=False).returncode == 1
    assert kept.read_text() == "content"
    assert not new.exists()


def test_plots_into_unknown_formats_are_refused(mpirun: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = mpirun("ipcreduce", 2, "bench", "--plot", tmp_path / "x.json", env=HOST, check=False)
    assert done.returncode == 2
    assert done.stdout.count("ipcreduce: --plot cannot draw ") == 1


@pytest.mark.parametrize("who", ["ours", "mpi"])
def test_nothing_wrong_is_timed(mpirun: Run, tmp_path: Path, who: str) -> None:
    kept = tmp_path / "bench.json"
    done = mpirun("tests/mpi/bench_worker.py", 2, f"wrong_{who}", kept, env=HOST, check=False)
    if who == "mpi":
        assert "without mpi: ArithmeticError: its result is wrong, at 1024 bytes" in done.stdout
        assert [row["peers_us"] for row in json.loads(kept.read_text())["rows"]] == [{}]
    else:
        assert done.returncode == 1
        assert done.stdout.count("ipcreduce: the sum of 1024 bytes, before it was timed: ArithmeticError") == 1
        assert not kept.exists()


def test_what_goes_wrong_later_is_noticed_too(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun("tests/mpi/bench_worker.py", 2, "wrong_later", tmp_path / "bench.json", env=HOST, check=False)
    assert done.returncode == 1
    assert done.stdout.count("ipcreduce: the sum of 1024 bytes is wrong (eager, when timed)") == 1


def test_a_size_for_which_a_rank_has_no_memory(mpirun: Run, tmp_path: Path) -> None:
    arguments = "no_memory_on_the_last_rank", tmp_path / "bench.json"
    done = mpirun("tests/mpi/bench_worker.py", 2, *arguments, env=HOST, check=False)
    assert done.returncode == 1
    assert done.stdout.count("ipcreduce: there is no room for 1 KB (MemoryError: Unable to allocate them)") == 1
    assert "Traceback" not in done.stdout
