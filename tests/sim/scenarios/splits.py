"""All-gathers, reduce-scatters and broadcasts: their rules, their launches, and recordings of them."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ipcreduce import Communicator, Graph
from ipcreduce.ipc import plan
from tests.gpu import cupy_module
from tests.shared import split_rules
from tests.sim.scenarios.common import RANK, SIZE, TOTAL, works


def rules_of_splits() -> None:
    for rule in split_rules.RULES:
        with Communicator() as comm:
            rule(cupy_module, comm)
            works(comm)


def rank_values(comm: Any, value: float, rows: int = 2) -> Any:
    return cupy.full((rows, 5), RANK + value, np.float32)


def recorded_splits() -> None:
    """New results and the caller's own, one behind the other, replayed with other values beside eager calls."""
    with Communicator() as comm, Graph(comm) as graph:
        x, whole = rank_values(comm, 0), cupy.zeros((2 * SIZE, 5), np.float32)
        sizes = [0] * SIZE
        sizes[-1] = 2
        last = rank_values(comm, 0, sizes[RANK])
        own, sent = cupy.zeros((2, 5), np.float32), cupy.zeros(3, np.int8)
        with graph.record():
            gathered = comm.allgather(x)
            scattered = comm.reduce_scatter(gathered, "max")
            comm.allgather(x, out=whole)
            comm.reduce_scatter(whole, out=own)
            of_last = comm.allgather(last, sizes=sizes)
            comm.broadcast(sent, SIZE - 1)
            total = comm.allreduce(x)
            first, _ = comm.allgather([x, sent], axis=0)
        for turn in range(4):
            for array in (x, last):
                array.fill(RANK + turn)
            sent.fill(RANK + turn)
            whole.fill(-1)
            own.fill(-1)
            graph.replay()
            works(comm)
            ranks = np.repeat(np.arange(SIZE), 2)[:, None] + np.float32(turn) + np.zeros((1, 5), np.float32)
            for found in (gathered, whole, first):
                assert (cupy.asnumpy(found) == ranks).all(), (turn, found)
            assert (cupy.asnumpy(scattered) == RANK + turn).all()
            assert (cupy.asnumpy(own) == SIZE * (RANK + turn)).all()
            assert (cupy.asnumpy(of_last) == SIZE - 1 + turn).all()
            assert (cupy.asnumpy(sent) == SIZE - 1 + turn).all()
            assert (cupy.asnumpy(total) == TOTAL - SIZE + SIZE * turn).all()


def launched(comm: Any) -> int:
    """The launches of the call that was prepared last."""
    (last,) = [*comm._state.backend._prepared.values()][-1:]
    return len(last.steps)


def launches_of_splits() -> None:
    """One for all arrays that are moved, and one for each dtype that is reduced, whatever their number and rows."""
    with Communicator() as comm:
        arrays = [
            cupy.ones((SIZE * (1 + index % 3), index), dtype) for index, dtype in enumerate(("f4", "i1", "f8") * 40)
        ]
        for count, launches in ((1, 1), (2, 1), (25, 1), (26, 1), (120, 1)):
            comm.allgather(arrays[-count:], axis=-1)
            assert launched(comm) == launches, count
            comm.broadcast(arrays[-count:])
            assert launched(comm) == launches, count
        for count, launches in ((1, 1), (3, 3), (120, 3)):
            comm.reduce_scatter(arrays[-count:])
            assert launched(comm) == launches, count
        works(comm)


def slots_of_long_messages() -> None:
    """Each peer has its share of them, and what does not fit goes in another launch."""
    with Communicator(workspace=1 << 20) as comm:
        for launches in (1, 2):
            count = launches * 400_000 // (SIZE - 1)  # bytes
            whole = comm.allgather(cupy.full(count, RANK, np.uint8))
            assert launched(comm) == launches
            assert (cupy.asnumpy(whole) == np.repeat(np.arange(SIZE), count)).all()
            works(comm)


