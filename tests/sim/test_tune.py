"""``python -m ipcreduce tune`` on the simulated device: the table is kept, and every rank's next launches follow it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulated.machine import Gpu
from tests.tools.machine import letters_beyond_ascii

Run = Callable[..., subprocess.CompletedProcess[str]]
TABLE = "tuned-Simulated-GPU-{}.json"


def environment(path: Path) -> dict[str, str]:
    path.chmod(0o700)
    return {"IPCREDUCE_WORKSPACE_MB": "1", "IPCREDUCE_CACHE_DIR": str(path)}


def test_measured_kept_and_used(mpirun: Run, tmp_path: Path) -> None:
    env = environment(tmp_path) | {"TERM": "dumb", "FORCE_COLOR": "1"}
    quick = ("tune", "--largest", "2K", "--replays", 2)
    dry = mpirun("tests.simulated", 2, "-m", "ipcreduce", *quick, "--dry-run", env=env).stdout
    assert "up to    2 KB: one_shot, blocks of " in dry
    assert not [*tmp_path.iterdir()]
    path = tmp_path / TABLE.format(2)
    rows = [{"hidden": 64, "up_to": 1, "algorithm": "two_shot", "cluster": 1}]
    path.write_text(json.dumps({"version": 3, "choices": [], "norms": rows}))
    output = mpirun("tests.simulated", 2, "-m", "ipcreduce", *quick, env=env).stdout
    assert f"kept in {path}" in output
    assert "hidden 64, up to    1 rows: two_shot, blocks for a row: 1" in output
    choices, kept = (json.loads(path.read_text())[name] for name in ("choices", "norms"))
    assert kept == rows, "which only --hidden changes"
    assert choices[-1]["up_to"] == 2048
    narrow = {"COLUMNS": "40", "TERM": "dumb", "FORCE_COLOR": "1"}  # as a launcher may say of a log
    info = mpirun("tests.simulated", 2, "-m", "ipcreduce", "info", env=env | narrow).stdout
    for gpu in (Gpu(0, 0), Gpu(1, 1)):
        assert f"{gpu.index}    Simulated GPU  9.0         1.0 GB  {gpu.uuid_text}  {1 - gpu.index}" in info, info
    for text in (dry, output, info):
        assert not letters_beyond_ascii(text), text
        assert "\x1b" not in text, text
    assert f"plan: tuned, {len(choices)} choices" in info
    assert "plan: tuned for RMSNorm of hidden size 64" in info
    assert "plan: default, not tuned" in mpirun("tests.simulated", 3, "-m", "ipcreduce", "info", env=env).stdout


def test_rows_with_rmsnorm(hold: Callable[..., None]) -> None:
    hold(2, "tuned_norms")


def test_needs_a_gpu_for_each_rank(mpirun: Run, tmp_path: Path) -> None:
    env = environment(tmp_path) | {"SIM_DEVICES": "1"}
    done = mpirun("tests.simulated", 2, "-m", "ipcreduce", "tune", "--largest", "2K", env=env, check=False)
    assert done.returncode == 1
    assert done.stdout.count("tune needs a GPU for each rank") == 1
    assert "2 ranks on a GPU, so at most 66 blocks a launch" in done.stdout
    assert not [*tmp_path.iterdir()]


def test_needs_a_place_for_the_table_before_it_measures(mpirun: Run, tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / TABLE.format(2)).mkdir()
    done = mpirun("tests.simulated", 2, "-m", "ipcreduce", "tune", "--largest", "2K", env=env, check=False)
    assert done.returncode == 1
    assert done.stdout.count("ipcreduce: the table cannot be stored (Is a directory") == 1
    assert "size 1 of" not in done.stdout


@pytest.mark.parametrize("ranks", [3])
def test_odd_tables_are_right_too(mpirun: Run, tmp_path: Path, ranks: int) -> None:
    """Few and small blocks, each kernel where the other is the usual one."""
    shapes = [(100, "two_shot", 32, 1, 4), (1000, "one_shot", 1024, 512, 1), (5000, "one_shot", 32, 512, 1)]
    shapes += [(9000, "two_shot", 256, 1, 1), (30000, "two_shot", 32, 3, 2), (40000, "one_shot", 64, 512, 1)]
    names = ("up_to", "algorithm", "block", "blocks", "depth")
    choices = [dict(zip(names, shape, strict=True)) for shape in shapes]
    env = environment(tmp_path)
    (tmp_path / TABLE.format(ranks)).write_text(json.dumps({"version": 3, "choices": choices}))
    arguments = ("tests/gpu/sweep.py", "plain", "--cases", 12, "--largest", 50_000, "--seed", 5)
    assert (
        f"12 cases, 72 calls on {ranks} ranks, all right"
        in mpirun("tests.simulated", ranks, *arguments, env=env).stdout
    )
    quick = ("--largest", 128, "--calls", 5, "--mode", "eager", "--peers", "", "--json", tmp_path / "bench.json")
    mpirun("tests.simulated", ranks, "-m", "ipcreduce", "bench", "--smallest", 64, *quick, env=env)
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["two_shot", "one_shot"]


def test_a_spoilt_table_is_not_used(mpirun: Run, tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / TABLE.format(2)).write_text("{")
    done = mpirun("tests.simulated", 2, "-m", "ipcreduce", "info", env=env)
    assert "plan: default, not tuned" in done.stdout
    assert done.stdout.count("cannot be used (") == 1  # rank 0 reads it, for all
