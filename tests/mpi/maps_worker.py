"""Calls with an expression on NumPy arrays: the function of the program, on every dtype and op, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import ipcreduce
from ipcreduce import Communicator, Map
from tests.shared import reference, worker


def main() -> None:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    with Communicator() as comm:
        for dtype in reference.DTYPES:
            for op in reference.OPS:
                values = [np.arange(1, 13).reshape(3, 4).astype(dtype) + dtype.type(other % 2) for other in range(size)]
                bias = np.arange(4).astype(dtype)
                then = Map("v * s + a", host=lambda v, s, a: v * s + a, s=2, a=bias)
                reduced = reference.reduce(values, op)
                wide = np.float32 if dtype in (np.float16, reference.BFLOAT16) else dtype
                expected = (reduced.astype(wide) * dtype.type(2).astype(wide) + bias.astype(wide)).astype(dtype)
                given = values[rank].copy()
                for out in (None, np.zeros_like(given), given):
                    found = comm.allreduce(given, op, out=out, then=then)
                    assert out is None or found is out
                    assert reference.same(found, expected), (dtype, op, found, expected)
        assert comm.allreduce(rank + 1.5, then=Map("v + 1", host=lambda v: v + 1)) == sum(range(size)) + 1.5 * size + 1
        try:
            comm.allreduce(np.ones(3), then=Map("v"))
            raise AssertionError("a call without a function for the host")
        except ipcreduce.UnsupportedError as error:
            assert f"rank {rank}, call" in str(error)  # noqa: PT017 - every rank raises it
        assert (comm.allreduce(np.ones(3)) == size).all()
        with pytest.raises(
            ipcreduce.UnsupportedError, match=f"made within call {comm.calls + 1} .* host function of a"
        ):
            comm.allreduce(np.ones(3), then=Map("v", host=comm.allreduce))
        assert (comm.allreduce(np.ones(3)) == size).all()
    print(f"rank {rank}: right", flush=True)


if __name__ == "__main__":
    worker.run(main)
