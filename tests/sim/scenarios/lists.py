"""Lists of arrays in one call: recordings, faults, streams, and lists of PyTorch's tensors.

The results of random lists are those of tests/gpu/sweep.py, which runs here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import cupy
import ml_dtypes
import numpy as np

import ipcreduce
from ipcreduce import Communicator, Graph, GraphRunner, eager_break, errors, forward_context
from tests.shared.bounds import no_hang, until
from tests.sim.scenarios.common import (
    LAST,
    OTHER,
    RANK,
    SIZE,
    TOTAL,
    delay,
    environment,
    raises,
    right,
    works,
)
from tests.simulated import pytorch as torch
from tests.simulated.pytorch import Tensor

TURNS = 6  # in the last of them a list is found by its arrays
COUNTS = (1, 5, 0, 333, 16, 4097)
DTYPES = (np.float32, np.int8, np.float64, np.float32, np.dtype(ml_dtypes.bfloat16), np.float32)


def few(value: float = RANK + 1) -> list[Any]:
    """A list of arrays of several dtypes, one of them empty."""
    return [cupy.full((count,), value, dtype) for count, dtype in zip(COUNTS, DTYPES, strict=True)]


def all_right(arrays: Any, factor: int = 1) -> None:
    assert len(arrays) == len(COUNTS)
    for index, (array, count, dtype) in enumerate(zip(arrays, COUNTS, DTYPES, strict=True)):
        values = cupy.asnumpy(array).astype(np.float64)
        assert (values.shape, np.dtype(array.dtype)) == ((count,), np.dtype(dtype))
        assert (values == TOTAL * factor).all(), f"rank {RANK}, member {index}: {values[:4]}, expected {TOTAL * factor}"


def filled(arrays: Any, value: float) -> None:
    for array in arrays:
        array.fill(value)


def over_backends(scenario: Callable[[Any], None]) -> None:
    """Run a scenario on both backends of a GPU."""
    for backend in ("ipc", "nccl"):
        with Communicator(backend=backend) as comm:
            scenario(comm)
            works(comm)


# ---- results
def forms_of_lists() -> None:
    """A list or a tuple, new results or the caller's own, of no members, and by the module's function."""

    def check(comm: Any) -> None:
        for form in (list, tuple):
            for turn in range(4):  # from the second time on they are cached
                arrays, out = form(few()), form(few(0))
                result = comm.allreduce(arrays)
                assert type(result) is list
                all_right(result)
                assert comm.allreduce(arrays, out=out) is out
                all_right(out)
                assert comm.allreduce(arrays, "mean", out=arrays) is arrays
                for array in arrays:
                    assert (cupy.asnumpy(array).astype(np.float64) == int(TOTAL / SIZE)).all() or SIZE % 2 == 0, turn
            if comm.backend == "ipc":
                small = [cupy.zeros((200,), np.float32) for _ in range(100)]
                for arrays, most in ((small, 1), (few(), 3)):  # one launch for all arrays of a dtype, but empty ones
                    comm.allreduce(arrays)
                    prepared = comm._state.backend._prepared.items()
                    assert {len(one.steps) for of, one in prepared if len(of.members) == len(arrays)} == {most}
            one = cupy.full((3, 4), RANK + 1, np.int32)
            (again,) = comm.allreduce(form([one]))
            assert again.shape == (3, 4)
            right(again)
        number, out = comm._state.calls.number, []
        assert comm.allreduce(out, out=out) is out
        assert comm.allreduce(()) == []
        assert comm._state.calls.number == number + 2, "an empty list is a call"
        kept = few()
        for value in (3, 5):  # the same arrays again, of other shapes and values
            for _ in range(3):
                filled(kept, value)
                comm.allreduce(kept, "max", out=kept)
                assert all((cupy.asnumpy(one).astype(np.float64) == value).all() for one in kept)

    over_backends(check)
    ipcreduce.get_communicator().close()
    for _ in range(2):
        all_right(ipcreduce.allreduce(few()))
    ipcreduce.get_communicator().close()


def first_list_of_the_default_communicator() -> None:
    """It is made on the GPU of the list's arrays, which is not the current one."""
    with cupy.cuda.Device(OTHER):
        arrays = few()
    result = ipcreduce.allreduce(arrays)
    assert f"GPU {OTHER}:" in ipcreduce.get_communicator().describe()
    ipcreduce.get_communicator().synchronize()
    all_right(result)
    ipcreduce.get_communicator().close()


