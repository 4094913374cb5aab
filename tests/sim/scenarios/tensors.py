"""Calls on PyTorch's tensors (tests/simulated/pytorch.py stands for it): streams, results, memory, the short way."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, Graph, GraphRunner, eager_break, errors, forward_context
from ipcreduce.arrays import operands
from ipcreduce.device.last_call import ON_STREAM
from ipcreduce.device.launch_cache import LaunchCache
from tests.shared.capsules import capsule_of
from tests.sim.scenarios.common import RANK, SIZE, TOTAL, delay, raises, right, works
from tests.simulated import pytorch as torch
from tests.simulated.pytorch import Tensor


def array_of(value: Any, count: int = 1000) -> Any:
    return cupy.full((count,), value, np.float32)


def on_torchs_stream() -> None:
    """A call on a tensor is among the work of PyTorch's current stream; on an array of CuPy, of CuPy's."""
    with Communicator() as comm, torch.imported():
        for torchs in (torch.Stream(), torch.ExternalStream(0)):
            cupys = cupy.cuda.Stream(non_blocking=True)
            source, target = array_of(RANK + 1), array_of(0)
            works(comm)
            cupy.cuda.Device().synchronize()
            with torch.stream(torchs), cupys:
                delay(cupys.ptr)  # a call there comes too late for who reads it on the tensor's
                for _ in range(3):  # the slow path, then the short one
                    comm.allreduce(Tensor(source), out=Tensor(target))
                    with torchs.of_cupy:
                        found = cupy.asnumpy(target)
                        target.fill(0)
                    assert (found == TOTAL).all(), f"rank {RANK}: {found[0]} before the result is there"
                works(comm)
                source.fill(0)
                torchs.of_cupy.synchronize()
                cupys.synchronize()
                delay(torchs.cuda_stream)
                with torchs.of_cupy:
                    source.fill(RANK + 1)
                comm.allreduce(Tensor(source), out=Tensor(target), stream=cupys)
                right(target)
                comm.allreduce(source, out=target)
                right(target)
            cupy.cuda.Device().synchronize()


def by_dlpack() -> None:
    """What another library still writes is waited for on the call's stream, whatever stream is current."""

    class Foreign:
        def __init__(self, array: Any) -> None:
            self.__dlpack__, self.__dlpack_device__ = Tensor(array).__dlpack__, Tensor(array).__dlpack_device__

    producer, given = torch.Stream(), cupy.cuda.Stream(non_blocking=True)
    source, target = array_of(0), array_of(0)
    with Communicator() as comm, torch.imported():
        works(comm)
        cupy.cuda.Device().synchronize()
        with torch.stream(producer):
            delay(producer.cuda_stream)
            with producer.of_cupy:
                source.fill(RANK + 1)
            comm.allreduce(Foreign(source), out=target, stream=given)
        given.synchronize()
        right(target)


def by_interface() -> None:
    """The stream that ``__cuda_array_interface__`` names is waited for on the call's stream."""
    producer, given = torch.Stream(), cupy.cuda.Stream(non_blocking=True)
    source, target = array_of(0), array_of(0)

    class Foreign:
        __cuda_array_interface__ = source.__cuda_array_interface__ | {"stream": producer.cuda_stream}

    with Communicator() as comm:
        works(comm)
        cupy.cuda.Device().synchronize()
        delay(producer.cuda_stream)
        with producer.of_cupy:
            source.fill(RANK + 1)
        comm.allreduce(Foreign(), out=target, stream=given)
        given.synchronize()
        right(target)


def without_memory_apart() -> None:
    """PyTorch over cudaMallocAsync: record() says so on every rank, before anything is recorded."""
    with Communicator() as comm, torch.imported():
        source, graph, backend = Tensor(array_of(RANK + 1)), Graph(comm), mock.Mock(return_value="cudaMallocAsync")
        with mock.patch.object(torch.cuda, "get_allocator_backend", backend, create=True):
            with raises(errors.UnsupportedError, "cudaMallocAsync", "backend:native"), graph.record():
                raise AssertionError("the body runs")
            right(comm.allreduce(source).array)
        assert graph.state == "empty"
        with graph.record():
            result = comm.allreduce(source)
        right(result.array)
        graph.close()


