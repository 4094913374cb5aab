"""What only a GPU can show, beyond the sweep. ``mpirun -n 2 python tests/gpu/scenarios.py [name ...]``.

Each function is one scenario; it runs on every rank and asserts. The ranks may share a GPU. With IPCREDUCE_BACKEND=nccl
those run that do not look at our kernels.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import ipcreduce
from ipcreduce.cuda import driver as our_driver
from tests.gpu import cupy_module
from tests.shared import bounds, clock, worker, written_calls
from tests.shared.bounds import late, no_hang, until
from tests.shared.world import WORLD
from tests.tools import machine

RANK, SIZE = WORLD.rank, WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2
SIMULATED = cupy.__name__ != "cupy"  # tests/sim: every thread costs microseconds
BRIEF: dict[str, Any] = {} if SIMULATED else {"timeout": 5.0}  # where a rank is late: only the simulator's time moves


def pytorch() -> Any:
    """PyTorch; None where it is missing, and on the simulated device, of which it knows nothing."""
    try:
        return None if SIMULATED else importlib.import_module("torch")
    except ImportError:
        return None


def mine(count: int = 1000, dtype: Any = np.float32) -> Any:
    """This rank's array: RANK + 1 everywhere, so that sums are TOTAL."""
    return cupy.full((count,), RANK + 1, dtype)


def right(array: Any, factor: int = 1) -> None:
    values = cupy.asnumpy(array)
    assert (values == TOTAL * factor).all(), f"rank {RANK}: {values} where {TOTAL * factor} was due"


def calls_on_several_streams(comm: Any) -> None:
    """Calls on several streams are ordered; streams may be dropped right after; every form of stream= works."""
    raw, ready = cupy.cuda.Stream(non_blocking=True), mine()
    cupy.cuda.Device().synchronize()
    results = []
    for turn in range(30):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            results.append((comm.allreduce(mine(200 + turn)), stream))
        if turn % 3 == 0:
            results.append((comm.allreduce(ready, stream=raw), raw))
        if turn % 3 == 1:
            results.append((comm.allreduce(ready, stream=raw.ptr), raw))
    comm.synchronize()
    for array, stream in results:
        stream.synchronize()
        right(array)
    array = mine()
    results = [comm.allreduce(array, out=array) for _ in range(3)]  # in place: 1, SIZE, SIZE**2 times the total
    right(array, SIZE * SIZE)


class _Kinds:
    """Calls of every kind on either of two streams, and what each has for a result."""

    def __init__(self, comm: Any, graphs: Sequence[Any]) -> None:
        self.comm, self.graphs, self.source, self.wide = comm, graphs, mine(), cupy.zeros((1000, 2), np.float32)
        self.outs = [cupy.zeros(1000, np.float32) for _ in range(2)]
        self.results: list[Any] = [None, None]
        self.recorded: list[Any] = []
        self.theirs: list[Any] = []
        for graph in graphs:
            with graph.record():
                self.recorded.append(comm.allreduce(self.source))

    def fresh(self, which: int, stream: Any) -> None:
        self.results[which] = self.comm.allreduce(self.source)

    def strided(self, which: int, stream: Any) -> None:
        self.results[which] = self.comm.allreduce(self.source, out=self.wide[:, which])

    def cached(self, which: int, stream: Any) -> None:
        self.results[which] = self.comm.allreduce(self.source, out=self.outs[which])

    def by_handle(self, which: int, stream: Any) -> None:
        self.results[which] = self.comm.allreduce(self.source, out=self.outs[which], stream=stream.ptr)

    def replay(self, which: int, stream: Any) -> None:
        self.graphs[which].replay()
        self.results[which] = self.recorded[which]

    def capture(self, which: int, stream: Any) -> None:
        """Make a graph of others, which :meth:`replay_of_others` launches."""
        with stream:
            stream.begin_capture()
            self.cached(which, stream)
            self.theirs.append(stream.end_capture())

    def replay_of_others(self, which: int, stream: Any) -> None:
        self.theirs[which].launch(stream)
        self.results[which] = self.outs[which]

    def clear(self) -> None:
        for array in (*self.outs, self.wide, *self.recorded):
            array.fill(-1)


def work_behind_a_call(comm: Any) -> None:
    """A call on one stream is over while another one still works on what the program has put behind a call there."""
    streams = first, second = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    _behind_the_first_calls(first, second)
    with ipcreduce.Graph(comm) as one, ipcreduce.Graph(comm) as other:
        made = _Kinds(comm, (one, other))
        kinds = [made.fresh, made.strided, made.cached, made.by_handle, made.replay]
        for captured in (False, True):  # once there are graphs of others, too
            if captured:
                for which, stream in enumerate(streams):
                    made.capture(which, stream)
                kinds.append(made.replay_of_others)
            for kind, (which, stream) in itertools.product(3 * kinds, enumerate(streams)):
                with stream:  # every call is cached then, and the streams have changed
                    kind(which, stream)
            cupy.cuda.Device().synchronize()
            for kind, next_kind in itertools.product(kinds, kinds):
                made.clear()
                cupy.cuda.Device().synchronize()
                what = f"{next_kind.__name__} behind {kind.__name__}"
                overlaps(partial(kind, 0, first), partial(next_kind, 1, second), first, second, what)
                right(made.results[0])
                right(made.results[1])


def _behind_the_first_calls(first: Any, second: Any) -> None:
    source, outs = mine(), [cupy.zeros(1000, np.float32) for _ in range(2)]
    with ipcreduce.Communicator(timeout=30) as other:
        cupy.cuda.Device().synchronize()
        for turn in range(4):  # from the first change of streams on
            calls = [
                partial(other.allreduce, source, out=out, stream=on)
                for out, on in zip(outs, (first, second), strict=True)
            ]
            if turn:
                overlaps(*calls, first, second, "a call")
            else:
                calls[0]()
                calls[1]()


