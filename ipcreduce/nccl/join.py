"""Start-up of the NCCL backend: the ranks choose GPUs, join one NCCL communicator, and try it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .. import clock
from ..calls import request
from ..cuda import cupy_runtime, driver
from ..cuda.contexts import using_relaxed
from ..device.background import Job
from ..device.devices import open_to_processes, share_device
from ..errors import CudaError, IpcReduceError, UnsupportedError
from ..options import Options
from ..page.control_page import Page
from ..ranks import exchange
from ..ranks.exchange import Ranks
from ..types import DEFAULT_STREAM
from . import library
from .backend import NcclBackend

_NETWORK = exchange.struct(exchange.Kind.NETWORK, ("nccl", "<u4"), ("identity", f"V{library.ID_BYTES}"))
_TRIED = (1, 1 << 18)  # numbers of float32. Each message uses another protocol of NCCL, which makes its links now


def start(ranks: Ranks, options: Options, page: Page, local_rank: int, reason: str, deadline: float) -> NcclBackend:
    """Make the backend, step by step. A vote ends each step, so that either all ranks go on, or all raise.

    :param ranks: the ranks, which have joined. Each has a GPU to use.
    :param local_rank: this process's number on its host.
    :param reason: why this backend was chosen.
    :param deadline: on the clock of :mod:`ipcreduce.clock`.
    :raises ArgumentError: if ``options.device`` is wrong on a rank. :raises Agreed: if a step fails.
    """
    rank = ranks.rank
    identity = _share_identity(ranks, deadline)
    info, _ = share_device(ranks, options.device, local_rank, deadline)
    context, backend = 0, None
    try:
        with exchange.step(ranks, deadline, "starting CUDA"), open_to_processes(info.ordinal):
            context = driver.retain_context(info.ordinal)
            backend = NcclBackend(info, context, page, timeout=options.timeout, reason=reason)
        with exchange.step(ranks, deadline, "joining NCCL's communicator", waits=True):
            backend.join(identity, _half(deadline))
        with exchange.step(ranks, deadline, "trying NCCL's all-reduce", waits=True):
            if not Job(partial(_try, backend, rank)).wait(_half(deadline) - clock.now()):
                backend.nccl.abort()
                raise CudaError("ncclAllReduce", library.TIMEOUT, "NCCL's first sum did not end in time")
            backend.watch()
        return backend
    except BaseException as error:
        exchange.tell(ranks, error, deadline)
        with suppress(IpcReduceError):
            if backend is not None:
                backend.release()
            elif context:
                driver.release_context(info.ordinal)
        raise


def _half(deadline: float) -> float:
    """A deadline for a step that leaves half of the time until ``deadline`` for the vote after it."""
    return (clock.now() + deadline) / 2


def _share_identity(ranks: Ranks, deadline: float) -> bytes:
    """Rank 0's identity for NCCL, on every rank. :raises Agreed: if a rank has no NCCL, or another version of it."""

    def own() -> dict[str, Any]:
        version = library.version()
        identity = library.new_id() if ranks.rank == 0 else bytes(library.ID_BYTES)
        return {"nccl": version, "identity": np.void(identity)}

    everyone = exchange.share(ranks, _NETWORK, own, deadline, "loading NCCL")
    versions = sorted({int(one) for one in everyone["nccl"]})
    if len(versions) > 1:
        raise exchange.Agreed(f"the ranks have NCCL {' and '.join(map(str, versions))}. Install one of them everywhere")
    return bytes(everyone[0]["identity"].tobytes())


def _try(backend: NcclBackend, rank: int) -> None:
    """Make the first all-reduces, and check their sums. :raises UnsupportedError: if a sum is wrong."""
    cupy, n = cupy_runtime.load(), backend.n
    with using_relaxed(backend.context), cupy.cuda.Device(backend.device.ordinal):
        for count in _TRIED:
            array = cupy.full(count, rank + 1.0, np.float32)
            driver.synchronize()
            prepared, address = backend.prepare(request.plain(array.shape, "float32", "sum")), array.data.ptr
            backend.run(partial(prepared.start, (address, address)), DEFAULT_STREAM, None)
            driver.synchronize()
            if not (cupy.asnumpy(array) == n * (n + 1) / 2).all():
                raise UnsupportedError(f"a sum of {count} numbers by NCCL is wrong on rank {rank}")
        backend.order.reset()
