"""Every example gives the right answer under mpirun, and a wrong all-reduce makes each of them fail."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import machine

HOST = {"CUDA_VISIBLE_DEVICES": ""}  # on machines with GPUs too

# An ipcreduce whose all-reduce leaves every rank with its own array.
NO_REDUCTION = """
import contextlib, types
from mpi4py import MPI
class Communicator:
    import numpy as xp
    rank, size, backend = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, "host"
    def __init__(self, **options): pass
    def allreduce(self, array, op="sum", out=None): return array
    def capture(self): return contextlib.nullcontext()
    def synchronize(self): pass
    def close(self): pass
def allreduce(array, out=None, comm=None): return array
class GraphRunner:
    recordings = {}
    def __init__(self, function, *args, **options): self.function = function
    def __call__(self, *args): return self.function(*args)
    def close(self): pass
class IpcReduceError(Exception): pass
def Graph(comm): return contextlib.nullcontext()
def eager_break(function): return function
context = types.SimpleNamespace()
@contextlib.contextmanager
def forward_context(descriptor, mode, attn_metadata):
    context.mode, context.attn_metadata = mode, attn_metadata
    yield
def get_forward_context(): return context
"""

# A PyTorch whose tensors are NumPy's arrays.
TORCH = """
import numpy as np
class Tensor(np.ndarray):
    fill_ = np.ndarray.fill
    def numpy(self): return self.view(np.ndarray)