def overlaps(call: Callable[[], None], other: Callable[[], None], first: Any, second: Any, what: str) -> None:
    """Makes two calls on two streams, with work behind the first one that does not end before the second one does."""
    gate = threading.Event()
    try:
        with first:
            call()
            first.launch_host_func(lambda _: gate.wait(60), None)
        with second:
            other()
            ended = second.record()
        until = time.monotonic() + 30
        while not ended.done:
            assert time.monotonic() < until, f"rank {RANK}: {what} waits for the work behind that"
            time.sleep(1e-4)
        assert not first.done
    finally:
        gate.set()
    first.synchronize()
    second.synchronize()


class OfOthers:
    """A stream of a library that is neither CuPy nor PyTorch."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self.stream.ptr)


def asynchronous_pool(comm: Any) -> None:
    """CuPy's MemoryAsyncPool: what a call on another stream allocates is not given to others while that uses it."""
    with cupy.cuda.Stream(non_blocking=True), cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        side, wrong = cupy.cuda.Stream(non_blocking=True), []
        turns, count = (20, 50_000) if not SIMULATED else (4, 2000)
        forms = [side, side.ptr, cupy.cuda.ExternalStream(side.ptr), OfOthers(side)]
        wide, target = cupy.zeros((count, 2), np.float32), cupy.zeros(count, np.float32)
        source, kept = mine(count), []
        wide[:, 1] = source

        def replayed(stream: Any) -> None:
            graph.replay(stream=stream)
            kept.clear()

        def read_and_dropped(stream: Any) -> None:
            result = comm.allreduce(source, stream=stream)
            with cupy.cuda.ExternalStream(side.ptr):
                target[...] = result

        calls = {
            "a result that is dropped": lambda stream: comm.allreduce(source, stream=stream),
            "one that is read before": read_and_dropped,
            "the copy of a strided array": lambda stream: comm.allreduce(wide[:, 1], out=target, stream=stream),
            "what a strided out is copied from": lambda stream: comm.allreduce(source, out=wide[:, 0], stream=stream),
            "an array of a break": replayed,
        }
        with ipcreduce.Graph(comm) as graph:
            with graph.record():
                comm.allreduce(source * 1)
                graph.add_eager(lambda: kept.append(comm.allreduce(source)))
            kept.clear()
            for turn in range(turns):
                for what, call in calls.items():
                    target.fill(TOTAL)
                    wide[:, 0] = TOTAL
                    cupy.cuda.Device().synchronize()
                    side.launch_host_func(lambda _: time.sleep(0.01), None)
                    call(forms[turn % 4])
                    others = [cupy.full((count,), -1, np.float32) for _ in range(4)]  # takes what is free
                    cupy.cuda.Device().synchronize()
                    intact = all((cupy.asnumpy(other) == -1).all() for other in others)
                    totals = [cupy.asnumpy(array) == TOTAL for array in (target, wide[:, 0])]
                    wrong += [] if intact and np.all(totals) else [(what, turn)]
                    del others
    assert not wrong, f"rank {RANK}: {len(wrong)} of {turns * len(calls)} wrong, the first: {wrong[:4]}"


def foreign_capture(comm: Any) -> None:
    """CuPy's begin_capture, with forked streams, replayed with new inputs, mixed with eager calls."""
    for non_blocking, count in ((True, 50000), (False, 2000)):
        captured_on(comm, count, *(cupy.cuda.Stream(non_blocking=non_blocking) for _ in range(2)))


def captured_on(comm: Any, count: int, stream: Any, other: Any) -> None:
    source, first, second, third = mine(), mine(), mine(count), cupy.zeros(1000, np.float32)
    comm.allreduce(source, out=first)  # compiled before the capture, and the last call is on the default stream
    cupy.cuda.Device().synchronize()
    fork, join = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)
    with stream:
        stream.begin_capture()
        comm.allreduce(source, out=first)
        fork.record(stream)
        other.wait_event(fork)
        with other:
            comm.allreduce(second, "max", out=second)
            comm.allreduce(first, out=third)
        join.record(other)
        stream.wait_event(join)
        comm.allreduce(first, "min", out=first)
        graph = stream.end_capture()
    for turn in range(1, 6):
        source.fill((RANK + 1) * turn)
        second.fill(RANK)
        cupy.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        right(first, turn)
        assert (cupy.asnumpy(third) == TOTAL * turn * SIZE).all()
        assert (cupy.asnumpy(second) == SIZE - 1).all()
        right(comm.allreduce(mine(77)))
        comm.synchronize()


def kinds_of_edges(graph: int) -> list[int]:
    """The types of a graph's edges, from the driver itself: bindings 12.9.4 give a wrong one for the first edge."""
    edges_of, count = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2, ctypes.c_size_t()
    assert edges_of(ctypes.c_void_p(graph), None, None, None, ctypes.byref(count)) == 0
    nodes, edges = np.zeros((2, count.value), np.uint64), np.zeros((count.value, 8), np.uint8)  # two ports, the type
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (*nodes, edges)]
    assert edges_of(ctypes.c_void_p(graph), *pointers, ctypes.byref(count)) == 0
    return [int(edge[2]) for edge in edges]


