"""All-reduce and RMSNorm of NumPy arrays: ``mpirun -n 3 python tests/mpi/norm_worker.py memory|apart scenario ...``.

Each function among the scenarios runs on every rank, and asserts.
"""

from __future__ import annotations

import os
import sys

import numpy as np

import ipcreduce
from ipcreduce import FP8, ArgumentError, Communicator, IpcReduceError, PeerFailedError
from tests.shared import bounds, norm_reference, reference, worker
from tests.shared.norm_reference import same_bits
from tests.shared.world import WORLD

RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
HOW = sys.argv[1]


def some(number: int, form: tuple[int, ...], dtype: np.dtype, special: bool = False) -> np.ndarray:
    """The same on every rank."""
    return reference.random_array(np.random.default_rng((number, *form)), form, dtype, special)


def works(comm: Communicator) -> None:
    assert comm.allreduce(RANK) == SIZE * (SIZE - 1) // 2


def bits(comm: Communicator) -> None:
    """The results of random calls, as the unfused steps give them one after the other."""
    for number in range(40):
        rng = np.random.default_rng(number)
        dtype = np.dtype(rng.choice([np.float16, reference.BFLOAT16, np.float32]))
        hidden = int(rng.choice([1, 60, 128, 384, 1000, 4096, 8200]))
        form = (*rng.integers(0, 4, int(rng.integers(0, 3))).tolist(), hidden)
        scales = str(rng.choice(["", "given", "token", "group"])) if hidden % 128 == 0 else ""
        every = [some(100 * number + rank, form, dtype, bool(rng.random() < 0.1)) for rank in range(SIZE)]
        weight, bias = some(100 * number + 50, (hidden,), dtype), float(rng.choice([0.0, 1.0]))
        residual = some(100 * number + 51, form, dtype) if rng.random() < 0.7 else None
        how = {"given": FP8(scale=np.array(0.05, np.float32)), "token": FP8(per="token"), "group": FP8(per=128)}
        x, out = every[RANK].copy(), np.zeros(form, dtype) if rng.random() < 0.3 else None
        if number % 3 == 0:
            out = x
        reduced = comm.allreduce(every[RANK])
        expected = norm_reference.norm(reduced, weight, 1e-5, residual, bias, scales, 0.05)
        found = comm.allreduce_rmsnorm(
            x, weight, 1e-5, residual=residual, weight_bias=bias, out=out, quantize=how.get(scales)
        )  # fmt: skip
        assert same_bits(found[-1], expected.residual_out), number
        assert not scales or same_bits(found[0].view(np.uint8), expected.quantised), number
        assert scales in ("", "given") or reference.same(found[1], expected.scales), number
        y = out if scales else found[0]
        assert y is None or same_bits(y, expected.y), number
        assert scales or out is None or y is out


def refused(comm: Communicator) -> None:
    """A wrong argument on one rank: it raises and writes nothing, and the others hear of it."""
    out = np.full((4, 256), 7, np.float32)
    x, weight = np.ones((4, 256), np.float32), np.ones(256, np.float32)
    found: IpcReduceError | None = None
    try:
        comm.allreduce_rmsnorm(x, weight[:255] if RANK == LAST else weight, out=out)
    except IpcReduceError as error:
        found = error
    assert type(found) is (ArgumentError if RANK == LAST else PeerFailedError), found
    assert "weight has shape (255,)" in str(found), found
    assert RANK != LAST or (out == 7).all()
    works(comm)
    y, total = ipcreduce.allreduce_rmsnorm(x, weight, 0.0, comm=comm)
    assert (total == SIZE).all()
    assert (y == 1).all()


SCENARIOS = {scenario.__name__: scenario for scenario in (bits, refused)}


def main() -> None:
    bounds.patient()
    if HOW == "apart":
        os.environ["IPCREDUCE_HOSTID"] = f"host {RANK}"
    with Communicator() as comm:
        assert comm.backend == "host", comm.describe()
        for name in sys.argv[2:]:
            SCENARIOS[name](comm)
            WORLD.Barrier()
            if RANK == 0:
                print(f"{name}: right", flush=True)


if __name__ == "__main__":
    worker.run(main)
