"""The buckets of DistributedDataParallel (tests/simulated/pytorch.py stands for PyTorch): streams, memory, errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, errors
from tests.shared.bounds import until
from tests.sim.scenarios import WORLD
from tests.sim.scenarios.common import LAST, RANK, SIZE, TOTAL, delay, raises, works
from tests.simulated import pytorch as torch
from tests.simulated.pytorch import BackwardPass, GradBucket, Tensor

ddp = torch.module_of_ipcreduce("ddp")
COUNT = 1000
Hook = Any


@contextmanager
def hooked(*ways: Any) -> Iterator[tuple[Communicator, Hook]]:
    """A communicator and a hook of it, in a program that has imported PyTorch, whose default group are the ranks."""
    world = torch.ProcessGroup(RANK, [*range(SIZE)])
    with (
        Communicator() as comm, torch.imported(), mock.patch.object(torch.distributed.group, "WORLD", world),
        mock.patch.object(ddp, "_LONG", 4 * COUNT),
    ):  # fmt: skip
        works(comm)
        hook = ddp.Buckets(comm, ways or (8,))
        with BackwardPass():
            averaged(hook.average(None, bucket_of(RANK + 1, is_last=ways[:1] == (ddp._BEHIND,))))
        yield comm, hook


def bucket_of(value: float, index: int = 0, *, is_last: bool = False) -> GradBucket:
    like = Tensor(cupy.empty((COUNT,), np.float32))
    return GradBucket(torch.full_like(like, value), index, is_last=is_last)


def averaged(future: Any, factor: float = 1) -> None:
    """The current stream finds the average of ``RANK + 1`` when it waits for the future."""
    found = cupy.asnumpy(future.wait().array)
    assert np.allclose(found, factor * TOTAL / SIZE, rtol=1e-6), f"rank {RANK}: {found[:4]}"


def buckets_behind_the_gradients() -> None:
    """An all-reduce follows the work that fills its bucket, and precedes what waits for its future."""
    backward = torch.Stream()
    with hooked() as (_, hook), torch.stream(backward):
        for turn in (1, 2):
            buckets = [bucket_of(0, index) for index in range(2)]
            with BackwardPass():
                futures = []
                for bucket in buckets:
                    delay(backward.cuda_stream)
                    bucket.buffer().array.fill(turn * (RANK + 1) * (bucket.index() + 1))
                    futures.append(hook.average(None, bucket))
                for index, future in enumerate(futures):
                    averaged(future, turn * (index + 1))


def long_buckets_run_in_few_blocks() -> None:
    with hooked() as (comm, hook), BackwardPass():
        for index in range(2):
            averaged(hook.average(None, bucket_of(RANK + 1, index, is_last=index == 1)))
        assert [request.sms for request in comm._state.backend._prepared if request.op == "avg"] == [8, None]


def ways_take_turns() -> None:
    """The hook keeps the way whose passes took the slowest rank least, and tries no more."""
    count, untimed = len(ddp._WAYS), len(ddp._WAYS) * ddp._UNTIMED
    for best in range(count):
        with hooked(*ddp._WAYS) as (comm, hook):
            chosen = []
            for turn in range(untimed + count * ddp._TIMED + 2):
                with BackwardPass():
                    futures = [hook.average(None, bucket_of(RANK + 1))]
                    chosen.append(hook._trial.way)
                    is_slow = turn % count != best if RANK == LAST else turn == untimed + best
                    torch.Event.clock[0] += 5 if is_slow else 1
                    futures.append(hook.average(None, bucket_of(RANK + 1, 1, is_last=True)))
                    for future in futures:
                        averaged(future)
            assert chosen[:-2] == [ddp._WAYS[turn % count] for turn in range(len(chosen) - 2)]
            assert chosen[-2:] == [ddp._WAYS[best]] * 2, (best, chosen)
            works(comm)


def ways_after_a_failed_pass() -> None:
    """The ranks begin with the first way again, although the pass has ended on all of them but one."""
    for met, ways in itertools.product(("by all", "by one", "in the next pass"), (ddp._WAYS, ddp._WAYS[::-1])):
        with hooked(*ways) as (comm, hook):
            with raises(KeyError if RANK == LAST else errors.PeerFailedError), BackwardPass():
                hook.average(None, bucket_of(RANK + 1))
                if RANK != LAST:
                    hook.average(None, bucket_of(RANK + 1, 1, is_last=True))
                WORLD.barrier()
                if RANK == LAST:
                    raise KeyError
                comm.synchronize()
            if met == "by all" or (met == "by one" and RANK == LAST):
                comm.recover()
            chosen = []
            for _ in range(6):
                with BackwardPass():
                    futures = [hook.average(None, bucket_of(RANK + 1, index, is_last=index == 1)) for index in range(2)]
                    chosen.append(hook._trial.way)
                    for future in futures:
                        averaged(future)
            assert chosen == [*2 * ways], chosen


def one_call_behind_the_pass() -> None:
    """Buckets wait for the last one, and those of a pass that has failed are not reduced with the next one's."""
    with hooked(ddp._BEHIND) as (comm, hook):
        number = comm._state.calls.number
        with raises(KeyError), BackwardPass():
            for index in range(1 + RANK):
                hook.average(None, bucket_of(-1, index))
            assert comm._state.calls.number == number, "the bucket has not waited"
            hook._unfinished.detach()  # on every rank, so nobody is told
            raise KeyError
        with BackwardPass():
            futures = [
                hook.average(None, bucket_of(index * (RANK + 1), index, is_last=index == 2)) for index in range(3)
            ]
            assert comm._state.calls.number == number + 1
        for index, future in enumerate(futures):
            averaged(future, index)
        works(comm)