def programmatic_edges(comm: Any) -> None:
    """All-reduces in a row keep, in graphs, the edges that let each come in before the one before it has ended."""
    if SIMULATED or int(cupy.cuda.Device().compute_capability) < 90:
        return
    from cuda.bindings import driver

    array = mine()
    with ipcreduce.Graph(comm) as graph:
        with graph.record():
            for _ in range(5):
                comm.allreduce(array, out=array)
        programmatic = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        assert kinds_of_edges(graph.segments[0].graph) == [programmatic] * 4
    # Somebody's kernel that starts early behind a call still does, with another call behind it.
    kernel, stream = cupy.RawKernel('extern "C" __global__ void nothing(long long) {}', "nothing"), cupy.cuda.Stream()
    for early in (True, False):
        between = our_driver.Launch(kernel.kernel.ptr, 1, 32, np.zeros(1, np.uint64), programmatic=early)
        with stream:
            stream.begin_capture()
            comm.allreduce(array, out=array)
            between.run(stream.ptr)
            comm.allreduce(array, out=array)
            captured = stream.end_capture()
        kinds = kinds_of_edges(captured.graph)
        # From the wait to the first call, from each to the next, and from the last to the record of the end.
        assert len(kinds) == (4 if early else 5), (early, kinds)
        assert kinds.count(programmatic) == 2 or not early, kinds


def destroyed_streams(comm: Any) -> None:
    """The driver crashes on the handle of a stream that is gone: raw handles, forked captures, then a fault."""
    main, array, out = cupy.cuda.Stream(non_blocking=True), mine(), cupy.zeros(1000, np.float32)
    for form in (lambda stream: stream.ptr, lambda stream: cupy.cuda.ExternalStream(stream.ptr)):
        with ipcreduce.Communicator(timeout=30) as other:  # whose first call it is
            cupy.cuda.Device().synchronize()
            stream = cupy.cuda.Stream(non_blocking=True)
            other.allreduce(array, out=out, stream=form(stream))
            stream.synchronize()
            del stream
            right(other.allreduce(out), SIZE)
    comm.allreduce(array, out=out)
    cupy.cuda.Device().synchronize()
    for turn in range(12):
        stream = cupy.cuda.Stream(non_blocking=True)
        if turn % 3 == 0:
            comm.allreduce(array, out=out, stream=stream.ptr)
        elif turn % 3 == 1:
            with cupy.cuda.ExternalStream(stream.ptr):
                comm.allreduce(array, out=out)
        else:
            fork, join = cupy.cuda.Event(), cupy.cuda.Event()
            with main:
                source = cupy.zeros(1000, np.float32)
                main.begin_capture()
                comm.allreduce(array, out=source)
                fork.record(main)
                stream.wait_event(fork)
                comm.allreduce(source, out=out, stream=stream)
                join.record(stream)
                main.wait_event(join)
                del stream
                comm.allreduce(out, out=out)
                graph = main.end_capture()
            graph.launch(main)
            main.synchronize()
            right(out, SIZE * SIZE)
            continue
        stream.synchronize()
        del stream
        right(out)
    refused(comm, lambda: comm.allreduce(array, "mode"), "there is no op")


def captured_meanwhile(comm: Any) -> None:
    """A graph is closed and a fault settled while a stream captures in the strictest mode, which stays valid."""
    stream, array, out = cupy.cuda.Stream(non_blocking=True), mine(), cupy.zeros(1000, np.float32)
    with ipcreduce.Graph(comm) as graph, graph.record():
        recorded = comm.allreduce(array)
    comm.allreduce(array, out=out)
    cupy.cuda.Device().synchronize()
    again = ipcreduce.Graph(comm, pool=graph.pool)
    with again.record():
        comm.allreduce(array, out=out)
    cupy.cuda.Device().synchronize()
    stream.begin_capture("global" if SIMULATED else cupy.cuda.runtime.streamCaptureModeGlobal)
    comm.allreduce(array, out=out, stream=stream)
    again.close()
    del recorded
    raises(ipcreduce.ArgumentError, "there is no op", comm.allreduce, array, "mode")
    comm.allreduce(array, out=array)
    comm.allreduce(out, out=out, stream=stream)
    captured = stream.end_capture()
    comm.synchronize()
    right(array)
    captured.launch(stream)
    stream.synchronize()
    right(out, SIZE * SIZE)


def threads(comm: Any) -> None:
    """A call from a thread that has no CUDA context, and one while another context is current."""
    found = []
    thread = threading.Thread(target=lambda: found.append(comm.allreduce(array, out=array, stream=0)))
    array = mine()
    cupy.cuda.get_current_stream().synchronize()
    thread.start()
    thread.join(60)
    comm.synchronize()
    assert found, "the thread's call did not return"
    right(found[0])
    if cupy.cuda.runtime.getDeviceCount() > 1:
        here = cupy.cuda.Device().id
        with cupy.cuda.Device((here + 1) % cupy.cuda.runtime.getDeviceCount()):
            comm.allreduce(array, out=array, stream=0)
            assert cupy.cuda.Device().id != here
        comm.synchronize()
        right(array, SIZE)


