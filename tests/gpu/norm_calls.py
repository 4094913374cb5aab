"""Random calls of allreduce_rmsnorm on GPUs: ``mpirun -n 2 python tests/gpu/norm_calls.py [--cases 200]``.

Each is made eagerly several times, also in place on the same arrays, and from a graph, and with PyTorch's tensors where
PyTorch is. All results are compared with NumPy, bit for bit. tests/gpu/sweep.py has more shapes of the kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import ipcreduce
from tests.gpu import cupy_module
from tests.shared import bounds, norms, reference, worker

HIDDEN = 1, 100, 128, 384, 640, 2880, 4096, 5120, 7168, 8192, 8200
GIVEN = 0.0625


@dataclass(frozen=True)
class Case:
    """One call, the same on every rank but for the values of x."""

    form: tuple[int, ...]
    dtype: str
    scales: str
    column_major: bool
    residual: bool
    bias: float
    stride: int
    offset: int

    @classmethod
    def draw(cls, rng: np.random.Generator, rows: int) -> Case:
        hidden = int(rng.choice(HIDDEN))
        scales = str(rng.choice(["", "", "given", "token", "group"]))
        if scales == "group" and hidden % 128:
            scales = "token"
        form = (hidden,) if rng.random() < 0.1 else (int(rng.integers(1, rows + 1)), hidden)
        return cls(
            (2, *form) if rng.random() < 0.2 else form, str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"])),
            scales, scales == "group" and bool(rng.random() < 0.5), bool(rng.random() < 0.8),
            float(rng.choice([0.0, 1.0])), int(rng.choice([1, 1, 2])), int(rng.choice([0, 0, 0, 3])),
        )  # fmt: skip


class Played:
    """A case on one rank."""

    def __init__(self, comm: Any, case: Case, rng: np.random.Generator) -> None:
        kind = norms.DTYPES[case.dtype]
        every = [(rng.integers(-16, 17, case.form) / 4).astype(kind) for _ in range(comm.size)]  # exact in any order
        weight = reference.random_array(rng, case.form[-1:], kind, False)
        added = reference.random_array(rng, case.form, kind, False)
        rows = (-1, case.form[-1])
        self.right = norms.results(
            reference.reduce(every, "sum").reshape(rows), added.reshape(rows) if case.residual else None, weight,
            dtype=case.dtype, eps=1e-6, weight_bias=case.bias, scales=case.scales, given=GIVEN,
        )  # fmt: skip
        self.comm, self.case = comm, case
        self.values = every[comm.rank], added
        self.x, self.residual = (self._laid_out(values) for values in self.values)
        self.weight, self.scale = cupy.asarray(weight), cupy.full((), GIVEN, np.float32)

    def _laid_out(self, values: np.ndarray) -> Any:
        """A device array of these values, with the offset and the stride of the case."""
        offset, stride = self.case.offset, self.case.stride
        room = cupy.zeros(offset + stride * values.size, values.dtype)
        array = room[offset:].reshape(*values.shape[:-1], stride * values.shape[-1])[..., ::stride]
        self._fill(array, values)
        return array

    @staticmethod
    def _fill(array: Any, values: np.ndarray) -> None:
        array[...] = cupy.asarray(values)

    def renew(self) -> None:
        """Give the inputs their values again."""
        for array, values in zip((self.x, self.residual), self.values, strict=True):
            self._fill(array, values)
        cupy.cuda.Device().synchronize()

    def call(self, wrap: Any = None, **change: Any) -> Any:
        wrap = wrap or (lambda array: array)
        per = {"token": "token", "group": 128}.get(self.case.scales)
        how = None
        if self.case.scales:
            how = ipcreduce.FP8(None if per else wrap(self.scale), per, self.case.column_major)
        given = {"x": self.x, "weight": self.weight, "residual": self.residual if self.case.residual else None}
        arguments = {name: None if array is None else wrap(array) for name, array in (given | change).items()}
        return self.comm.allreduce_rmsnorm(**arguments, quantize=how, weight_bias=self.case.bias)

    def check(self, what: str, found: Any, out: Any = None) -> None:
        """:raises AssertionError: if a result of a call is not the right one."""
        self.comm.synchronize()
        results = {"residual_out": found[-1], "y": found[0] if not self.case.scales else out}
        if self.case.scales:
            results |= {"quantised": found[0]} | ({"scales": found[1]} if self.case.scales != "given" else {})
        for name, result in results.items():
            if result is not None:
                right = np.ascontiguousarray(getattr(self.right, name)).view(np.uint8).reshape(-1)
                assert (self._bytes(result) == right).all(), f"{name}, {what}: {self.case}"

    def _bytes(self, result: Any) -> np.ndarray:
        if type(result).__module__.startswith("torch"):
            torch = importlib.import_module("torch")
            result = cupy.from_dlpack(result.contiguous().view(torch.uint8))
        return np.ascontiguousarray(cupy_module.read(result)).view(np.uint8).reshape(-1)

    def run(self) -> None:
        """Make the call in every way."""
        for turn in range(3):
            self.check(f"new, turn {turn}", self.call())
        with ipcreduce.Graph(self.comm) as graph:
            with graph.record():
                found = self.call()
            for turn in range(2):
                graph.replay()
                self.check(f"replay {turn}", found)
        for turn in range(4):
            self.renew()
            change = {"out": self.x} | ({"residual_out": self.residual} if self.case.residual else {})
            self.check(f"in place, turn {turn}", self.call(**change), self.x)
        if importlib.util.find_spec("torch") is not None and hasattr(importlib.import_module("torch"), "float8_e4m3fn"):
            self._run_torch(importlib.import_module("torch"))

    def _run_torch(self, torch: Any) -> None:
        if self.case.dtype == "bfloat16":

            def wrap(array: Any) -> Any:
                if array.dtype != norms.DTYPES["bfloat16"]:
                    return torch.from_dlpack(array)
                steps = tuple(step // 2 for step in array.strides)
                whole = torch.from_dlpack(cupy.ndarray(array.size * self.case.stride, np.int16, array.data))
                return whole.view(torch.bfloat16).as_strided(array.shape, steps)

            self.renew()
            found = self.call(wrap)
            assert all(isinstance(one, torch.Tensor) for one in found)
            assert not self.case.scales or found[0].dtype is torch.float8_e4m3fn
            torch.cuda.synchronize()
            self.check("tensors", found)


def main() -> None:
    bounds.patient()
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--rows", type=int, default=70)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    backends: list[dict[str, Any]] = [{"backend": "ipc"}, {"algorithm": "two_shot"}]
    if world.size <= cupy.cuda.runtime.getDeviceCount() and importlib.util.find_spec("nccl") is not None:
        backends.append({"backend": "nccl"})
    communicators = [ipcreduce.Communicator(**arguments) for arguments in backends]
    for number in range(options.cases):
        rng = np.random.default_rng((options.seed, number))
        Played(communicators[number % len(communicators)], Case.draw(rng, options.rows), rng).run()
    for comm in communicators:
        comm.close()
    if world.rank == 0:
        print(f"{options.cases} calls with RMSNorm on {world.size} ranks, all right", flush=True)


if __name__ == "__main__":
    worker.run(main)