def words_of_pytorch() -> None:
    """What it raises where a stream captures is a CaptureError too, which says where reading belongs."""
    with Communicator() as comm, torch.imported():
        with (
            raises(errors.CaptureError, "CUDA error: operation not", "to the host", "in a break"),
            Graph(comm).record(),
        ):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        works(comm)


def in_a_recording() -> None:
    """Calls on tensors in the body are recorded, whatever PyTorch's current stream is; those in a break are eager."""
    torchs, seen = torch.Stream(), []
    source, target = array_of(RANK + 1), array_of(0)
    between, last = array_of(0), array_of(0)

    @eager_break
    def middle() -> None:
        comm.allreduce(Tensor(target), out=Tensor(between))
        comm.synchronize()
        seen.append(float(cupy.asnumpy(between)[0]))

    with Communicator() as comm, torch.imported():
        cupy.cuda.Device().synchronize()
        graph = Graph(comm)
        with torch.stream(torchs), graph.record():
            comm.allreduce(Tensor(source), out=Tensor(target))
            middle()
            comm.allreduce(Tensor(between), out=Tensor(last))
            fresh = comm.allreduce(Tensor(last))
        assert type(fresh) is Tensor
        torchs.of_cupy.synchronize()
        assert graph.describe().count("  sum of ") == 3, graph.describe()
        for _ in range(3):
            right(last, SIZE * SIZE)
            right(fresh.array, SIZE**3)
            last.fill(0)
            graph.replay()
        right(last, SIZE * SIZE)
        assert seen == [TOTAL * SIZE] * 4, seen
        graph.close()
        works(comm)


def memory_that_is_not_the_tensors_values() -> None:
    """It is refused, with the remedy: lazy values, gradients, other layouts."""
    array = array_of(RANK + 1, 10)
    sparse, quantised = Tensor(array), Tensor(array)
    sparse.layout, quantised.is_quantized = torch.sparse_coo, True
    with Communicator() as comm, torch.imported():
        for wrong, words in (
            (Tensor(array, pending="neg"), "Pass tensor.resolve_neg()"),
            (Tensor(array, pending="conj"), "Pass tensor.resolve_conj()"),
            (Tensor(array, requires_grad=True), "Pass tensor.detach()"),
            (sparse, "Pass tensor.to_dense()"),
            (quantised, "Pass tensor.dequantize()"),
        ):
            with raises(errors.ArgumentError, f"rank {RANK}, call", "array is a ", words):
                comm.allreduce(wrong)
            works(comm)
            with raises(errors.ArgumentError, f"rank {RANK}, call", "out is a ", words):
                comm.allreduce(array, out=wrong)
            works(comm)
        for _ in range(3):
            array.fill(RANK + 1)
            with torch.no_grad():
                right(comm.allreduce(Tensor(array, requires_grad=True), out=Tensor(array, requires_grad=True)).array)
        for pending in ("neg", "conj"):  # of a kind that is cached by now
            with raises(errors.ArgumentError, f"resolve_{pending}"):
                comm.allreduce(Tensor(array, pending=pending))
            works(comm)


def not_to_be_read() -> list[tuple[Any, str]]:
    """Tensors without memory of their own, and what an error says of them."""
    array = array_of(RANK + 1, 10)
    zero, part, transformed = Tensor(array), Tensor(array), Tensor(array)
    zero.nowhere, part.nowhere = 0, 8  # what is behind the start of no memory has an address
    transformed.is_transformed = True
    operator = "se the call's operator in torch.ops.ipcreduce, such as all_reduce (import ipcreduce.torch)"
    return [
        (zero, "Pass tensor.clone()"),
        (part, "Pass tensor.clone()"),
        (transformed, f"without memory of its own. U{operator}"),
        (torch.AsyncCollectiveTensor(array), "Pass tensor.wait()"),
        (torch.DTensor(array), "Pass tensor.to_local()"),
        (torch.TwoTensor(array), f"U{operator}, or pass the tensor that it holds"),
    ]  # fmt: skip