def interfaces(comm: Any) -> None:
    """__cuda_array_interface__ with a stream, read-only memory, bfloat16; DLPack from PyTorch where it is."""

    class Exported:
        def __init__(self, array: Any, **changes: Any) -> None:
            self.array, self.changes = array, changes
            self.dtype = array.dtype

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return self.array.__cuda_array_interface__ | self.changes

    producer = cupy.cuda.Stream(non_blocking=True)
    with producer:
        array = mine(1 << 20)
        for _ in range(20):  # keeps the producer busy
            array += 1
            array -= 1
    right(comm.allreduce(Exported(array, stream=producer.ptr, version=3)))
    comm.synchronize()
    half = cupy.asarray(np.full(99, RANK + 1, ml_dtypes.bfloat16))
    result = comm.allreduce(Exported(half, stream=None))
    comm.synchronize()
    assert result.dtype == ml_dtypes.bfloat16
    right(result.astype(np.float32))
    pointer = array.__cuda_array_interface__["data"][0]
    refused(comm, lambda: comm.allreduce(array, out=Exported(array, data=(pointer, True))), "read-only")
    behind = Exported(array[:0], data=(pointer + array.nbytes, False))  # where no memory may be, or another GPU's
    assert comm.allreduce(behind).shape == (0,)
    transposed = cupy.arange(12, dtype=np.float32).reshape(3, 4).T
    result = comm.allreduce(Exported(transposed))
    comm.synchronize()
    assert (cupy.asnumpy(result) == np.arange(12, dtype=np.float32).reshape(3, 4).T * SIZE).all()
    torch = pytorch()
    if torch is None:
        return
    torch.cuda.set_device(cupy.cuda.Device().id)
    tensor = torch.full((1001,), RANK + 1, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    result = comm.allreduce(tensor[1:], out=tensor[1:])
    comm.synchronize()
    assert isinstance(result, torch.Tensor)
    assert (tensor[1:].float() == TOTAL).all()
    assert float(tensor[0]) == RANK + 1
    fresh = comm.allreduce(tensor[1:])
    assert (type(fresh), fresh.dtype, fresh.device) == (torch.Tensor, torch.bfloat16, tensor.device)
    assert (fresh.float() == TOTAL * SIZE).all()
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    refused(comm, lambda: comm.allreduce(parameter), "Pass tensor.detach()")
    with torch.no_grad():
        assert comm.allreduce(parameter, out=parameter) is parameter
        assert (parameter == SIZE).all()
    refused(comm, lambda: comm.allreduce(torch.eye(3, device="cuda").to_sparse()), "to_dense()")
    refused(comm, lambda: comm.allreduce(torch.ones(3, device="meta")), "on the device meta")
    every = [
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    ]
    for dtype in (*every, torch.bfloat16, torch.complex64, torch.complex128):
        tensor = torch.full((7, 11), RANK + 1, dtype=dtype, device="cuda")
        for given in (tensor, tensor.T, tensor[::2, 1:], tensor[:0]):
            for turn in range(3):
                out = torch.zeros(given.shape, dtype=dtype, device="cuda")
                results = comm.allreduce(given), comm.allreduce(given, out=out), comm.allreduce(given, out=out.clone())
                assert results[1] is out
                assert all((result == TOTAL).all() and result.dtype is dtype for result in results), (dtype, turn)
                assert all(result.shape == given.shape for result in results)
    for dtype, op in ((torch.bool, "max"), (torch.complex64, "sum")):
        tensor = torch.ones(1001, dtype=dtype, device="cuda")
        assert comm.allreduce(tensor, op, out=tensor) is tensor
        comm.synchronize()
        assert (tensor == (1 if op == "max" else SIZE)).all()
    on_host = torch.full((3,), RANK + 1.0)
    assert (comm.allreduce(on_host) == torch.full((3,), float(TOTAL))).all()
    assert comm.allreduce(on_host, out=on_host) is on_host
    assert (on_host == TOTAL).all()
    assert comm.allreduce(torch.ones(3, dtype=torch.bfloat16)).tolist() == [SIZE] * 3
    refused(comm, lambda: comm.allreduce(torch.ones(3, requires_grad=True)), "grad")


def layouts(comm: Any) -> None:
    """The ranks' layouts may differ: a new result is C-contiguous, and an out keeps its own."""
    shape, graph = (2, 3, 4, 5), ipcreduce.Graph(comm)
    values = np.arange(120, dtype=np.float32).reshape(shape)
    due, turns = values * TOTAL, ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 3, 1))  # C, F, and PyTorch's channels_last

    def laid_out(number: int, values: np.ndarray = values) -> Any:
        turn = turns[number % 3]
        return cupy.asarray(values.transpose(turn).copy()).transpose(*np.argsort(turn).tolist())

    for number in range(3):
        array, out = laid_out(number + RANK, values * (RANK + 1)), laid_out(number + RANK + 1)
        assert array.flags.c_contiguous == ((number + RANK) % 3 == 0)
        strides = out.strides
        for _ in range(3):
            found = comm.allreduce(array)
            assert comm.allreduce(array, out=out) is out
            comm.synchronize()
            assert found.flags.c_contiguous
            assert (cupy.asnumpy(found) == due).all()
            assert (cupy.asnumpy(out) == due).all()
            assert out.strides == strides
            out.fill(0)
    with graph.record():
        found = comm.allreduce(array)
        comm.allreduce(array, out=out)
    out.fill(0)
    graph.replay()
    comm.synchronize()
    assert found.flags.c_contiguous
    assert all((cupy.asnumpy(one) == due).all() for one in (found, out))
    graph.close()
    torch = pytorch()
    if torch is None:
        return
    torch.cuda.set_device(cupy.cuda.Device().id)
    tensor = torch.tensor(values * (RANK + 1), device="cuda")
    tensor = tensor if RANK == 0 else tensor.to(memory_format=torch.channels_last)
    result = comm.allreduce(tensor)
    assert result.is_contiguous()
    kept = comm.allreduce(tensor, out=torch.empty_like(tensor))
    assert kept.stride() == tensor.stride()
    assert comm.allreduce(tensor, out=tensor) is tensor
    assert all((one.cpu().numpy() == due).all() for one in (result, kept, tensor))


def subclasses(comm: Any) -> None:
    """Arrays of a subclass of CuPy's that overrides the shape and more are plain arrays to us."""

    class Odd(cupy.ndarray):
        shape = property(lambda self: "round")  # type: ignore[assignment]

        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("indexed")

        __setitem__ = reshape = copy = astype = view = __getitem__  # type: ignore[assignment]

    def odd(array: Any) -> Any:
        return Odd(array.shape, array.dtype, array.data, array.strides)

    for kind in (np.float32, np.bool_, np.int16):
        op, due = ("any", 1) if kind is np.bool_ else ("sum", TOTAL)
        plain, other = mine(1000, kind), cupy.zeros((2000,), kind)[::2]
        for _ in range(3):
            array, out = odd(plain), odd(other)
            found = comm.allreduce(array, op)
            assert type(found) is cupy.ndarray
            assert comm.allreduce(plain, op, out=out) is out
            comm.synchronize()
            assert (cupy.asnumpy(found) == due).all()
            assert (cupy.asnumpy(other) == due).all()
        assert comm.allreduce(array, op, out=array) is array
        comm.synchronize()
        assert (cupy.asnumpy(plain) == due).all()


