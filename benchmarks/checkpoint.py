"""Checkpoints of running ranks by the driver, in place of the program ``cuda-checkpoint``, which calls the same.

    python -m benchmarks.checkpoint --json FILE [--ranks 2]

In each trial ranks record a graph and come to a rest. Then this program locks them, takes their state off the GPUs,
brings it back and unlocks them. Afterwards they go on, replay the graph and compare its bits with those from before.
The first trials are of one process without ipcreduce: they show what the driver takes at all. A trial that the driver
refuses has its error in the result; a trial with other bits, or ranks that do not go on, ends this program with 1.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 40  # for a trial
LOCK_MS = 10_000
CALLS = 64

# ---- in a rank: what it holds, and how it rests


def rest(folder: Path, rank: int) -> None:
    """Tell that this process makes no CUDA call, and wait for the word to go on."""
    (folder / f"rests-{rank}").write_text(str(os.getpid()))
    until(lambda: (folder / "go on").exists(), "the word to go on")


def until(come: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not come():
        if time.monotonic() > end:
            sys.exit(f"no {what} within {SECONDS} s")
        time.sleep(0.01)


def hold_array(folder: Path) -> None:
    """An array of CuPy."""
    import cupy

    array = cupy.arange(1 << 20)
    rest(folder, 0)
    assert int(array.sum()) == (1 << 19) * ((1 << 20) - 1)


def hold_registered(folder: Path) -> None:
    """Host memory that other processes may share, registered with the driver, as the control page is."""
    import cupy
    import numpy as np

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(mmap.PAGESIZE)
        page = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), np.uint8)
        cupy.cuda.Device().use()
        cupy.cuda.runtime.hostRegister(page.ctypes.data, page.nbytes, 0)
        hold_array(folder)


def hold_communicator(folder: Path, trial: str) -> None:
    """A communicator with a graph, suspended or not."""
    import cupy
    import numpy as np
    from mpi4py import MPI

    import ipcreduce

    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    with ipcreduce.Communicator() as comm, ipcreduce.Graph(comm) as graph:
        source = cupy.asarray(np.random.default_rng(world.rank).standard_normal(100_000).astype(np.float32))
        with graph.record():
            total = source
            for _ in range(CALLS):
                total = comm.allreduce(total, "mean")
        graph.replay()
        comm.synchronize()
        before = cupy.asnumpy(total).tobytes()
        if trial != "running":
            comm.suspend(pools=trial == "suspended with pools")
        cupy.cuda.Device().synchronize()
        world.Barrier()
        rest(folder, world.rank)
        world.Barrier()
        comm.resume()
        for _ in range(10):
            graph.replay()
            comm.synchronize()
            assert cupy.asnumpy(total).tobytes() == before, "other bits than before"
        values = np.full(1000, world.rank + 1.0, np.float32)
        assert (cupy.asnumpy(comm.allreduce(cupy.asarray(values))) == world.size * (world.size + 1) / 2).all()


# ---- the program that takes the checkpoints

ALONE = {"array": hold_array, "registered": hold_registered}
SHARED = ("suspended", "suspended with pools", "running")


def checkpoint(pids: list[int]) -> dict[str, Any]:
    """Lock, checkpoint, restore and unlock these processes. The first step that fails is the last, but for unlocks."""
    from cuda.bindings import driver

    lock = driver.CUcheckpointLockArgs()
    lock.timeoutMs = LOCK_MS
    steps: list[tuple[str, Callable[[int], Any]]] = [
        ("lock", lambda pid: driver.cuCheckpointProcessLock(pid, lock)),
        ("checkpoint", lambda pid: driver.cuCheckpointProcessCheckpoint(pid, None)),
        ("restore", lambda pid: driver.cuCheckpointProcessRestore(pid, None)),
        ("unlock", lambda pid: driver.cuCheckpointProcessUnlock(pid, None)),
    ]
    found: dict[str, Any] = {}
    free = driver_free_bytes(driver)
    for name, step in steps:
        begin = time.monotonic()
        codes = [step(pid)[0] for pid in pids]
        found[name] = {"seconds": round(time.monotonic() - begin, 3), "results": [code.name for code in codes]}
        if name == "checkpoint":
            found["freed_mb"] = [(now - then) >> 20 for now, then in zip(driver_free_bytes(driver), free, strict=True)]
        if any(codes):
            found["refused"] = name
            if name == "checkpoint":  # those that were taken come back
                for pid, code in zip(pids, codes, strict=True):
                    if not code:
                        driver.cuCheckpointProcessRestore(pid, None)
            found["unlocked"] = [driver.cuCheckpointProcessUnlock(pid, None)[0].name for pid in pids]
            found["states"] = [str(driver.cuCheckpointProcessGetState(pid)) for pid in pids]
            break
    return found


def driver_free_bytes(driver: Any) -> list[int]:
    """The free memory of each GPU."""
    found = []
    for ordinal in range(driver.cuDeviceGetCount()[1]):
        context = driver.cuDevicePrimaryCtxRetain(ordinal)[1]
        driver.cuCtxSetCurrent(context)
        found.append(driver.cuMemGetInfo()[1])
    return found


@contextmanager
def running(ranks: int, trial: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The processes of a trial. They are killed at the end, if they still run."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--trial", trial, "--folder", str(folder)]
    if trial in SHARED:
        command = ["mpirun", "-n", str(ranks), "--bind-to", "none", *command]
    process = subprocess.Popen(
        command, env=os.environ | {"IPCREDUCE_MEMORY": "vmm"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()


def take(ranks: int, trial: str) -> dict[str, Any]:
    """Run one trial."""
    count = ranks if trial in SHARED else 1
    with tempfile.TemporaryDirectory() as name, running(ranks, trial, folder := Path(name)) as process:
        files = [folder / f"rests-{rank}" for rank in range(count)]
        until(lambda: process.poll() is not None or all(one.exists() and one.read_text() for one in files), "rest")
        if process.poll() is not None:
            return {"failed": process.communicate()[0][-2000:]}
        found = checkpoint([int(one.read_text()) for one in files])
        (folder / "go on").touch()
        try:
            output = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            return found | {"failed": "the processes did not go on"}
        return found | ({"failed": output[-2000:]} if process.returncode else {"same_bits": True})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trial", choices=[*ALONE, *SHARED], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trial in ALONE:
        ALONE[args.trial](args.folder)
        return 0
    if args.trial:
        hold_communicator(args.folder, args.trial)
        return 0
    from cuda.bindings import driver

    from ipcreduce.bench import report

    driver.cuInit(0)
    trials: dict[str, Any] = {}
    for trial in (*ALONE, *SHARED):
        trials[trial] = take(args.ranks, trial)
        print(trial, trials[trial], flush=True)
    if args.json:
        report.write_json(args.json, report.header([f"checkpoints of {args.ranks} ranks"]) | {"trials": trials})
    return any("failed" in one and "refused" not in one for one in trials.values())


if __name__ == "__main__":
    sys.exit(main())
