"""Calls on PyTorch's tensors, for which a small stand-in of it is in ``sys.modules``: which stream they run on."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, Graph, eager_break, errors
from tests.sim.scenarios.common import OWN, RANK, SIZE, TOTAL, delay, raises, right, works

_thread = threading.local()


class Tensor:
    """As PyTorch's, over an array of CuPy: the consumer's stream waits for PyTorch's current one."""

    def __init__(self, array: Any, pending: str = "") -> None:
        self.array, self.pending, self.device = array, pending, f"cuda:{OWN}"

    def is_neg(self) -> bool:
        return self.pending == "neg"

    def is_conj(self) -> bool:
        return self.pending == "conj"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, OWN

    def __dlpack__(self, *, stream: int) -> Any:
        current = current_stream(self.device).cuda_stream
        if stream not in (current or 1, -1):
            event = cupy.cuda.ExternalStream(current).record()
            cupy.cuda.ExternalStream(stream).wait_event(event)
        return self.array


def current_stream(device: Any) -> Any:
    assert device == f"cuda:{OWN}", device
    return types.SimpleNamespace(cuda_stream=getattr(_thread, "current", 0))


@contextlib.contextmanager
def torch_stream(stream: Any) -> Iterator[None]:
    """As ``with torch.cuda.stream(stream)``."""
    torch = types.SimpleNamespace(Tensor=Tensor, cuda=types.SimpleNamespace(current_stream=current_stream))
    with mock.patch.dict(sys.modules, torch=torch):
        before, _thread.current = getattr(_thread, "current", 0), stream.ptr
        try:
            yield
        finally:
            _thread.current = before


def on_torchs_stream() -> None:
    """A call on a tensor is among the work of PyTorch's current stream; on an array of CuPy, of CuPy's."""
    with Communicator(timeout=20) as comm:
        for torchs in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
            cupys = cupy.cuda.Stream(non_blocking=True)
            source, target = cupy.full((1000,), RANK + 1, np.float32), cupy.zeros(1000, np.float32)
            works(comm)
            cupy.cuda.Device().synchronize()
            with torch_stream(torchs), cupys:
                delay(cupys.ptr)  # a call there comes too late for who reads it on the tensor's
                comm.allreduce(Tensor(source), out=Tensor(target))
                with torchs:
                    found = cupy.asnumpy(target)
                assert (found == TOTAL).all(), f"rank {RANK}: {found[0]} before the result is there"
                works(comm)
                cupys.synchronize()
                target.fill(0)
                cupys.synchronize()
                delay(torchs.ptr)
                comm.allreduce(Tensor(source), out=Tensor(target), stream=cupys)
                right(target)
                comm.allreduce(source, out=target)
                right(target)
            fresh = comm.allreduce(Tensor(source))
            comm.synchronize()
            right(fresh)
            cupy.cuda.Device().synchronize()


def in_a_recording() -> None:
    """Calls on tensors in the body are recorded, whatever PyTorch's current stream is; those in a break are eager."""
    torchs, seen = cupy.cuda.Stream(non_blocking=True), []
    source, target = cupy.full((1000,), RANK + 1, np.float32), cupy.zeros(1000, np.float32)
    between, last = cupy.zeros(1000, np.float32), cupy.zeros(1000, np.float32)

    @eager_break
    def middle() -> None:
        comm.allreduce(Tensor(target), out=Tensor(between))
        comm.synchronize()
        seen.append(float(cupy.asnumpy(between)[0]))

    with Communicator(timeout=20) as comm, torch_stream(torchs):
        cupy.cuda.Device().synchronize()
        graph = Graph(comm)
        with graph.record():
            comm.allreduce(Tensor(source), out=Tensor(target))
            middle()
            comm.allreduce(Tensor(between), out=Tensor(last))
        assert graph.describe().count("all-reduce:") == 2, graph.describe()
        for _ in range(3):
            right(last, SIZE * SIZE)
            last.fill(0)
            graph.replay()
        right(last, SIZE * SIZE)
        assert seen == [TOTAL * SIZE] * 4, seen
        graph.close()
        works(comm)


def values_that_are_still_pending() -> None:
    """A tensor that PyTorch reads as negated or conjugated is refused, for the memory has other values."""
    array = cupy.full((10,), RANK + 1, np.float32)
    with Communicator(timeout=20) as comm, torch_stream(cupy.cuda.Stream.null):
        for pending in ("neg", "conj"):
            with raises(errors.ArgumentError, f"rank {RANK}, call", f"Pass tensor.resolve_{pending}()"):
                comm.allreduce(Tensor(array, pending))
            works(comm)
            with raises(errors.ArgumentError, f"rank {RANK}, call", f"Pass tensor.resolve_{pending}()"):
                comm.allreduce(array, out=Tensor(array, pending))
            works(comm)
        right(comm.allreduce(Tensor(array), out=Tensor(array)).array)


SCENARIOS = [on_torchs_stream, in_a_recording, values_that_are_still_pending]
