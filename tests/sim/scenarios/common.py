"""What the scenarios use: small checks, and what the library holds."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, communicator_state, errors
from ipcreduce.page import shared_files
from tests.shared.bounds import HANG, until
from tests.sim.scenarios import WORLD
from tests.simulated import driver, machine, machine_streams

RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
LAST = SIZE - 1
TOTAL = SIZE * (SIZE + 1) // 2
GPUS = len(machine.gpus())
OWN = RANK % GPUS if GPUS else 0  # the communicators' GPU
OTHER = (RANK + 1) % GPUS if GPUS else 0


def mine(count: int = 1000) -> Any:
    """This rank's array: RANK + 1 everywhere, so that sums are TOTAL."""
    return cupy.full((count,), RANK + 1, np.float32)


def right(array: Any, factor: int = 1) -> None:
    values = cupy.asnumpy(array)
    assert (values == TOTAL * factor).all(), f"rank {RANK}: {values[:8]}... where {TOTAL * factor} was due"


def delay(stream: int) -> None:
    """On rank 0 what comes next on a stream starts late, so that a call that does not wait for it overtakes it."""
    if RANK == 0:
        machine_streams.submit(stream, lambda: time.sleep(0.3))


def others_wait(comm: Any) -> Callable[[], bool]:
    """A condition that holds once every rank but the last is in the call that this one makes next."""
    page, number = comm._state.calls.page, comm._state.calls.number + 1
    return lambda: all(page.calls.call_of(rank) >= number for rank in range(LAST))


def told(comm: Any) -> None:
    """Wait until a fault has been told to this rank."""
    until(lambda: comm._state.calls.page.aborted, "a fault")


def works(comm: Any, count: int = 10) -> None:
    result = comm.allreduce(mine(count))
    comm.synchronize()  # raises what would have spoilt it
    right(result)


def host_works(comm: Any) -> None:
    right(comm.allreduce(np.full(7, RANK + 1.0)))


def good_communicator() -> None:
    with Communicator() as comm:
        assert comm.backend == "ipc", comm.describe()
        works(comm)


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block must raise this very class, and wait for nothing, with these words in the message."""
    started, found = time.monotonic(), None
    try:
        yield
    except Exception as error:
        found = error
    if type(found) is not kind or not all(word in str(found) for word in words):
        raise AssertionError(f"rank {RANK}: {found!r} where {kind.__name__} with {words} was due") from found
    assert time.monotonic() - started < HANG, f"rank {RANK}: {time.monotonic() - started:.1f} s, {found}"


def error_of(call: Callable[[], Any]) -> str:
    """What a call raised, as a text, since an exception keeps arrays alive; "ours: ..." if it is one of ours."""
    try:
        call()
        return ""
    except errors.IpcReduceError as error:
        return f"ours: {error!r}"
    except Exception as error:
        return repr(error)


def in_threads(*calls: Callable[[], Any], device: int | None = OWN) -> None:
    """Each call in a thread of its own, with this GPU current, or none; what one raises is raised here."""
    found: list[str] = []

    def run(call: Callable[[], Any]) -> None:
        with contextlib.nullcontext() if device is None else cupy.cuda.Device(device):
            found.append(error_of(call))

    threads = [threading.Thread(target=run, args=[call], daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive(), f"rank {RANK}: a thread hangs"
    assert found == [""] * len(calls), f"rank {RANK}: {found}"


@contextlib.contextmanager
def environment(rank: int | None = None, **variables: str) -> Iterator[None]:
    """Environment variables for a while, on one rank or on all."""
    before = dict(os.environ)
    os.environ.update(variables if rank in (None, RANK) else {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def close_seconds(seconds: float) -> Any:
    """For a while, how long close() waits for the peers."""
    return mock.patch.object(communicator_state, "_CLOSE_SECONDS", seconds)


def fault(comm: Any) -> None:
    """A call that rank 0 refuses, and of which every rank has heard."""
    if RANK == 0:
        with raises(errors.ArgumentError, "there is no op"):
            comm.allreduce(mine(), "mode")
    else:
        with raises(errors.PeerFailedError, "rank 0 raised an error"):
            works(comm)


pages: list[str] = []  # the files of shared memory that this rank has made


def _noted(**arguments: Any) -> tuple[int, str]:
    descriptor, path = tempfile.mkstemp(**arguments)
    pages.append(path)
    return descriptor, path


shared_files.tempfile = types.SimpleNamespace(mkstemp=_noted)  # type: ignore[assignment]


def held() -> dict[str, int]:
    """What the library has taken: from the driver, from the system."""
    for _ in range(2):  # a graph's finaliser lets go of more
        gc.collect()
    if GPUS:
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("ipcreduce")]
    return driver.leaks() | {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "page files": sum(map(os.path.exists, pages)),
        "mapped pages": Path("/proc/self/maps").read_text().count("/dev/shm/ipcreduce-"),
        "threads": len(names) + ("ipcreduce-background" not in names),  # that one stays
    }


def open_files() -> Counter[str]:
    """What the descriptors of this process stand for, without numbers of their own, such as inodes."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found[re.sub(r"[0-9a-f]{16}|\d+", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return found


def grown(before: dict[str, int]) -> dict[str, int]:
    now = held()
    return {kind: now.get(kind, 0) - before.get(kind, 0) for kind in now | before if now.get(kind) != before.get(kind)}
