"""The choice of each rank's GPU, and the exchange of its properties with the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..cuda import cupy_runtime, driver
from ..errors import ArgumentError, CudaError, IpcReduceError, UnsupportedError
from ..ranks import exchange
from ..ranks.exchange import Ranks
from ..texts import shown, text_in

MIN_CAPABILITY = (8, 0)
_UNAVAILABLE = 46  # CUDA_ERROR_DEVICE_UNAVAILABLE, and cudaErrorDevicesUnavailable


def share_device(
    ranks: Ranks, device: Any, local_rank: int, deadline: float
) -> tuple[driver.DeviceInfo, np.ndarray[Any, Any]]:
    """Choose this rank's GPU and tell the other ranks. Collective. Returns it and every rank's exchange.DEVICE record.

    :param device: see :class:`Options`.
    :param local_rank: this process's number on its host, for "auto".
    :param deadline: by the clock of :mod:`ipcreduce.clock`.
    :raises ArgumentError: on every rank, if ``device`` is wrong on one.
    :raises UnsupportedError: if a rank's GPU is unusable.
    """
    info, error, fields = None, None, {}
    try:
        count = driver.device_count()
        info = driver.device_info(_chosen(device, local_rank, count))
        if device == "auto":
            with open_to_processes(info.ordinal):
                cupy_runtime.use_device(info.ordinal)
        if info.capability < MIN_CAPABILITY:
            found, needed = (".".join(map(str, one)) for one in (info.capability, MIN_CAPABILITY))
            raise UnsupportedError(
                f"GPU {info.ordinal}, {info.name}, has compute capability {found}, and ipcreduce needs {needed} or "
                "more. Hide that GPU by CUDA_VISIBLE_DEVICES, or choose another one by device="
            )
        fields = {
            "uuid": np.void(info.uuid), "capability": info.capability, "multiprocessors": info.multiprocessors,
            "shared_bytes": info.shared_bytes, "visible": count, "name": info.name, "driver": driver.driver_version(),
        }  # fmt: skip
    except IpcReduceError as caught:
        error = caught
    record = exchange.message(exchange.DEVICE, error, wrong=isinstance(error, ArgumentError), **fields)
    devices = exchange.allgather(ranks, record, deadline, "choosing devices")
    raise_wrong(ranks.rank, devices)
    exchange.check(ranks, devices, "choosing devices")
    assert info is not None
    return info, devices


@contextmanager
def open_to_processes(ordinal: int) -> Iterator[None]:
    """Run a block that begins to use a GPU.

    :raises UnsupportedError: if the GPU's compute mode excludes this process.
    """
    try:
        yield
    except CudaError as error:
        if error.code != _UNAVAILABLE:
            raise
        raise UnsupportedError(
            f"GPU {ordinal} takes no further process, because of its compute mode ({error}). Give each rank a GPU of "
            "its own, start MPS, or set the compute mode to default: nvidia-smi -c 0"
        ) from error


def _chosen(device: Any, local_rank: int, count: int) -> int:
    """The ordinal of ``device``, which is one of ``count`` visible GPUs. :raises ArgumentError: if it names none."""
    if device is None:
        return cupy_runtime.current_device()
    if device == "auto":
        return local_rank % count
    if device >= count:
        raise ArgumentError(
            f"device {shown(device)} is none of the {count} GPUs that this process sees. Pass an ordinal below "
            f"{count}, 'auto' or None"
        )
    return int(device)


def advise_spreading(devices: np.ndarray[Any, Any], warn: Callable[[str], None]) -> None:
    """Warn if ranks share a GPU while another GPU is idle."""
    used = [uuid.tobytes() for uuid in devices["uuid"]]
    if len(set(used)) < min(len(used), int(devices["visible"].max())):
        warn(
            f"{len(used)} ranks share {len(set(used))} GPU(s) while others are idle. Kernels of several ranks take "
            'turns on a GPU, about 5 ms each. Pass Communicator(device="auto"), which spreads the ranks over all '
            "GPUs, or make another device current on each rank"
        )


def most_on_a_gpu(devices: np.ndarray[Any, Any]) -> int:
    """The largest number of ranks on one GPU; the same on every rank."""
    return max(Counter(uuid.tobytes() for uuid in devices["uuid"]).values())


def raise_wrong(own: int, everyone: np.ndarray[Any, Any]) -> None:
    """Raise the error of a rank whose argument is wrong: this rank's own one, or else the first rank's.

    :param everyone: every rank's record, with a field ``wrong``.
    :raises ArgumentError: if there is such a rank.
    """
    wrong = np.flatnonzero(everyone["wrong"])
    if len(wrong):
        rank = own if own in wrong else int(wrong[0])
        where = "" if rank == own else f"rank {rank}'s "
        raise ArgumentError(f"rank {own}, start-up: {where}{text_in(everyone[rank])}")