def torch_capture(comm: Any) -> None:
    """torch.cuda.graph takes our launches."""
    torch = pytorch()
    if torch is None:
        return
    torch.cuda.set_device(cupy.cuda.Device().id)
    source = torch.full((5000,), RANK + 1.0, device="cuda")
    target = torch.zeros_like(source)
    comm.allreduce(source, out=target, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
        comm.allreduce(doubled, out=target, stream=torch.cuda.current_stream())
        result = target + 1
    for turn in range(1, 4):
        source.fill_((RANK + 1) * turn)
        graph.replay()
        torch.cuda.synchronize()
        assert (result == 2 * TOTAL * turn + 1).all(), f"rank {RANK}: {result}"


def torch_streams(comm: Any) -> None:
    """Calls on tensors belong to PyTorch's current stream: 1,000 turns on a side one, late ranks, poisoned results."""
    torch = pytorch()
    if torch is None:
        return
    torch.cuda.set_device(cupy.cuda.Device().id)
    side, count = torch.cuda.Stream(), 30011
    source, target = torch.empty(count, device="cuda"), torch.empty(count, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    turns = 1000 if cupy.cuda.runtime.getDeviceCount() >= SIZE else 200  # on one GPU a call takes 5 to 15 ms
    for turn in range(turns):
        if turn % 50 == RANK:
            time.sleep(0.01)
        if turn % 7 == RANK:  # CuPy's stream is busy: a result there would come too late for who reads it here
            cupy.cuda.get_current_stream().launch_host_func(lambda _: time.sleep(0.002), None)
        with torch.cuda.stream(side):
            if turn % 11 == RANK:
                torch.cuda._sleep(1_000_000)
            source.fill_((RANK + 1) * (turn + 1))
            target.fill_(float("nan"))
            comm.allreduce(source, out=target)
            wrong += (target != TOTAL * (turn + 1)).any()
            fresh = comm.allreduce(source)
            wrong += (fresh != TOTAL * (turn + 1)).any()
            wrong += (comm.allreduce(fresh.clone()) != TOTAL * SIZE * (turn + 1)).any()
            del fresh
    side.synchronize()
    assert int(wrong) == 0, f"rank {RANK}: {int(wrong)} of {3 * turns} results are wrong"
    moving, other = (
        torch.full((count,), RANK + 1.0, device="cuda"),
        torch.full((count,), 2.0 * (RANK + 1), device="cuda"),
    )
    given = torch.cuda.Stream()
    torch.cuda.synchronize()
    for turn in range(100):  # memory that moves under the same object, and calls beside the tensors' stream
        moving.data, other.data = other.data, moving.data
        comm.allreduce(moving, out=target)
        wrong += (target != TOTAL * (1 + (turn + 1) % 2)).any()
        given.wait_stream(torch.cuda.current_stream())
        argument = torch.full((count,), turn + 1.0, device="cuda")
        given.wait_stream(torch.cuda.current_stream())
        result = comm.allreduce(argument, stream=given)
        del argument
        poison = torch.full((count,), -1.0, device="cuda")
        torch.cuda.current_stream().wait_stream(given)
        wrong += (result != SIZE * (turn + 1)).any()
        del result, poison
    assert int(wrong) == 0, f"rank {RANK}: {int(wrong)} of 200 results are wrong"
    comm.allreduce(source, out=target)  # on the default stream, by turns
    assert (target == TOTAL * turns).all()
    lazy = torch.complex(source, source).conj().imag
    assert lazy.is_neg()
    refused(comm, lambda: comm.allreduce(lazy), "resolve_neg()")
    refused(comm, lambda: comm.allreduce(source, out=lazy), "resolve_neg()")
    graph = ipcreduce.Graph(comm)
    with graph.record(), torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
        source.fill_(RANK + 1)
        comm.allreduce(source, out=target)
    assert graph.describe().count("  sum of ") == 1, graph.describe()
    target.fill_(float("nan"))
    torch.cuda.synchronize()
    graph.replay()
    comm.synchronize()
    assert (target == TOTAL).all()
    graph.close()


def torch_refused(comm: Any) -> None:
    """Tensors without memory, calls in traces, and derivatives that a call would lose; the operators have them."""
    torch = pytorch()
    if torch is None:
        return
    torch.cuda.set_device(cupy.cuda.Device().id)
    refusals = importlib.import_module("tests.shared.torch_refusals")
    x, out = torch.full((4,), RANK + 1.0, device="cuda"), torch.zeros(4, device="cuda")
    for _ in range(4):  # cached by now
        assert comm.allreduce(x, out=out).tolist() == comm.allreduce(x).tolist() == [TOTAL] * 4

    def record(inputs: Any, array: Any) -> None:
        with ipcreduce.Graph(comm) as graph, graph.record(inputs):
            comm.allreduce(array)

    def replay(given: Any, array: Any) -> None:
        runner = ipcreduce.GraphRunner(comm.allreduce, comm, copy_inputs=True)
        with runner, ipcreduce.forward_context("a"):
            runner(given)
            runner(array)

    with refusals.a_group():
        for made, words in refusals.without_memory(x):
            for call in (
                lambda made=made: comm.allreduce(made),
                lambda made=made: comm.allreduce(made, out=made),
                lambda made=made: comm.allreduce(x, out=made),
                lambda made=made: record(None, made),
                lambda made=made: record({"x": [made]}, x),
                lambda made=made: replay(x, made),
            ):
                for _ in range(2):
                    refused(comm, call, words)
    for call, words in refusals.within_traces(comm, x, out):
        refused(comm, call, words)
    forward_ad, words = torch.autograd.forward_ad, "is a tensor with a forward-mode derivative"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone(), x)
        for call in (lambda: comm.allreduce(dual), lambda: comm.allreduce(x, out=dual)):
            refused(comm, call, words)
    operators, squares = importlib.import_module("ipcreduce.torch"), sum(rank**2 for rank in range(1, SIZE + 1))
    operators.register("refused", comm)
    for call in (operators.all_reduce, operators.all_reduce_):

        def squared(a: Any, call: Any = call) -> Any:
            b = a**2
            result = call(b, "sum", "refused")
            return b if result is None else result

        primal, tangent = torch.func.jvp(squared, (x,), (x,))
        assert primal.tolist() == [squares] * 4
        assert tangent.tolist() == [2 * squares] * 4
        gradient = torch.func.grad(lambda a, squared=squared: squared(a).sum())(x)
        assert gradient.tolist() == [2 * SIZE * (RANK + 1)] * 4
    for _ in range(2):
        assert comm.allreduce(x, out=out).tolist() == [TOTAL] * 4


def torch_norms(comm: Any) -> None:
    """PyTorch's operators of an all-reduce with RMSNorm, also compiled and in torch.cuda.graph."""
    torch = pytorch()
    if torch is None:
        return
    torch.cuda.set_device(cupy.cuda.Device().id)
    importlib.import_module("tests.shared.torch_norms").run(comm, "cuda")


def torch_recordings(comm: Any) -> None:
    """PyTorch's work in bodies and breaks: products, temporaries that are freed, side streams, shared pools."""
    torch = pytorch()
    if torch is None:
        return
    torch.cuda.set_device(cupy.cuda.Device().id)
    side, seen = torch.cuda.Stream(), []
    weight = torch.eye(64, device="cuda") * 3
    source = torch.empty(100, 64, device="cuda")

    @ipcreduce.eager_break
    def look(given: torch.Tensor) -> torch.Tensor:
        poison = [torch.full((100, 64), -1.0, device="cuda") for _ in range(8)]
        seen.append(float(given[0, 0]))
        del poison
        return given.new_full((100, 64), 5.0)

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        product = source @ weight
        first = comm.allreduce(product)
        del product
        waste = [torch.full((100, 64), float(n), device="cuda") for n in range(4)]
        del waste
        returned = look(first)
        assert isinstance(returned, torch.Tensor)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forked = first + returned
            total = comm.allreduce(forked)
        torch.cuda.current_stream().wait_stream(side)
        return first, total

    source.fill_(RANK + 1)
    before = torch.cuda.current_stream()
    graph = ipcreduce.Graph(comm)
    with graph.record():
        first, total = body()
    assert torch.cuda.current_stream() == before
    second = ipcreduce.Graph(comm, pool=graph.pool)
    with second.record():
        other = comm.allreduce(source.clone())
    for turn in range(1, 9):
        gc.collect()
        torch.cuda.empty_cache()
        poison = [torch.full((100, 64), -2.0, device="cuda") for _ in range(16)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side if turn % 2 else before):
            torch.cuda._sleep(2_000_000 if turn % 3 == RANK else 1000)
            source.fill_((RANK + 1) * turn)
            (graph if turn % 4 else second).replay()
            if turn % 4:
                assert (first == 3 * TOTAL * turn).all(), (turn, first)
                assert (total == SIZE * (3 * TOTAL * turn + 5)).all(), (turn, total)
                assert seen[-1] == 3 * TOTAL * turn
            else:
                assert (other == TOTAL * turn).all()
        del poison
        torch.cuda.synchronize()
    with ipcreduce.Graph(comm) as wrong:
        try:
            with wrong.record():
                comm.allreduce(source.clone())
                raise KeyError
        except KeyError:
            pass
    assert torch.cuda.current_stream() == before
    with ipcreduce.GraphRunner(lambda x: comm.allreduce(x * 2), comm=comm, mode="full", copy_inputs=True) as runner:
        for rows in (8, 4, 8, 4):
            with ipcreduce.forward_context(rows, "full"):
                assert (runner(torch.full((rows, 3), RANK + 1.0, device="cuda")) == 2 * TOTAL).all()
    graph.close()
    second.close()
    assert (first == 3 * TOTAL * 7).all(), "outputs outlive their graph"
    right(comm.allreduce(mine()))


def communicators(comm: Any) -> None:
    """Sub-communicators and two side by side."""
    half = ipcreduce.Communicator(WORLD.Split(RANK % 2, RANK))
    again = ipcreduce.Communicator()
    for _ in range(3):
        members = [r + 1 for r in range(SIZE) if r % 2 == RANK % 2]
        first, second, third = half.allreduce(mine()), again.allreduce(mine(3)), comm.allreduce(mine(40000))
        half.synchronize()
        again.synchronize()
        comm.synchronize()
        assert (cupy.asnumpy(first) == sum(members)).all()
        right(second)
        right(third)
    again.close()
    half.close()
    right(comm.allreduce(mine()))
    comm.synchronize()


def as_people_write(comm: Any) -> None:
    """Other names of ops, numbers, bool and complex arrays; then small calls again, which are quick by now."""
    assert written_calls.run(cupy_module, comm) > 80
    for dtype, op, due in (
        (np.bool_, "max", True),
        (np.complex64, "mean", TOTAL / SIZE),
        (np.float32, "mean", TOTAL / SIZE),
    ):
        array, out = mine(100, dtype), cupy.empty(100, dtype)
        for _ in range(4):
            comm.allreduce(array, op, out=out)
            comm.synchronize()
            assert (cupy.asnumpy(out) == due).all(), f"rank {RANK}: {op} of {np.dtype(dtype)}: {out}"
            out.fill(0)


def host_arrays(comm: Any) -> None:
    """NumPy arrays on a communicator of GPUs, between device calls; a host call against device calls is named."""
    right(comm.allreduce(np.full(7, RANK + 1.0)))
    right(comm.allreduce(mine()))
    for call in (
        lambda: comm.allreduce(np.ones(7 + RANK)),
        lambda: comm.allreduce(np.ones(7), "sum" if RANK else "max"),
    ):
        raises(ipcreduce.RankMismatchError, "on every rank", call)
        right(comm.allreduce(np.full(7, RANK + 1.0)))


def nan_bits(comm: Any) -> None:
    """NaN of any sign and payload, and zeros of both signs: the same bits of the result on the device and the host."""
    rng = np.random.default_rng(RANK)
    for dtype in map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)):
        bits, one = f"u{dtype.itemsize}", int(np.ones((), dtype).view(f"u{dtype.itemsize}"))
        infinite = int(np.array(np.inf, dtype).view(bits))
        for algorithm in ("one_shot", "two_shot", "bulk"):
            with ipcreduce.Communicator(algorithm=algorithm) as forced:
                values = rng.integers(infinite + 1, 1 << (8 * dtype.itemsize - 1), 5000, bits)  # any NaN, for now > 0
                values |= rng.integers(0, 2, 5000, bits) << (8 * dtype.itemsize - 1)
                values[rng.random(5000) < 0.1] = (1 << 8 * dtype.itemsize) - 1  # what an empty slot holds
                values[rng.random(5000) < 0.5] = one
                zeros = rng.random(5000) < 0.3
                values[zeros] = rng.integers(0, 2, int(zeros.sum()), bits) << (8 * dtype.itemsize - 1)
                host = values.view(dtype)
                for op in ("sum", "prod", "min", "max", "avg"):
                    found = cupy.asnumpy(forced.allreduce(cupy.asarray(host), op)).view(bits)
                    due = forced.allreduce(host, op).view(bits)
                    wrong = np.flatnonzero(found != due)
                    assert not len(wrong), (
                        f"rank {RANK}: {op} of {dtype} by {algorithm}: {len(wrong)} of {len(due)} differ, the first "
                        f"at {wrong[0]}: {found[wrong[0]]:x} on the device, {due[wrong[0]]:x} on the host"
                    )