def broadcasts_in_two_hops() -> None:
    """Of one array without a limit of blocks, from a size on or where two hops are forced.

    From every root, at any address, of any number of bytes, in one launch or several, eagerly and in a graph. Nothing
    beside the array is written, and no bit pattern is changed.
    """
    least = plan.SPREAD_BYTES  # less than on GPUs
    for algorithm, workspace, cases in (
        (None, 4 << 20, [(least - 1, 0, 0, 1), (least, 0, 1, 1), (least + 4099, 3, 1, 1)]),
        (None, 1 << 20, [(1 << 19, 5, 1, 2), (1 << 20 | 1, 0, 1, 3)]),
        ("two_shot", 1 << 20, [(nbytes, at, 1, 1) for nbytes in (1, 15, 16, 17, 4000) for at in (0, 1, 8)]),
        ("one_shot", 4 << 20, [(least, 0, 0, 1)]),
    ):
        with Communicator(algorithm=algorithm, workspace=workspace) as comm:
            for number, (nbytes, at, spreads, launches) in enumerate(cases):
                around = cupy.full(nbytes + at + 16, 7, np.uint8)
                array, root = around[at : at + nbytes], number % SIZE
                with Graph(comm) as graph:
                    with graph.record():
                        comm.broadcast(array, root)
                    for turn in range(4):
                        values = np.random.default_rng([number, turn]).integers(0, 512, nbytes).clip(0, 255)
                        values = values.astype(np.uint8)  # half of the bytes are 0xFF, as in the sentinel
                        array[...] = cupy.asarray(values) if root == RANK else turn
                        if turn % 2:
                            graph.replay()
                        else:
                            comm.broadcast(array, root)
                        found = cupy.asnumpy(around)
                        assert (found[at : at + nbytes] == values).all(), (algorithm, nbytes, at, turn)
                        assert (found[:at] == 7).all()
                        assert (found[at + nbytes :] == 7).all()
                (last,) = [*comm._state.backend._prepared.values()][-1:]
                assert (last.kernels, launched(comm)) == ("spread" if spreads else "gather", launches), (nbytes, last)
                for other, how in (([array], {}), (array, {"sms": 1 << 20})):
                    comm.broadcast(other, root, **how)
                    assert [*comm._state.backend._prepared.values()][-1].kernels == "gather"
            works(comm)


def filled(arrays: Any, value: float) -> None:
    for array in arrays:
        array.fill(value)


def known_splits() -> None:
    """From the second time on a call takes the fast path: of an array, and of lists of any number of them.

    A list of 3 dtypes takes as many launches where it is reduced, and one of 120 arrays is long: others are graphs.
    """
    for backend in ("ipc", "nccl"):
        with Communicator(backend=backend) as comm:
            usual = comm._split_usual
            dtypes = "f4", "i1", "f8"
            for count, columns in ((0, 5), (1, 5), (3, 7), (120, 70)):
                shapes = [((2, 1 + index % columns), dtypes[index % 3]) for index in range(count or 1)]
                parts = [cupy.zeros(shape, dtype) for shape, dtype in shapes]
                wholes = [cupy.zeros((2 * SIZE, shape[1]), dtype) for shape, dtype in shapes]
                places = [whole[2 * RANK : 2 * RANK + 2] for whole in wholes]

                def given(arrays: list[Any], is_list: bool = count > 0) -> Any:
                    return arrays if is_list else arrays[0]

                for turn in range(4):
                    comm._split_usual = None if turn else usual  # which nobody calls then
                    for part in (parts, places):
                        filled(part, RANK + turn)
                        comm.allgather(given(part), out=given(wholes))
                        ranks = np.repeat(np.arange(SIZE), 2)[:, None] + turn
                        for whole in wholes:
                            assert (cupy.asnumpy(whole) == ranks).all(), (backend, count, turn, whole)
                    filled(parts, RANK + turn)
                    for whole in wholes if not count else comm.allgather(given(parts)):
                        assert (cupy.asnumpy(whole) == ranks).all(), (backend, count, turn, whole)
                    for part in (parts, places):
                        filled(wholes, RANK + turn)
                        comm.reduce_scatter(given(wholes), out=given(part))
                        for one in part:
                            assert (cupy.asnumpy(one) == TOTAL - SIZE + SIZE * turn).all(), (backend, count, turn)
                    filled(wholes, RANK + turn)
                    assert comm.broadcast(given(wholes), SIZE - 1) is given(wholes)
                    for whole in wholes:
                        assert (cupy.asnumpy(whole) == SIZE - 1 + turn).all(), (backend, count, turn, whole)
            comm._split_usual = usual
            works(comm)


SCENARIOS = (
    rules_of_splits,
    recorded_splits,
    launches_of_splits,
    slots_of_long_messages,
    known_splits,
    broadcasts_in_two_hops,
)