def without_memory() -> None:
    """They are refused, wherever they come: in calls, recordings, inputs, what a runner copies."""
    good = Tensor(array_of(RANK + 1, 10))
    with Communicator() as comm, torch.imported():
        for _ in range(4):  # so that calls of this form are cached
            comm.allreduce(good)
        for wrong, words in not_to_be_read():
            for _ in range(2):
                for name, call in (
                    ("array", lambda wrong=wrong: comm.allreduce(wrong)),
                    ("array", lambda wrong=wrong: comm.allreduce(wrong, out=wrong)),
                    ("array", lambda wrong=wrong: comm.allreduce(wrong, out=good)),
                    ("out", lambda wrong=wrong: comm.allreduce(good, out=wrong)),
                ):
                    with raises(errors.ArgumentError, f"rank {RANK}, call", f"{name} is a ", words):
                        call()
                    works(comm)
            with raises(errors.ArgumentError, "array is a ", words), Graph(comm).record():
                comm.allreduce(wrong)
            works(comm)
            if wrong.is_transformed:
                continue  # no graph is used within torch.func
            with raises(errors.ArgumentError, 'inputs["x"][0]: ', words), Graph(comm).record({"x": [wrong]}):
                pass
            works(comm)
            runner = GraphRunner(comm.allreduce, comm, copy_inputs=True)
            with forward_context("a"):
                right(runner(good).array)
                with raises(errors.ArgumentError, f"rank {RANK}", words):
                    runner(wrong)
                works(comm)
                right(runner(good).array)
            runner.close()
        refuses_address_0(comm)


def refuses_address_0(comm: Communicator) -> None:
    """As of any library: by its interface, by DLPack, and CuPy's own."""
    array, good = array_of(RANK + 1, 10), array_of(RANK + 1, 10)
    nothing = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 40, None, array.data.device_id), 0)
    of_cupy = cupy.ndarray((10,), np.float32, nothing)
    by_interface = SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__ | {"data": (0, False)})
    by_dlpack = SimpleNamespace(__dlpack_device__=array.__dlpack_device__, __dlpack__=lambda **_: of_cupy)
    for wrong in (of_cupy, by_interface, by_dlpack):
        for arguments in ((wrong,), (wrong, "sum", wrong), (good, "sum", wrong)):
            for _ in range(2):
                with raises(errors.ArgumentError, f"rank {RANK}, call", "its elements have address 0, where nothing"):
                    comm.allreduce(*arguments[:2], out=arguments[2] if arguments[2:] else None)
                works(comm)
        if wrong is not by_dlpack:  # whose capsule is none here
            with raises(errors.ArgumentError, "inputs[0]: ", "address 0"), Graph(comm, check="always").record([wrong]):
                pass
            with Graph(comm, check="always") as graph:
                with graph.record([good]):
                    total = comm.allreduce(good)
                with raises(errors.ArgumentError, "inputs[0]: ", "address 0"):
                    graph.replay([wrong])
                graph.replay([good])
                right(total)
    works(comm)