def tiles_that_change(comm: Any) -> None:
    """Bulk copies of peers' memory are never those of an earlier call: every call has other data, all are compared."""
    words, turns = 8 << 20, 2000  # over 2 GPUs 2 million tiles
    rng = np.random.default_rng(7)  # the same on every rank
    index = cupy.arange(words, dtype=np.int32)
    wrong = cupy.zeros((), np.int64)
    x = cupy.empty_like(index)
    for turn in range(turns):
        factors, sms = rng.integers(1, 1 << 20, SIZE).astype(np.int32), int(rng.integers(1, 9))
        if turn % 50 == RANK:
            late(0.002)
        cupy.multiply(index, factors[RANK], out=x)
        comm.allreduce(x, out=x, sms=sms)
        wrong += (x != index * factors.sum(dtype=np.int32)).sum()
    assert not int(wrong), f"rank {RANK}: {int(wrong)} of {turns * words} sums are wrong"


def time_passes(comm: Any) -> AbstractContextManager[None]:
    """In the block, to whose call rank 1 comes too late, the time of the others is up once all of them wait."""
    if RANK == 1 or not SIMULATED:
        return nullcontext()
    page, number, others = (
        comm._state.calls.page,
        comm._state.calls.number + 1,
        [rank for rank in range(SIZE) if rank != 1],
    )
    return clock.passing(121.0, lambda: all(page.calls.call_of(rank) >= number for rank in others))


