"""Calls as people write them, beyond tests/shared/written_calls.py: in recordings, repeated, and of no dimension."""

from __future__ import annotations

import threading
from typing import Any

import cupy
import numpy as np

from ipcreduce import Communicator, Graph
from tests.shared.bounds import HANG
from tests.sim.scenarios.common import RANK, SIZE, TOTAL, right, works
from tests.simulated import machine_streams

CALLS = [("?", "max", True), ("F", "mean", TOTAL / SIZE), ("D", "sum", TOTAL), ("f", "mean", TOTAL / SIZE)]


def of_no_dimension() -> None:
    """A device array of no dimension gives one, and the call waits for no work of the device."""
    with Communicator() as comm:
        source = cupy.full((), RANK + 1, np.float32)
        right(comm.allreduce(source))  # by now its kernels are loaded
        gate, seen = threading.Event(), []
        machine_streams.submit(cupy.cuda.get_current_stream().ptr, lambda: seen.append(gate.wait(HANG)))
        for _ in range(3):
            result = comm.allreduce(source)
            assert type(result) is cupy.ndarray
            assert result.shape == ()
        gate.set()
        right(result)
        assert seen == [True], f"rank {RANK}: a call has waited for the work before it"
        works(comm)


def quick_the_second_time() -> None:
    """The fast path knows calls by every name of an op, and on bool and complex arrays."""
    usual: list[Any] = []
    with Communicator() as comm:
        reducer = comm._state.device
        call = reducer.call
        reducer.call = lambda *arguments: usual.append(arguments) or call(*arguments)  # type: ignore
        for dtype, op, due in CALLS:
            array, out = cupy.full((100,), RANK + 1, dtype), cupy.zeros(100, dtype)
            usual.clear()
            for _ in range(4):
                comm.allreduce(array, op, out=out)
                assert (cupy.asnumpy(out) == due).all(), f"rank {RANK}: {op} of {dtype} gives {out}"
                out.fill(0)
            assert len(usual) == 1, f"rank {RANK}: {len(usual)} calls of {op} of {dtype} took the usual path"
        comm.synchronize()
        works(comm)


def recorded() -> None:
    """Bool and complex arrays in a recording, staged and direct."""
    for algorithm in (None, "direct"):
        with Communicator(algorithm=algorithm) as comm:
            sources = [cupy.full((1024,), RANK + 1, dtype) for dtype, _, _ in CALLS]
            cupy.cuda.Device().synchronize()
            with Graph(comm) as graph:
                with graph.record():
                    results = [comm.allreduce(source, op) for source, (_, op, _) in zip(sources, CALLS, strict=True)]
                text = graph.describe()
                assert "max of bool (1024,)" in text, text
                assert "avg of complex64 (1024,)" in text, text
                assert text.count("by direct") == (len(CALLS) if algorithm else 0), text
                for turn in range(3):
                    for result, (dtype, op, due) in zip(results, CALLS, strict=True):
                        found = cupy.asnumpy(result)
                        assert (found.dtype, found.shape) == (np.dtype(dtype), (1024,))
                        assert (found == due).all(), f"rank {RANK}, {turn}: {op} of {dtype} gives {found}"
                        result.fill(0)
                    graph.replay()
                del results, result
            works(comm)


SCENARIOS = [of_no_dimension, quick_the_second_time, recorded]