def cached_lists_of_another_shape() -> None:
    """A list is found by its arrays, whose shapes the program may change: the ranks compare them as they are."""
    with Communicator() as comm:
        arrays = [cupy.full((6,), RANK + 1, np.float32), cupy.full((4,), RANK + 1, np.float32)]
        for _ in range(TURNS):
            comm.allreduce(arrays, out=arrays)
        for array in arrays:
            array.shape = (2, array.size // 2)
        if RANK == LAST:
            arrays = [array.copy() for array in arrays]  # cached on the other ranks alone
        comm.allreduce(arrays, out=arrays)
        comm.synchronize()
        works(comm)


def cached_lists_of_other_arrays() -> None:
    """Lists that begin and end as a cached one does, arrays at the id of a dead one, and tensors with other memory."""
    with Communicator() as comm:
        every = [cupy.full((6,), 0, np.float32) for _ in range(5)]
        first, middle, last, other, second = every
        for arrays, out in (
            ([first, middle, last], [first, middle, last]), ([first, other, last], [first, other, last]),
            ([first, middle, last], [second, middle, last]), ([first, middle, last], [second, other, last]),
            ([first, middle], [first, middle]),
        ):  # fmt: skip
            for form in (arrays, tuple(arrays)):
                for _ in range(TURNS):
                    filled(every, RANK + 1)
                    same = all(one is to for one, to in zip(arrays, out, strict=True))
                    comm.allreduce(form, out=form if same else out)
                    for one in every:
                        value = TOTAL if any(one is to for to in out) else RANK + 1
                        assert (cupy.asnumpy(one) == value).all(), (len(arrays), value)
        kept: list[Any] = []
        for _ in range(12):
            short = cupy.full((6,), RANK + 1, np.float32)
            for _ in range(TURNS):
                filled([first, short, last], RANK + 1)
                comm.allreduce([first, short, last], out=[second, short, last])
            right(short)
            kept.append(short.data)  # so that the next one has other memory
            del short
        with torch.imported():
            for count in (2, 60):
                tensors = [Tensor(cupy.full((10,), RANK + 1, np.float32)) for _ in range(count)]
                for _ in range(TURNS):
                    filled([one.array for one in tensors], RANK + 1)
                    comm.allreduce(tensors, out=tensors)
                before = tensors[1].array
                tensors[1].array = cupy.full((10,), RANK + 1, np.float32)  # as set_() does
                before.fill(7)
                comm.allreduce(tensors, out=tensors)
                right(tensors[1].array)
                assert (cupy.asnumpy(before) == 7).all()
        for count in (3, 60):  # a cached list's kind, with outputs that share memory
            arrays = [cupy.full((6,), RANK + 1, np.float32) for _ in range(count)]
            for _ in range(3):
                comm.allreduce(arrays, out=arrays)
            wrong = [*arrays[:-1], arrays[0]]
            words = f"member 0 of the list shares memory with the output of member {count - 1}"
            with raises(errors.ArgumentError, words):
                comm.allreduce(arrays, out=wrong)
        works(comm)


def cached_lists_in_turns() -> None:
    """Three lists of one kind, in turns: each is launched at its own addresses, whatever the last one's were."""
    with Communicator() as comm:
        lists = [[cupy.full((5,), 0, np.float32) for _ in range(3)] for _ in range(6)]
        for _ in range(TURNS):
            for factor, (arrays, out) in enumerate(zip(lists[:3], lists[3:], strict=True), 1):
                for to in (arrays, out):
                    filled([*arrays, *to], (RANK + 1) * factor)
                    comm.allreduce(arrays, out=to)
                    for array in to:
                        right(array, factor)


def cached_lists_of_several_launches() -> None:
    """Of two dtypes, and of an array that several launches share: repeated, in place and not, and with new arrays."""
    with Communicator(workspace=1 << 20) as comm:
        for sizes in ([(5, np.float32), (3, np.int8), (7, np.float32)], [(9, np.int8), (700_003, np.int8)]):
            arrays, others, out = ([cupy.full((count,), 0, dtype) for count, dtype in sizes] for _ in range(3))
            for turn in range(TURNS):
                for given, to in ((arrays, arrays), (others, out)):
                    factor = 1 + turn % 3
                    filled([*given, *to], (RANK + 1) * factor)
                    comm.allreduce(given, out=to)
                    for array in to:
                        right(array, factor)
                new = [cupy.full((count,), RANK + 1, dtype) for count, dtype in sizes]
                for array in comm.allreduce(new, out=new):
                    right(array)


def larger_than_the_workspace() -> None:
    """Arrays that several launches share, behind others of odd bytes; and more members than a launch takes."""
    with Communicator(workspace=1 << 20) as comm:
        sizes = ((7, np.int8), (2_000_001, np.int8), (3, np.int8), (300_000, np.float32), (1, np.float32))
        big = [cupy.full((count,), RANK + 1, dtype) for count, dtype in sizes]
        for result in (comm.allreduce(big), comm.allreduce(big, out=big)):
            for array in result:
                right(array)
        for count in (162, 163, 1356, 1357, 2000):
            parts = cupy.zeros(count * 8, np.int16)
            arrays = [parts[8 * index : 8 * index + 1 + index % 8] for index in range(count)]
            parts[...] = cupy.asarray(np.arange(count * 8, dtype=np.int16) * (RANK + 1))
            expected = np.arange(count * 8, dtype=np.int16)
            beside = np.array([index % 8 < 1 + index // 8 % 8 for index in range(count * 8)])
            comm.allreduce(arrays, out=arrays)
            found = cupy.asnumpy(parts)
            assert (found == np.where(beside, expected * TOTAL, expected * (RANK + 1)).astype(np.int16)).all(), count


def lists_of_tensors() -> None:
    """Tensors, and tensors beside arrays of CuPy: on whose stream the call is, and what it gives back."""
    with Communicator() as comm, torch.imported():
        works(comm)
        side = torch.Stream()
        for turn in range(4):
            tensors = [Tensor(cupy.full((count,), RANK + 1, np.float32)) for count in (10, 300)]
            cupy.cuda.Device().synchronize()
            with torch.stream(side):
                delay(side.cuda_stream)
                for tensor in tensors:
                    with side.of_cupy:
                        tensor.array.fill(2 * (RANK + 1))
                results = comm.allreduce(tensors)
                assert [type(one) for one in results] == [Tensor] * 2
                for one in results:
                    right(one.array, 2)
                assert comm.allreduce(tensors, out=tensors) is tensors
                for one in tensors:
                    right(one.array, 2)
            array = cupy.full((7,), RANK + 1, np.float32)
            with torch.stream(side):
                mixed = comm.allreduce([tensors[0], array], "max", stream=side)
                assert [type(one) for one in mixed] == [Tensor, cupy.ndarray], turn
                side.of_cupy.synchronize()
        for first in (True, False):  # two current streams, and no stream=
            array = cupy.full((7,), RANK + 1, np.float32)
            tensor = Tensor(array.copy())
            torch.make_current(side)
            with raises(errors.ArgumentError, "tensors of PyTorch and other arrays", "stream="):
                comm.allreduce([tensor, array] if first else [array, tensor])
            torch.make_current(None)
            works(comm)
        weight = Tensor(cupy.full((7,), RANK + 1, np.float32), requires_grad=True)
        with raises(errors.ArgumentError, "member 1 of the list: "):
            comm.allreduce([Tensor(cupy.zeros(3, np.float32)), weight])
        works(comm)


def synchronous_lists() -> None:
    """IPCREDUCE_SYNC: the result is there when the call returns."""
    with environment(IPCREDUCE_SYNC="1"), Communicator() as comm:
        stream = cupy.cuda.Stream(non_blocking=True)
        arrays = few()
        cupy.cuda.Device().synchronize()
        for _ in range(3):
            filled(arrays, RANK + 1)
            cupy.cuda.Device().synchronize()
            delay(stream.ptr)
            result = comm.allreduce(arrays, stream=stream)
            assert stream.done
            all_right(result)


# ---- graphs
@eager_break
def between(comm: Any, arrays: list[Any]) -> None:
    """A break that reduces a list."""
    comm.allreduce(arrays, "max", out=arrays)


def recorded_lists() -> None:
    """In recordings, with a break, in other memory than the program's, and direct graphs, which keep lists staged."""
    for arguments in ({}, {"backend": "nccl"}, {"algorithm": "direct"}):
        with Communicator(**arguments) as comm:
            arrays, out = few(), few(0)
            with Graph(comm) as graph:
                with graph.record():
                    new = comm.allreduce([array * 1 for array in arrays])  # of which the graph alone has the memory
                    between(comm, new)
                    assert comm.allreduce(tuple(new), out=out) is out
                    comm.allreduce(arrays[0])
                    assert comm.allreduce([]) == []
                for factor in (1, 2, 3):
                    filled(arrays, (RANK + 1) * factor)
                    poison = [few(-1) for _ in range(3)]
                    graph.replay()
                    all_right([one if one.dtype != np.int8 else one * 0 + TOTAL * factor for one in new], factor)
                    del poison
                    values = cupy.asnumpy(out[3])
                    assert (values == TOTAL * factor * SIZE).all(), values[:3]
                filled(arrays, RANK + 1)
            kept, dropped = few(0), few()
            with Graph(comm) as graph:
                with graph.record():
                    comm.allreduce(dropped, out=kept)
                del dropped
                later = [few(-1) for _ in range(3)]  # in the memory that is free by now
                graph.replay()
                all_right(kept)
                del later
            works(comm)


def checked_and_run_lists() -> None:
    """The address check sees a member that moved, and a runner replays lists."""
    with Communicator() as comm:
        arrays = few()
        inputs = {"grads": arrays}
        with Graph(comm, check="always") as graph:
            with graph.record(inputs):
                total = comm.allreduce(arrays)
            graph.replay(inputs)
            all_right(total)
            moved = [*arrays[:3], arrays[3].copy(), *arrays[4:]]
            with raises(errors.AddressChangedError, 'inputs["grads"][3]'):
                graph.replay({"grads": moved})
        with GraphRunner(lambda x: comm.allreduce([x, x + 1])[1], comm) as runner:
            x = cupy.full((9,), RANK + 1, np.float32)
            for factor in (1, 2, 3):
                x.fill((RANK + 1) * factor)
                with forward_context("batch"):
                    found = runner(x)
                assert (cupy.asnumpy(found) == TOTAL * factor + SIZE).all()
            assert list(runner.recordings) == ["batch"]
        works(comm)


# ---- faults
def failed(comm: Any, given: Any, op: str = "sum") -> errors.IpcReduceError | None:
    """The fault of a call, from it or from what comes behind it."""

    def of(call: Callable[[], Any]) -> errors.IpcReduceError | None:
        try:
            call()
        except errors.IpcReduceError as error:
            return error.with_traceback(None)
        return None

    return of(lambda: comm.allreduce(given, op)) or until(lambda: of(comm.synchronize), "a fault")


def refused_members() -> None:
    """A member that one rank refuses: it is named, nothing is written to any output, and all go on."""
    with Communicator() as comm:
        for cached in (False, True):
            arrays, out = few(), few(7)
            for _ in range(4 if cached else 0):
                comm.allreduce(arrays, out=out)
            comm.synchronize()
            filled(out, 7)
            cupy.cuda.Device().synchronize()
            wrong = [*arrays[:4], arrays[4].view(np.int16), arrays[5]]
            if RANK == LAST:
                with raises(errors.ArgumentError, "member 4 of the list: out has shape (16,)"):
                    comm.allreduce(wrong, out=out)
            else:
                with raises(errors.PeerFailedError, f"rank {LAST} raised an error", "member 4 of the list"):
                    comm.allreduce(arrays, out=out)
                    comm.synchronize()
            cupy.cuda.Device().synchronize()
            if RANK == LAST:
                assert all((cupy.asnumpy(one).astype(np.float64) == 7).all() for one in out), "written"
            works(comm)
            comm.allreduce(arrays, out=out)
            all_right(out)
        for recording in (True, False):
            with Graph(comm) as graph:
                kind = errors.ArgumentError if RANK == LAST or not recording else errors.PeerFailedError
                bad = [arrays[0], None] if RANK == LAST or not recording else arrays[:2]
                with raises(kind, "member 1 of the list: it is None"), graph.record():
                    comm.allreduce(bad)
                assert graph.state == "failed"
            works(comm)


def interrupted_list() -> None:
    """Ctrl-C on one rank within a list's call: the others hear of it, and all go on."""

    def check(comm: Any) -> None:
        works(comm)
        arrays = few()
        if RANK == LAST:
            interrupt = mock.patch.object(comm._state.backend, "run", side_effect=KeyboardInterrupt)
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                comm.allreduce(arrays)
                raise AssertionError("no KeyboardInterrupt")
        else:
            with no_hang("the interrupted call"):
                error = failed(comm, arrays)
            assert isinstance(error, errors.PeerFailedError), error
            assert f"rank {LAST} raised an error (KeyboardInterrupt" in str(error), error
        works(comm)
        for _ in range(3):
            all_right(comm.allreduce(arrays))

    over_backends(check)


SCENARIOS = [
    forms_of_lists, first_list_of_the_default_communicator, cached_lists_of_another_shape,
    cached_lists_of_other_arrays, cached_lists_in_turns, cached_lists_of_several_launches, larger_than_the_workspace,
    lists_of_tensors, synchronous_lists, recorded_lists,
    checked_and_run_lists, refused_members, interrupted_list,
]  # fmt: skip
