"""The part of ``tune`` for all-reduces with RMSNorm: the fastest kernel, by hidden size and number of rows.

Each call is timed after a kernel that does not let its successor start early, as most kernels of a program: which
kernel is the fastest depends on that (norm_plan.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import numpy as np

from ..calls.addresses import NormAddresses
from ..calls.request import with_norm
from ..communicator import Communicator
from ..cuda import cupy_runtime
from ..errors import IpcReduceError
from ..ipc import norm_plan, plan
from ..ipc.backend import IpcBackend
from . import norms, timing
from .arguments import counts

GAIN = 0.02  # the least gain for which a choice changes: times vary by about as much
_DTYPE, _CALLS, _MAX_SIZES = "float16", 50, 4
_Choice = TypeVar("_Choice", plan.Choice, norm_plan.NormChoice)


def hidden_sizes(text: str) -> list[int]:
    """Parse hidden sizes. :raises argparse.ArgumentTypeError: if there are too many, or one has no fused kernel."""
    found = sorted({*counts(text)})
    wrong = [one for one in found if one % norm_plan.GROUP or one > norm_plan.MAX_HIDDEN]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"{wrong[0]} has no fused kernel. Pass multiples of {norm_plan.GROUP} up to {norm_plan.MAX_HIDDEN}"
        )
    if len(found) > _MAX_SIZES:
        raise argparse.ArgumentTypeError(f"there are {len(found)} hidden sizes. Pass at most {_MAX_SIZES}")
    return found


def measure(
    comm: Communicator, backend: IpcBackend, hidden: Sequence[int], replays: int, mpi: Any
) -> norm_plan.NormTable:  # fmt: skip
    """The table with these hidden sizes, and with those of the present table, as far as there is room. Collective.

    :raises IpcReduceError: on every rank, if a result is wrong.
    """
    found: list[norm_plan.NormChoice] = []
    with cupy_runtime.load().cuda.Stream(non_blocking=True):
        for size, rows in product(hidden, norms.ROWS):
            message = norms.Message(rows, size, np.dtype(_DTYPE), comm, "none")
            every = norm_plan.every_plan(message.source.shape, backend.launches.gpus)
            times = {choice: _time(backend, message, planned, replays, mpi) for choice, planned in every}
            if times:
                add_fastest(found, times, rows)
    comm.synchronize()
    before = [one for one in backend.launches.norm_table if one.hidden not in hidden]
    both = sorted([*found, *before], key=lambda one: (one.hidden, one.up_to))
    return norm_plan.checked_table(both if len(both) <= norm_plan.MAX_CHOICES else found)


def add_fastest(table: list[_Choice], times: dict[_Choice, float], size: int) -> None:
    """Add the fastest choice for a size, or let that for the size before serve this one, too."""
    best = min(times, key=lambda choice: times[choice])
    before = replace(table[-1], up_to=size) if table else best
    if table and before in times and times[before] <= times[best] * (1 + GAIN):
        table[-1] = before
    else:
        table.append(best)


def _time(
    backend: IpcBackend, message: norms.Message, planned: norm_plan.NormPlan, replays: int, mpi: Any
) -> float:  # fmt: skip
    """Time a launch, in microseconds. :raises IpcReduceError: if the result is wrong."""
    arrays = message.source
    prepared = backend.launches.fused(with_norm(arrays.x.shape, arrays.shape), planned)
    assert prepared is not None
    addresses = NormAddresses(
        source=arrays.x.data.ptr, weight=arrays.weight.data.ptr, residual=arrays.residual.data.ptr,
        out=arrays.y.data.ptr, residual_out=arrays.residual_out.data.ptr, quantised=0, scales=0,
    )  # fmt: skip
    stream, owner = cupy_runtime.stream_of()

    def call() -> None:
        arrays.y.fill(1)  # no zero: that would be no kernel
        backend.run(partial(prepared.start, addresses), stream, owner)

    return timed(message, planned, call, _CALLS, replays, mpi)


def timed(message: Any, by: object, call: Callable[[], None], calls: int, replays: int, mpi: Any) -> float:
    """The time of ``call``, in microseconds. :raises IpcReduceError: if the message's result is wrong."""
    message.renew()
    found = timing.in_graph(timing.captured(call, calls), calls, replays, mpi).median
    if not all(mpi.allgather(message.is_right())):
        raise IpcReduceError(f"{message.what} by {by} is wrong. No table is stored")
    return found
