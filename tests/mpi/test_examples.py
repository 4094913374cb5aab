"""Every example gives the right answer under mpirun, and a wrong all-reduce makes each of them fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import machine

# An ipcreduce whose all-reduce leaves every rank with its own array.
NO_REDUCTION = """
from mpi4py import MPI
class Communicator:
    rank, size, backend = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, "mpi"
    def __init__(self, **options): pass
    def allreduce(self, array, out=None): return array
    def close(self): pass
get_communicator = Communicator
def allreduce(array, out=None, comm=None): return array
"""


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_allreduce(mpirun, n):
    output = mpirun("mpi_examples/allreduce.py", n).stdout
    ranks = re.findall(rf"rank (\d) of {n}, backend \w+: brought (\d)\.0, got {n * (n + 1) // 2}\.0", output)
    assert sorted(ranks) == [(str(rank), str(rank + 1)) for rank in range(n)], output


@pytest.mark.parametrize("n", [1, 3, 4])
def test_tensor_parallel(mpirun, n):
    output = mpirun("mpi_examples/tensor_parallel.py", n).stdout
    assert f"{n} ranks, backend" in output
    assert 0 < float(re.search("largest error (.*) of the largest element", output)[1]) < 1e-5


@pytest.mark.parametrize(("n", "device"), [(1, "auto"), (4, "auto"), (4, "host")])
def test_train_digits(mpirun, n, device):
    output = mpirun("mpi_examples/train_digits.py", n, "--device", device).stdout
    assert f"{n} ranks, " in output
    losses = [float(loss) for loss in re.findall(r"epoch +\d+/20 +loss ([\d.]+) +held-out accuracy", output)]
    assert len(losses) == 20
    assert losses[-1] < 0.1 < 1 < losses[0]
    assert re.search(r"[\d.]+ s, of which [\d.]+ s in all-reduce", output)
    assert float(re.search("^ok   held-out accuracy (.*)%, at least 95%$", output, re.M)[1]) >= 95
    assert re.search("^ok   all ranks hold the same weights, bit for bit$", output, re.M)
    assert float(re.search("^ok   one process arrives within (.*) of these weights", output, re.M)[1]) <= 1e-4
    assert "FAIL" not in output


@pytest.mark.skipif(machine.cuda()[0] > 0, reason="for machines with no GPU")
def test_train_digits_says_that_there_is_no_gpu(mpirun):
    run = mpirun("mpi_examples/train_digits.py", 2, "--device", "gpu", check=False)
    assert run.returncode != 0
    assert "no GPUs that they can use" in run.stdout


@pytest.mark.parametrize("example", ["allreduce", "tensor_parallel", "train_digits"])
def test_a_wrong_sum_is_noticed(mpirun, tmp_path: Path, example: str):
    (tmp_path / "ipcreduce.py").write_text(NO_REDUCTION)
    run = mpirun(f"mpi_examples/{example}.py", 4, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert run.returncode != 0
    assert "Traceback" not in run.stdout