def where_a_result_would_be_lost() -> None:
    """In a trace, and with a derivative, calls are refused, also those that are cached by now."""
    source, out, array = Tensor(array_of(RANK + 1)), Tensor(array_of(0)), array_of(RANK + 1)
    dual = torch.make_dual(source, source)
    operator = "torch.ops.ipcreduce"
    with Communicator() as comm, torch.imported():
        for within, words in (
            (torch.jit_trace, "torch.jit.trace, which would take the result for a constant"),
            (torch.ProxyTorchDispatchMode, "ProxyTorchDispatchMode, which"),
            (torch.FakeTensorMode, "FakeTensorMode, which"),
        ):
            for _ in range(4):
                right(comm.allreduce(source, out=out).array)
                right(comm.allreduce(source).array)
                right(comm.allreduce([source], out=[out])[0].array)
            for call in (
                lambda: comm.allreduce([source], out=[out]),
                lambda: comm.allreduce(source, out=out),
                lambda: comm.allreduce(source),
                lambda: comm.allreduce(Tensor(source.array), out=Tensor(out.array)),
                lambda: comm.allreduce(Tensor(source.array)),
                lambda: comm.allreduce(array, out=out),
            ):
                with raises(errors.ArgumentError, f"rank {RANK}, call", words, operator), within():
                    call()
                works(comm)
        with torch.FlopCounterMode():  # runs what it sees
            right(comm.allreduce(source, out=out).array)
            right(comm.allreduce(source).array)
        with torch.dual_level():
            right(comm.allreduce(source, out=out).array)
            for call in (
                lambda: comm.allreduce(dual),
                lambda: comm.allreduce(dual, out=dual),
                lambda: comm.allreduce(source, out=dual),
            ):
                with raises(errors.ArgumentError, f"rank {RANK}, call", "forward-mode derivative", operator):
                    call()
                works(comm)
            source.tangent = dual  # as source.add_(dual)
            with raises(errors.ArgumentError, "forward-mode derivative"):
                comm.allreduce(source, out=out)
        right(comm.allreduce(source, out=out).array)


def not_to_be_written() -> None:
    """On the device too, what DLPack calls read-only, or does not call writable, is no out. JAX's arrays are such."""

    class Producer:
        def __init__(self, array: Any, flags: int | None) -> None:
            self.array, self.flags = array, flags
            self.__dlpack_device__ = array.__dlpack_device__

        def __dlpack__(self, *, stream: int, max_version: Any = None) -> Any:
            if max_version is None:
                return self.array.__dlpack__(stream=stream)
            return capsule_of(flags=self.flags)

    class OfNumba(Producer):
        __module__ = "numba.cuda.somewhere"

    array = array_of(RANK + 1)
    with Communicator() as comm:
        for made in (Producer(array, 1), Producer(array, None), OfNumba(array, 1)):
            for source in (array_of(RANK + 1), made):
                with raises(errors.ArgumentError, f"rank {RANK}, call", "out cannot be written: this"):
                    comm.allreduce(source, out=made)
                works(comm)
            right(comm.allreduce(made))
            assert (cupy.asnumpy(array) == RANK + 1).all()
        for made in (Producer(array, 0), OfNumba(array, None)):
            array.fill(RANK + 1)
            assert comm.allreduce(made, out=made) is made
            right(array)


def results_are_tensors() -> None:
    """From PyTorch's allocator, on its stream; freed at once, while the calls still run, they spoil nothing."""
    side, given = torch.Stream(), torch.Stream()
    with Communicator() as comm, torch.imported():
        source = Tensor(array_of(RANK + 1))
        cupy.cuda.Device().synchronize()
        for turn in range(6):
            with torch.stream(side):
                delay(side.cuda_stream)
                first = comm.allreduce(torch.full_like(source, RANK + 1))
                assert type(first) is Tensor
                assert first.storage.place[0] == side.cuda_stream
                second = comm.allreduce(first)
                poison = torch.full_like(source, -1)  # into the memory of the first argument
                del first
                right(second.array, SIZE)
                del poison
            with torch.stream(side):  # the call is on another stream than the tensors' memory
                delay(given.cuda_stream)
                argument = torch.full_like(source, RANK + 1)
                result = comm.allreduce(argument, stream=given)
                del argument
                poison = torch.full_like(source, -1)
                comm.synchronize()
                assert result.storage.place[0] == given.cuda_stream
                right(result.array)
                del result, poison
                comm.allreduce(source)
                results = [comm.allreduce(source, stream=given) for _ in range(3)]  # of a tensor that is cached by now
                assert [one.storage.place[0] for one in results] == [given.cuda_stream] * 3
                comm.synchronize()
                right(results[-1].array)
                del results
            works(comm, 10 + turn)


