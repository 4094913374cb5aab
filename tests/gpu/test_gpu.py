"""The sweep, the scenarios and the examples on this machine's GPUs, with as many ranks as GPUs and with more."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.matrix import table
from tests.shared import documents
from tests.tools import machine, sanitizers

Run = Callable[..., subprocess.CompletedProcess[str]]
BEFORE_AND_AFTER = (
    "from_mpi4py.md", "from_nccl.md", "from_torch_distributed.md", "from_vllm_and_sglang.md", "recipes.md",
)  # fmt: skip


def worlds() -> list[tuple[int, bool]]:
    """(ranks, whether they share GPUs): time-sliced kernels take milliseconds, so the counts are small there."""
    gpus = machine.cuda()[0]
    return [(n, n > gpus) for n in sorted({2, 3, 4, min(8, max(2, gpus))})]


@pytest.mark.parametrize(("ranks", "shared"), worlds())
def test_sweep(mpirun: Run, ranks: int, shared: bool) -> None:
    cases, largest = (100, 100_000) if shared else (800, 4 << 20)
    output = mpirun("tests/gpu/sweep.py", ranks, "--cases", cases, "--largest", largest, timeout=500).stdout
    assert f"{cases} cases, " in output
    assert f" calls on {ranks} ranks, all right" in output


def test_epochs_that_wrap(mpirun: Run) -> None:
    calls, replays = (60, 5) if machine.cuda()[0] < 2 else (1000, 100)
    output = mpirun("tests/gpu/wrap.py", 2, "--calls", calls, "--replays", replays, "--samples", 5, timeout=300).stdout
    assert output.count(f": {calls * replays} through the wrap, 5 samples right, ") == 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_scenarios(mpirun: Run, ranks: int) -> None:
    from tests.gpu.scenarios import SCENARIOS

    result = mpirun("tests/gpu/scenarios.py", ranks, timeout=300)
    assert result.stdout.count(": right, ") == len(SCENARIOS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_captures_of_others(mpirun: Run, ranks: int) -> None:
    from tests.gpu.captures import SCENARIOS

    result = mpirun("tests/gpu/captures.py", ranks, timeout=300)
    assert result.stdout.count(": right, ") == len(SCENARIOS)


@pytest.mark.parametrize("backend", ["ipc", "nccl", "one rank"])
def test_matrix(mpirun: Run, subtests: pytest.Subtests, backend: str) -> None:
    """Every kind of call in every way."""
    output = mpirun("tests.matrix", 1 if backend == "one rank" else 2, backend, check=False, timeout=500).stdout
    for cell, outcome, right in table.outcomes(backend, output):
        with subtests.test(cell=cell):
            assert right, f"{outcome}\n{output}"


EXAMPLES = ("allreduce.py", "llama_torch.py", "tensor_parallel.py", "train_ddp.py", "train_digits.py")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples(mpirun: Run, example: str) -> None:
    assert "backend ipc" in mpirun(f"mpi_examples/{example}", 2, timeout=300).stdout


@pytest.mark.skipif(machine.cuda()[0] < 2, reason="NCCL needs a GPU for each rank")
def test_pages_that_bring_people_over(mpirun: Run) -> None:
    """The programs before and after, with CuPy's NCCL and PyTorch's."""
    pages = [machine.ROOT / "docs" / name for name in BEFORE_AND_AFTER]
    output = mpirun("tests.mpi.documents", 2, *pages, timeout=300).stdout
    for page in pages:
        shown = [piece for piece in documents.pieces(page) if piece.fragment in (None, "needs NCCL")]
        assert shown
        assert all(f"{piece.page}, line {piece.line}: right\n" in output for piece in shown), output


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_gradients(mpirun: Run) -> None:
    assert "8 scenarios, all right" in mpirun("tests/mpi/ddp_worker.py", 2, timeout=300).stdout


@pytest.mark.skipif(bool(sanitizers.missing()), reason=sanitizers.missing())
@pytest.mark.parametrize("kernel", sanitizers.KERNELS)
def test_memcheck_finds_nothing(kernel: str) -> None:
    """On two ranks of one GPU; ``make sanitizers`` runs the other tools too."""
    row = sanitizers.run(machine.mpirun(sys.executable), "memcheck", kernel, 500)
    assert (row["errors"], row["problem"]) == (0, ""), row
    assert row["cases"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.skipif(machine.cuda()[0] < 2, reason="NCCL needs a GPU for each rank")
def test_groups_of_servers(mpirun: Run) -> None:
    assert mpirun("tests.gpu.serving", 2, timeout=300).stdout.count("right\n") == 2