def late_and_recover(comm: Any) -> None:
    """A rank that is later than the timeout: named on every rank; then the communicator works again."""
    with ipcreduce.Communicator(**BRIEF) as brief:
        right(brief.allreduce(mine()))
        brief.synchronize()
        if RANK == 1:
            until(lambda: brief._state.calls.page.aborted, "the others' deadline")
        with no_hang(), time_passes(brief):
            raises(ipcreduce.PeerTimeoutError, "rank 1", lambda: (brief.allreduce(mine()), brief.synchronize()))
        right(brief.allreduce(mine()))
        brief.synchronize()


def late_on_the_device(comm: Any) -> None:
    """Every rank has made the call, but one's stream comes to it later than the timeout: that rank is named."""
    with ipcreduce.Communicator(**BRIEF) as brief, cupy.cuda.Stream(non_blocking=True) as stream:
        array = mine(33)  # a warp most of whose lanes wait for nothing
        right(brief.allreduce(array))
        brief.synchronize()
        WORLD.Barrier()
        if RANK == 1:
            page = brief._state.calls.page
            stream.launch_host_func(lambda _: until(lambda: page.aborted, "the others' deadline"), None)
        with time_passes(brief):
            raises(
                ipcreduce.PeerTimeoutError,
                "rank 1 did not call within",
                lambda: (brief.allreduce(array), brief.synchronize()),
            )
        right(brief.allreduce(array))
        brief.synchronize()


def refused_right_behind(comm: Any) -> None:
    """A call that every rank has made is right, though the next one is refused while it still runs somewhere."""
    for algorithm in ("one_shot", "two_shot"):
        with ipcreduce.Communicator(algorithm=algorithm) as forced:
            for turn in range(10):
                result = forced.allreduce(mine(2000 + 2000 * turn))
                raises(ipcreduce.ArgumentError, "there is no op", forced.allreduce, result, "mode")
                right(result)