def sparse_gradients() -> None:
    """Every rank gets an error that says so, and can go on."""
    with hooked() as (comm, hook):
        bucket = bucket_of(RANK + 1)
        bucket.buffer().layout = torch.sparse_coo
        with raises(errors.ArgumentError, "to_dense()"), BackwardPass():
            hook.average(None, bucket)
        works(comm)


def buckets_beside_the_backward_pass() -> None:
    """The backward pass's stream does not wait for a rank that is late for a bucket."""
    backward = torch.Stream()
    with hooked() as (_, hook), torch.stream(backward), BackwardPass():
        if RANK == LAST:
            WORLD.Barrier()
        future = hook.average(None, bucket_of(RANK + 1))
        if RANK != LAST:
            cupy.full((COUNT,), 1, np.float32)
            backward.of_cupy.synchronize()  # would not end if the all-reduce ran there
            WORLD.Barrier()
        averaged(future)


def a_bucket_that_is_dropped() -> None:
    """As after a backward pass that fails: its memory serves nothing else while it is reduced."""
    backward = torch.Stream()
    with hooked() as (comm, hook), torch.stream(backward), BackwardPass():
        if RANK == LAST:
            WORLD.Barrier()
        future = hook.average(None, bucket_of(RANK + 1))
        if RANK != LAST:
            del future
            others = [bucket_of(-1) for _ in range(4)]
            backward.of_cupy.synchronize()
            WORLD.Barrier()
            comm.synchronize()
            assert all((cupy.asnumpy(other.buffer().array) == -1).all() for other in others)
        else:
            averaged(future)


def a_backward_pass_that_raises() -> None:
    """The other ranks hear of it at once: if the hook raises, and if anything else does after the first bucket."""
    with hooked() as (comm, hook):
        for where in ("hook", "pass", "behind a pass within"):
            if RANK:
                words = "KeyError" if where == "hook" else "its backward pass raised an exception"
                with raises(errors.PeerFailedError, "rank 0 raised an error", words), BackwardPass():
                    hook.average(None, bucket_of(RANK + 1))
                    hook.average(None, bucket_of(RANK + 1, 1))
                    comm.synchronize()
            else:
                with raises(KeyError), BackwardPass():
                    bucket = bucket_of(RANK + 1)
                    if where == "hook":
                        bucket.buffer = lambda: {}["gone"]
                    with BackwardPass() if where == "behind a pass within" else nullcontext():
                        averaged(hook.average(None, bucket))
                    raise KeyError
            works(comm)
        with BackwardPass():
            averaged(hook.average(None, bucket_of(RANK + 1)))


def buckets_without_a_backward_pass() -> None:
    """``DistributedDataParallel.join()`` calls the hook of a rank without data outside of a pass."""
    with hooked() as (comm, hook):
        averaged(hook.average(None, bucket_of(RANK + 1)))
        works(comm)


def buckets_of_another_group() -> None:
    """Every rank raises, also those whose own rank is the same in both."""
    with hooked() as (comm, hook):
        turned = {0: 0} | {rank: SIZE - rank for rank in range(1, SIZE)}
        for group, words in (
            (torch.ProcessGroup(turned[RANK], [0, *range(SIZE - 1, 0, -1)]), f"rank {LAST} of {SIZE} is rank 1 of"),
            (torch.ProcessGroup(RANK, [*range(SIZE + 1)]), f"rank 0 of {SIZE} is rank 0 of {SIZE + 1} there"),
            (torch.ProcessGroup(RANK, [*range(RANK, SIZE + RANK)]), "its processes are not the same on every rank"),
            ("mine", "the hook's state is a str"),
        ):
            if SIZE == 2 and "is rank 1 of" in words:
                continue
            with raises(errors.ArgumentError, words), BackwardPass():
                hook.average(group, bucket_of(RANK + 1))
        with BackwardPass():
            averaged(hook.average(None, bucket_of(RANK + 1)))
        works(comm)


def a_group_that_one_rank_has_not_compared() -> None:
    """Behind the error it is compared again, also by those who have compared it."""
    with hooked() as (comm, _):
        hook, calls = ddp.Buckets(comm, (8,)), comm._state.calls
        gather = calls.gather

        def interrupted(*given: Any) -> list[bytes]:
            found: list[bytes] = gather(*given)
            WORLD.Barrier()
            if RANK == LAST:
                raise KeyError
            return found

        with (
            raises(KeyError if RANK == LAST else errors.PeerFailedError),
            mock.patch.object(calls, "gather", interrupted), BackwardPass(),
        ):  # fmt: skip
            hook.average(None, bucket_of(RANK + 1))
            comm.synchronize()
        for _ in range(2):
            with BackwardPass():
                averaged(hook.average(None, bucket_of(RANK + 1)))


def an_interrupt_behind_the_call_of_a_bucket() -> None:
    """The others are told, although every call was right."""
    with hooked() as (comm, hook):
        end = KeyError if RANK == LAST else None
        with raises(end or errors.PeerFailedError, *() if end else (f"rank {LAST} raised an error",)), BackwardPass():
            with mock.patch.object(hook._trial, "end", side_effect=end):
                averaged(hook.average(None, bucket_of(RANK + 1, is_last=True)))
            until(lambda: comm._state.calls.page.aborted, "the word of it")
            works(comm)
        works(comm)


SCENARIOS = [
    buckets_behind_the_gradients, buckets_beside_the_backward_pass, a_bucket_that_is_dropped,
    a_backward_pass_that_raises, buckets_without_a_backward_pass, buckets_of_another_group,
    long_buckets_run_in_few_blocks, ways_take_turns, ways_after_a_failed_pass, one_call_behind_the_pass,
    sparse_gradients, a_group_that_one_rank_has_not_compared, an_interrupt_behind_the_call_of_a_bucket,
]  # fmt: skip