def an_error_behind_a_launch() -> None:
    """What was launched still uses the tensors, so PyTorch hears of the stream all the same."""
    with Communicator() as comm, torch.imported():
        source, stream = Tensor(array_of(RANK + 1)), torch.Stream()
        works(comm)
        argument, out = torch.full_like(source, 1), torch.full_like(source, 0)
        no_memory = mock.patch.object(LaunchCache, "insert_form", side_effect=MemoryError("no room"))
        with no_memory, raises(MemoryError, "no room"):
            comm.allreduce(argument, out=out, stream=stream)
        assert [one.storage.recorded for one in (argument, out)] == [{stream.cuda_stream}] * 2
        comm.recover()
        works(comm)


def a_stream_that_goes_before_its_tensors() -> None:
    """Memory of tensors that a call has used on a stream of others: apart until that is done, and the stream may go."""
    with Communicator() as comm, torch.imported():
        source, waiting = Tensor(array_of(RANK + 1)), []
        cupy.cuda.Device().synchronize()
        for turn in range(4):
            stream = cupy.cuda.Stream(non_blocking=True)
            argument, out = torch.full_like(source, RANK + 1), torch.full_like(source, 0)
            cupy.cuda.Device().synchronize()
            delay(stream.ptr)
            comm.allreduce(argument, out=out, stream=stream.ptr if turn % 2 else stream)
            result = comm.allreduce(out, stream=stream)
            del argument
            time.sleep(0.05)  # for what would not wait to be over
            poison = torch.full_like(source, -1)
            comm.synchronize()
            right(out.array)
            right(result.array, SIZE)
            comm.allreduce(source)
            waiting.append((out, result))
            del stream, poison, out, result
        waiting.clear()  # PyTorch looks at the streams that it has been told of
        works(comm)


def the_short_way() -> None:
    """Repeated calls on tensors are launched at once, and follow memory that moves under the same object."""
    with Communicator() as comm, torch.imported():
        source, out = Tensor(array_of(RANK + 1)), Tensor(array_of(0))
        other, counted = array_of(2 * (RANK + 1)), mock.Mock(side_effect=operands.DeviceOperands.of)
        side = torch.Stream()
        cupy.cuda.Device().synchronize()
        with mock.patch.object(operands.DeviceOperands, "of", counted):
            for stream in (side, torch.ExternalStream(0)):
                comm.synchronize()  # a change of streams behind a call that runs would bring events
                with torch.stream(stream):
                    for turn in range(6):
                        if turn == 2:
                            assert counted.call_count > 0
                            counted.reset_mock()
                        comm.allreduce(source, out=out)
                        right(comm.allreduce(source).array)
                        right(comm.allreduce(Tensor(source.array), out=Tensor(out.array)).array)
                        right(out.array)
                        aliases = [Tensor(torch.full_like(source, RANK + 1).array) for _ in range(2)]
                        aliases[1].array = aliases[0].array
                        right(comm.allreduce(aliases[0], out=aliases[1]).array)
                    last = comm._state.backend.order.last
                    assert (last.state, last.stream) == (ON_STREAM, stream.cuda_stream), "with events"
            assert not counted.call_count, "on the slow path"
            before, source.array = source.array, other  # as p.data = other
            right(comm.allreduce(source, out=out).array, 2)
            right(comm.allreduce(source, out=out).array, 2)
            out.array = array_of(0, 1000)
            cupy.cuda.Device().synchronize()
            right(comm.allreduce(source, out=out).array, 2)
            source.array = before
            right(comm.allreduce(source, out=out).array)
            assert not counted.call_count
            source.pending = "neg"
            with raises(errors.ArgumentError, "resolve_neg"):
                comm.allreduce(source, out=out)
            source.pending = ""
            source.array, out.array = before[:500], out.array[500:]
            right(comm.allreduce(source, out=out).array)