class Nesting:
    """An array that makes a call when it is asked for its address, as a signal's handler may within any call."""

    def __init__(self, array: Any, call: Callable[[], Any]) -> None:
        self.array, self.outcome = array, None
        self.call: Callable[[], Any] | None = call  # once

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        call, self.call = self.call, None
        try:
            self.outcome = self.outcome if call is None else call()
        except Exception as error:
            self.outcome = error
        return dict(self.array.__cuda_array_interface__)


def nested_calls(comm: Any) -> None:
    """A call within one of the same thread is refused; the one around it is made, and so is another communicator's."""
    words = "this call was made within call"
    with ipcreduce.Communicator(timeout=30, backend=comm.backend) as other:
        for turn in range(3):
            array: Any = mine(1000 + turn)
            if RANK == 0:
                array = Nesting(array, lambda count=turn: comm.allreduce(mine(10 + count)))
            right(comm.allreduce(array))
            if RANK == 0:
                assert type(array.outcome) is ipcreduce.UnsupportedError, repr(array.outcome)
                assert words in str(array.outcome), array.outcome
            else:
                told = f"rank 0 raised an error (UnsupportedError: rank 0, call {comm._state.calls.number + 1}: {words}"
                refused = lambda count=turn: (comm.allreduce(mine(10 + count)), comm.synchronize())  # noqa: E731
                raises(ipcreduce.PeerFailedError, told, refused)
            right(comm.allreduce(mine()))
            comm.synchronize()
            array = mine(1000 + turn)
            if RANK == 0:
                array = Nesting(array, lambda count=turn: other.allreduce(mine(10 + count)))
                result = comm.allreduce(array)
                right(array.outcome)
            else:
                right(other.allreduce(mine(10 + turn)))
                result = comm.allreduce(array)
            right(result)
        graph = ipcreduce.Graph(comm)

        def record() -> None:
            with graph.record():
                array = Nesting(mine(), lambda: comm.allreduce(mine(10))) if RANK == 0 else mine()
                comm.allreduce(array)

        kind = ipcreduce.UnsupportedError if RANK == 0 else ipcreduce.PeerFailedError
        raises(kind, words, record)
        right(comm.allreduce(mine()))
        comm.synchronize()


def abort_is_quick(comm: Any) -> None:
    """From a refusal on one rank to the error on the others: long before the timeout, with every size of grid."""
    for count in (10, 40000, 4 << 20) if not SIMULATED else (10, 2000):
        array = mine(count)
        WORLD.Barrier()
        if RANK == 0:
            late(0.05)
            raises(ipcreduce.ArgumentError, "there is no op", comm.allreduce, array, "mode")
        else:
            with no_hang():
                raises(
                    ipcreduce.PeerFailedError,
                    "there is no op",
                    lambda a: (comm.allreduce(a), comm.synchronize()),
                    array,
                )
        WORLD.Barrier()
        right(comm.allreduce(mine()))
        comm.synchronize()


def epoch_wrap(comm: Any) -> None:
    """The epochs pass 2**32."""
    comm.synchronize()
    WORLD.Barrier()
    cupy_module.set_epochs(comm, 0xFFFFFFFB)
    WORLD.Barrier()
    for turn in range(12):
        right(comm.allreduce(mine(100 if turn % 2 else 100000)))
    comm.synchronize()


def raises(kind: type[Exception], words: str, call: Callable[..., Any], *arguments: Any) -> None:
    """The call must raise this, with these words in the message."""
    try:
        call(*arguments)
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"{words!r} is not in the message") from error
        return
    raise AssertionError(f"no {kind.__name__} where {words!r} was due")


def refused(comm: Any, call: Callable[[], Any], words: str) -> None:
    """Every rank makes this wrong call; the communicator works afterwards."""
    raises(ipcreduce.ArgumentError, words, call)
    right(comm.allreduce(mine(10)))
    comm.synchronize()


SCENARIOS = [
    calls_on_several_streams, work_behind_a_call, asynchronous_pool, foreign_capture, programmatic_edges,
    destroyed_streams, captured_meanwhile, threads, interfaces, layouts, subclasses, torch_capture, torch_streams,
    torch_refused, torch_norms, torch_recordings, communicators, as_people_write, host_arrays, nan_bits,
    *([] if SIMULATED else [tiles_that_change]),  # the simulated CuPy does not calculate
    late_and_recover, late_on_the_device, refused_right_behind, nested_calls, abort_is_quick, epoch_wrap,
]  # fmt: skip
# Beside a capture in the strictest mode NCCL's own eager calls end it.
OUR_KERNELS_ONLY = {
    programmatic_edges, nan_bits, late_on_the_device, refused_right_behind, epoch_wrap, captured_meanwhile,
}  # fmt: skip


def main(scenarios: list[Callable[[Any], None]], ours_only: Collection[Callable[[Any], None]]) -> None:
    """Runs those that the command line names, or all, on one communicator; with --first the first one."""
    chosen = scenarios[:1] if sys.argv[1:] == ["--first"] else scenarios
    if chosen is scenarios and len(sys.argv) > 1:
        chosen = [scenario for scenario in scenarios if scenario.__name__ in sys.argv[1:]]
    bounds.patient()
    cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()
    backend = os.environ.get("IPCREDUCE_BACKEND", "ipc")
    machine.pretend_hosts(RANK, SIZE, hosts=1)
    with ipcreduce.Communicator() as comm:
        assert comm.backend == backend, comm.describe()
        for scenario in chosen:
            if backend == "nccl" and scenario in ours_only:
                continue
            started = time.time()
            with worker.shown():
                scenario(comm)
            WORLD.Barrier()
            if RANK == 0:
                print(f"{scenario.__name__}: right, {time.time() - started:.1f} s", flush=True)
        if RANK == 0:
            print(f"{len(chosen)} scenarios, all right")


if __name__ == "__main__":
    worker.run(lambda: main(SCENARIOS, OUR_KERNELS_ONLY))