def ones(count): return np.ones(count, np.float32).view(Tensor)
empty = ones
"""


@pytest.mark.parametrize("n", [1, 4])
def test_allreduce(mpirun, n):
    output = mpirun("mpi_examples/allreduce.py", n).stdout
    ranks = re.findall(rf"rank (\d) of {n}, backend \w+: brought (\d)\.0, got {n * (n + 1) // 2}\.0", output)
    assert sorted(ranks) == [(str(rank), str(rank + 1)) for rank in range(n)], output


@pytest.mark.parametrize("n", [1, 3])
def test_graph_replay(mpirun, n):
    output = mpirun("mpi_examples/graph_replay.py", n, env=HOST).stdout
    assert f"{n} ranks, backend host. no graph\n1000 runs, 0 wrong; " in output


@pytest.mark.parametrize("n", [1, 4])
def test_piecewise(mpirun, n):
    output = mpirun("mpi_examples/piecewise.py", n, env=HOST).stdout
    assert f"{n} ranks, backend host: no graphs" in output
    assert sum(int(count) for count in re.findall(r"\d in (\d+) runs", output)) == 200
    assert "200 runs in random order, 0 wrong" in output


@pytest.mark.parametrize("n", [3])
def test_decorator_order(mpirun, n):
    """Both orders are right where every step is a call."""
    output = mpirun("mpi_examples/decorator_order.py", n, env=HOST).stdout
    due = [(str(step), str(step * n**2), str(step * n**2)) for step in (1, 2, 3, 4)] * 2
    assert re.findall(r"step (\d): (\d+), (\d+) is due", output) == due
    assert "every step is right" in output


def test_torch_capture(mpirun, tmp_path: Path):
    (tmp_path / "torch.py").write_text(TORCH)
    env = HOST | {"PYTHONPATH": f"{tmp_path}:{machine.ROOT}"}
    assert "2 ranks, backend host: 100 turns, 0 wrong" in mpirun("mpi_examples/torch_capture.py", 2, env=env).stdout
    (tmp_path / "torch.py").write_text("raise ImportError")
    assert mpirun("mpi_examples/torch_capture.py", 2, env=env).stdout == (
        "this example needs PyTorch: pip install torch\n"
    )


EXAMPLES = sorted(path.name for path in (machine.ROOT / "mpi_examples").glob("*.py"))
BY_THEMSELVES = {
    "llama_torch.py",
    "torch_ops.py",
    "train_ddp.py",
    "train_fsdp.py",
    "without_mpi.py",
}  # with tests of their own


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name not in BY_THEMSELVES])
def test_what_gpus_add_is_said_once(mpirun, tmp_path: Path, example: str):
    (tmp_path / "torch.py").write_text(TORCH)
    options = {"breakable.py": ["--steps", 4], "train_digits.py": ["--epochs", 5]}.get(example, [])
    env = HOST | {"PYTHONPATH": f"{tmp_path}:{machine.ROOT}"}
    output = mpirun(f"mpi_examples/{example}", 2, *options, env=env).stdout
    assert len(re.findall("^no GPUs here: .*with GPUs ", output, re.M)) == 1, output


def without_mpi(*arguments: object, path: Path = machine.ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "mpi_examples/without_mpi.py", *map(str, arguments)]
    environ = machine.environment() | HOST | {"PYTHONPATH": str(path)}
    return subprocess.run(command, cwd=machine.ROOT, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_without_mpi(n):
    run = without_mpi(*([] if n == 4 else [n]))
    assert (run.returncode, run.stderr) == (0, "")
    ranks = re.findall(rf"rank (\d) of {n}, backend host: brought (\d)\.0, got {n * (n + 1) // 2}\.0", run.stdout)
    assert sorted(ranks) == [(str(rank), str(rank + 1)) for rank in range(n)], run.stdout
    assert len(re.findall("^no GPUs here: .*with GPUs ", run.stdout, re.M)) == 1


def test_without_mpi_notices_a_wrong_sum(tmp_path: Path):
    (tmp_path / "ipcreduce.py").write_text(
        "class Communicator:\n    import numpy as xp\n    backend = 'host'\n"
        "    def __init__(self, group, device): self.rank, self.size = group.rank, group.size\n"
        "    def allreduce(self, array): return array\n    def close(self): pass\n"
    )
    run = without_mpi(path=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.parametrize("n", [1, 3])
def test_tensor_parallel(mpirun, n):
    output = mpirun("mpi_examples/tensor_parallel.py", n).stdout
    assert f"{n} ranks, backend" in output
    assert 0 < float(re.search("largest error (.*) of the largest element", output)[1]) < 1e-5


@pytest.mark.parametrize(("n", "device"), [(1, "auto"), (4, "host")])
def test_train_digits(mpirun, n, device):
    output = mpirun("mpi_examples/train_digits.py", n, "--device", device).stdout
    assert f"{n} ranks, " in output
    losses = [float(loss) for loss in re.findall(r"epoch +\d+/10 +loss ([\d.]+) +held-out accuracy", output)]
    assert len(losses) == 10
    assert losses[-1] < 0.3 < 1 < losses[0]
    seconds = re.search(
        r"^10 epochs took ([\d.]+) s, and ([\d.]+) s in one process with as many threads$", output, re.M
    )
    assert seconds
    assert all(float(one) > 0 for one in seconds.groups())
    assert float(re.search("^ok   held-out accuracy (.*)%, at least 95%$", output, re.M)[1]) >= 95
    assert re.search("^ok   all ranks hold the same weights, bit for bit$", output, re.M)
    assert float(re.search("^ok   one process arrives within (.*) of these weights", output, re.M)[1]) <= 1e-2
    assert "FAIL" not in output


@pytest.mark.skipif(machine.cuda()[0] > 0, reason="for machines with no GPU")
def test_train_digits_says_that_there_is_no_gpu(mpirun):
    run = mpirun("mpi_examples/train_digits.py", 2, "--device", "gpu", check=False)
    assert run.returncode != 0
    assert "no GPUs that they can use" in run.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("n", [1, 4])
def test_llama(mpirun, n, tmp_path: Path):
    program = ("mpi_examples/llama_torch.py", n, "--tokens", "4", "--runs", "1")
    output = mpirun(*program, env=HOST).stdout
    assert output.count("the tokens of the unsplit model") == 3, output
    assert len(re.findall("^no GPUs here: .*with GPUs ", output, re.M)) == 1, output
    if n > 1:
        (tmp_path / "ipcreduce.py").write_text(NO_REDUCTION)
        run = mpirun(*program, check=False, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"})
        assert run.returncode != 0
        assert "OTHER TOKENS" in run.stdout


@pytest.mark.parametrize(
    "example",
    [
        "allreduce", "breakable", "decorator_order", "graph_replay", "piecewise", "tensor_parallel", "torch_capture",
        "train_digits",
    ],
)  # fmt: skip
def test_a_wrong_sum_is_noticed(mpirun, tmp_path: Path, example: str):
    (tmp_path / "ipcreduce.py").write_text(NO_REDUCTION)
    (tmp_path / "torch.py").write_text(TORCH)
    run = mpirun(f"mpi_examples/{example}.py", 2, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert run.returncode != 0
    assert "Traceback" not in run.stdout