def a_stream_by_its_handle() -> None:
    """Repeated calls on ``stream=handle``, which nobody is known to keep, take the short way too, in order."""
    with Communicator() as comm:
        one, two = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        source, out = array_of(RANK + 1), array_of(0)
        cupy.cuda.Device().synchronize()
        counted = mock.Mock(side_effect=operands.DeviceOperands.of)
        with mock.patch.object(operands.DeviceOperands, "of", counted):
            for turn in range(5):
                if turn == 3:
                    counted.reset_mock()
                delay(one.ptr)
                for _ in range(3):
                    comm.allreduce(source, out=out, stream=one.ptr)
                one.synchronize()
                right(out)
                out.fill(0)
                cupy.cuda.Device().synchronize()
            assert not counted.call_count, "on the slow path"
        for turn in range(6):  # behind each other, by whatever way
            array = array_of(RANK + 1)
            cupy.cuda.Device().synchronize()
            delay((one, two)[turn % 2].ptr)
            comm.allreduce(array, out=array, stream=one.ptr)
            comm.allreduce(array, out=array, stream=two if turn % 3 else two.ptr)
            comm.allreduce(array, out=array, stream=one.ptr)
            comm.allreduce(array, out=array)
            right(array, SIZE**3)


def torch_in_recordings() -> None:
    """PyTorch's work in a body is captured, in memory that nothing else gets; a break has the caller's allocator."""
    seen: list[Any] = []

    @eager_break
    def look(given: Tensor) -> Tensor:
        assert torch.in_a_pool() == 0
        assert torch.current_stream().cuda_stream == cupy.cuda.get_current_stream().ptr
        poison = [torch.full_like(given, -1) for _ in range(4)]
        seen.append(float(cupy.asnumpy(given.array)[0]))
        result = torch.full_like(given, 5)
        del poison
        return result

    def body() -> tuple[Tensor, Tensor]:
        assert torch.in_a_pool() != 0
        doubled = torch.full_like(source, 0)
        doubled.array[...] = source.array * 2
        first = comm.allreduce(doubled)
        del doubled
        returned = look(first)
        assert type(returned) is Tensor
        assert torch.in_a_pool() != 0
        again = torch.full_like(source, 1)
        again.array[...] = first.array + returned.array
        return first, comm.allreduce(again, out=again)

    with Communicator() as comm, torch.imported():
        side, source = torch.Stream(), Tensor(array_of(0))
        for _ in range(2):
            graph = Graph(comm)
            source.array.fill(RANK + 1)
            with graph.record():
                first, last = body()
            assert (torch.in_a_pool(), torch.current_stream().cuda_stream) == (0, 0)
            second = Graph(comm, pool=graph.pool)
            with second.record():
                other = comm.allreduce(torch.full_like(source, RANK + 1))
            right(other.array)
            for turn in range(1, 4):
                source.array.fill((RANK + 1) * turn)
                eager = [torch.full_like(source, -1) for _ in range(4)]
                cupy.cuda.Device().synchronize()
                torch.make_current(side if turn % 2 else None)  # and CuPy's is the default stream
                delay(side.cuda_stream)
                graph.replay()
                with side.of_cupy if turn % 2 else cupy.cuda.Stream.null:
                    found, sums = cupy.asnumpy(first.array), cupy.asnumpy(last.array)
                torch.make_current(None)
                assert (found == 2 * TOTAL * turn).all(), found
                assert (sums == SIZE * (2 * TOTAL * turn + 5)).all(), sums
                assert seen[-1] == 2 * TOTAL * turn
                del eager
            with raises(KeyError), Graph(comm).record():
                comm.allreduce(torch.full_like(source, 1))
                raise KeyError
            assert (torch.in_a_pool(), torch.current_stream().cuda_stream) == (0, 0)
            works(comm)
            alive = torch.pools()
            second.close()
            graph.close()
            works(comm)
            assert torch.pools() < alive, "PyTorch's pools outlive the graphs"


