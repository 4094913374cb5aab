"""Checkpoints of ranks by the calls of the driver that the program ``cuda-checkpoint`` makes.

    python -m benchmarks.checkpoint --json FILE [--ranks 2]

In each trial some processes come to a rest. Then this program locks them, takes their state off the GPUs, brings it
back and unlocks them, and they go on. Ranks record a graph before, and compare the bits of its replays afterwards. The
first trials are of one process without ipcreduce: they show what the driver takes at all. The driver may refuse ranks
that are not suspended. If anything else is refused or wrong, this program ends with 1.
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM, MPIRUN = [sys.executable, "-m", "benchmarks.checkpoint"], ["mpirun"]
NOT_SUSPENDED = "not suspended"
SECONDS = 60  # in which ranks come to a rest, and end
LOCK_MS = 10_000
CALLS = 64

# ---- in a rank: what it holds, and how it rests


def rest(folder: Path, rank: int) -> None:
    """Tell that this process makes no CUDA call, and wait for the word to go on."""
    (folder / f"rests-{rank}").write_text(str(os.getpid()))
    if not comes((folder / "go on").exists):
        sys.exit(f"rank {rank} was not told to go on within {SECONDS} s")


def comes(condition: Callable[[], bool]) -> bool:
    """Wait for a condition, and tell if it has come true in time."""
    end = time.monotonic() + SECONDS
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return true


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
        source = cupy.asarray(np.random.default_rng(world.rank).standard_normal(5000).astype(np.float32))
        with graph.record():
            total = source
            for _ in range(CALLS):
                total = comm.allreduce(total, "mean")
        graph.replay()
        comm.synchronize()
        before = cupy.asnumpy(total).tobytes()
        if trial != NOT_SUSPENDED:
            comm.suspend(pools=trial == "suspended with pools")
        cupy.cuda.Device().synchronize()
        world.Barrier()
        rest(folder, world.rank)
        world.Barrier()
        comm.resume()
        for _ in range(3):
            total.fill(0)
            graph.replay()
            comm.synchronize()
            assert cupy.asnumpy(total).tobytes() == before, "other bits than before"
        values = np.full(1000, world.rank + 1.0, np.float32)
        assert (cupy.asnumpy(comm.allreduce(cupy.asarray(values))) == world.size * (world.size + 1) / 2).all()


# ---- the program that takes the checkpoints

ALONE = {"array": hold_array, "registered": hold_registered}
SHARED = ("suspended", "suspended with pools", NOT_SUSPENDED)


def checkpoint(pids: list[int]) -> dict[str, Any]:
    """Lock, checkpoint, restore and unlock these processes. The first step that fails is the last, but for unlocks.

    :returns: for each step its seconds, for all processes one after the other, and the driver's results.
    """
    from cuda.bindings import driver

    lock = driver.CUcheckpointLockArgs()
    lock.timeoutMs = LOCK_MS
    steps: dict[str, Callable[[int], Any]] = {
        "lock": lambda pid: driver.cuCheckpointProcessLock(pid, lock),
        "checkpoint": lambda pid: driver.cuCheckpointProcessCheckpoint(pid, None),
        "restore": lambda pid: driver.cuCheckpointProcessRestore(pid, None),
        "unlock": lambda pid: driver.cuCheckpointProcessUnlock(pid, None),
    }
    found: dict[str, Any] = {}
    free = free_bytes(driver)
    for name, step in steps.items():
        begin = time.monotonic()
        codes = [step(pid)[0] for pid in pids]
        found[name] = {"seconds": round(time.monotonic() - begin, 3), "results": [code.name for code in codes]}
        if name == "checkpoint":
            found["freed_mb"] = [(now - then) >> 20 for now, then in zip(free_bytes(driver), free, strict=True)]
        if any(codes):
            found["refused"] = name
            if name == "checkpoint":  # those that were taken come back
                [steps["restore"](pid) for pid, code in zip(pids, codes, strict=True) if not code]
            found["unlocked"] = [steps["unlock"](pid)[0].name for pid in pids]
            found["states"] = [str(driver.cuCheckpointProcessGetState(pid)) for pid in pids]
            break
    return found


def free_bytes(driver: Any) -> list[int]:
    """The free memory of each GPU."""
    found = []
    for ordinal in range(driver.cuDeviceGetCount()[1]):
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(ordinal)[1])
        found.append(driver.cuMemGetInfo()[1])
    return found


@contextmanager
def running(ranks: int, trial: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The processes of a trial, which print into a file. At the end, those that still run are killed."""
    command = [*PROGRAM, "--trial", trial, "--folder", str(folder)]
    if trial in SHARED:
        command = [*MPIRUN, "-n", str(ranks), *command]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, text=True, stdout=output, stderr=output)
        try:
            yield process
        finally:
            if process.poll() is None:  # mpirun would leave ranks that are locked
                for pid in (*resting(folder), process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()


def resting(folder: Path) -> list[int]:
    """The processes that have come to a rest, by rank."""
    return [int(text) for path in sorted(folder.glob("rests-*")) if (text := path.read_text())]


def take(ranks: int, trial: str) -> dict[str, Any]:
    """Run one trial."""
    count = ranks if trial in SHARED else 1
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, running(ranks, trial, folder := Path(name)) as process:
        if comes(lambda: process.poll() is not None or len(resting(folder)) == count) and process.poll() is None:
            found = checkpoint(resting(folder))
            (folder / "go on").touch()
            comes(lambda: process.poll() is not None)
        if process.poll() == 0:
            return found | {"right": True}
        ended = "they did not end" if process.poll() is None else f"exit code {process.poll()}"
        return found | {"failed": f"{ended}: {(folder / 'output').read_text()[-2000:]}"}


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
        report.write_json(args.json, report.header(["-m", "benchmarks.checkpoint", *sys.argv[1:]]) | {"trials": trials})
    return not all("right" in one or (trial == NOT_SUSPENDED and "refused" in one) for trial, one in trials.items())


if __name__ == "__main__":
    sys.exit(main())