def other_memory_under_a_recorded_tensor() -> None:
    """A graph keeps the memory that it was recorded with, though the tensor is given other memory (``set_()``)."""
    with Communicator() as comm, torch.imported():
        source, target = torch.full_like(Tensor(array_of(0)), RANK + 1), torch.full_like(Tensor(array_of(0)), 0)
        with Graph(comm) as graph:
            with graph.record():
                comm.allreduce(source, out=target)
            for tensor in (source, target):
                seen, other = tensor.array, torch.full_like(tensor, 7)
                tensor.array, tensor.storage = other.array, other.storage
                later = [torch.full_like(tensor, -1) for _ in range(4)]  # in the memory that is free by now
                cupy.cuda.Device().synchronize()
                graph.replay()
                if tensor is target:
                    right(seen)
                else:
                    right(target.array)
                assert all((cupy.asnumpy(one.array) == -1).all() for one in later)
        works(comm)


def addresses_of_weights() -> None:
    """The address check takes tensors that require grad, within ``torch.no_grad()``, and sees that they moved."""
    with Communicator() as comm, torch.imported(), torch.no_grad():
        weight = Tensor(array_of(RANK + 1), requires_grad=True)
        inputs = {"weight": weight}
        with Graph(comm, check="always") as graph:
            with graph.record(inputs):
                total = comm.allreduce(weight)
            graph.replay(inputs)
            right(total.array)
            weight.array = array_of(RANK + 1)
            with raises(errors.AddressChangedError, 'inputs["weight"]'):
                graph.replay(inputs)
        works(comm)


def after_a_wait() -> None:
    """A call behind synchronize() takes the short way, and later calls on other streams follow it."""
    with Communicator() as comm:
        one, two = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        array, other = array_of(RANK + 1), array_of(0)
        cupy.cuda.Device().synchronize()
        counted = mock.Mock(side_effect=operands.DeviceOperands.of)
        with mock.patch.object(operands.DeviceOperands, "of", counted):
            for turn in range(6):
                if turn == 2:
                    counted.reset_mock()
                with one:
                    delay(one.ptr)
                    comm.allreduce(array, out=other)
                    comm.synchronize()
                    right(other)
                    other.fill(0)
            assert not counted.call_count, "on the slow path"
        for last in (two, one):
            for wait in (True, False):
                array.fill(RANK + 1)
                cupy.cuda.Device().synchronize()
                with one:
                    if wait:
                        comm.allreduce(other, out=other)
                        comm.synchronize()
                    delay(one.ptr)
                    comm.allreduce(array, out=array)
                with last:
                    comm.allreduce(array, out=array)
                comm.synchronize()
                right(array, SIZE)
        with one:
            comm.allreduce(array, out=other)
        comm.synchronize()
        with one:
            one.begin_capture()
            with two:
                comm.allreduce(array, out=other)  # waits for nothing on the stream that captures
            one.end_capture()
        works(comm)


SCENARIOS = [
    after_a_wait,
    torch_in_recordings, on_torchs_stream, by_dlpack, by_interface, in_a_recording,
    memory_that_is_not_the_tensors_values,
    results_are_tensors, a_stream_that_goes_before_its_tensors, the_short_way, a_stream_by_its_handle,
    other_memory_under_a_recorded_tensor, addresses_of_weights, without_memory, where_a_result_would_be_lost,
    not_to_be_written, without_memory_apart, words_of_pytorch, an_error_behind_a_launch,
]  # fmt: skip
