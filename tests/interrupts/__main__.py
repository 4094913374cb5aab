"""``mpirun -n 2 python -m tests.interrupts [--host|--nccl] [--every N] [WHAT...]``: Ctrl-C on one rank, at each place.

A place is one at which Python may run a signal handler within the package, with the way to it. Afterwards every other
rank must have heard of it at once, and all ranks either go on together, or all have lost the communicator and close it.
Then nothing may be left, and the next communicator works. On the simulated device, with --nccl over the stand-in for
NCCL's binding; or with --host on NumPy arrays.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests import simulated
from tests.shared import bounds, worker
from tests.shared.world import WORLD

parser = argparse.ArgumentParser(prog="tests.interrupts")
parser.add_argument("--host", action="store_true")
parser.add_argument("--nccl", action="store_true")
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--from", type=int, default=0, dest="first")
parser.add_argument("--rank", type=int, default=-1, help="the rank to interrupt; -1 for the last one")
parser.add_argument("--algorithm", help="as for a communicator; direct: recordings are registered")
parser.add_argument("--timeout", type=float, default=30.0)
parser.add_argument("--hang", type=float, default=bounds.HANG)
parser.add_argument("--leaks", action="store_true", help="say what is left behind each place")
parser.add_argument("what", nargs="*")
options = parser.parse_args()
if not options.host:
    os.environ.setdefault("SIM_DEVICES", str(WORLD.size))
    os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")
    os.environ |= {"IPCREDUCE_BACKEND": "nccl"} if options.nccl else {"SIM_NO_NCCL": "1"}
    simulated.install()
    import cupy as library
else:
    library = np

from ipcreduce import (  # noqa: E402
    Communicator,
    Graph,
    GraphRunner,
    IpcReduceError,
    Map,
    eager_break,
    forward_context,
    process,
)
from tests.interrupts.points import Key, Points  # noqa: E402
from tests.simulated import driver, nccl  # noqa: E402

RANK, SIZE = WORLD.rank, WORLD.size
ONE = options.rank % SIZE  # the rank that is interrupted
Act = Callable[[], Any]


def mine(count: int = 40) -> Any:
    return library.full(count, RANK + 1, np.float32)


def as_numpy(array: Any) -> np.ndarray:
    return np.asarray(array if options.host else library.asnumpy(array))


class Communicators:
    """One communicator, made anew where it is lost or closed, and what was held before."""

    def __init__(self) -> None:
        self.comm: Any = None
        self.graph: Any = None
        self.ended: list[Any] = []
        self._shapes = 0

    def open(self) -> Communicator:
        if self.comm is None:
            self.graph = None
            self.make()
        return self.comm

    def make(self) -> None:
        self.comm = Communicator(timeout=options.timeout, algorithm=options.algorithm)

    def settle(self) -> None:
        """Make a right call. :raises IpcReduceError: what that raises."""
        comm = self.open()
        if not options.host:
            comm.resume()
        result = comm.allreduce(mine())
        comm.synchronize()
        assert (as_numpy(result) == SIZE * (SIZE + 1) / 2).all(), result

    def close(self) -> None:
        comm, self.comm, self.graph = self.comm, None, None
        if comm is not None:
            comm.close()

    # ---- what is interrupted
    def call(self) -> Act:
        return self._new(self.open().allreduce)

    def cached(self) -> Act:
        """A call that was made before."""
        array, comm = mine(), self.open()
        return lambda: (comm.allreduce(array, out=array), comm.synchronize())

    def list(self) -> Act:
        comm = self.open()
        return self._new(lambda array: comm.allreduce([mine(9), array]))

    def expression(self) -> Act:
        comm, then = self.open(), Map("v + 1", host=lambda v: v + 1)
        return self._new(lambda array: comm.allreduce(array, then=then))

    def allgather(self) -> Act:
        return self._new(self.open().allgather)

    def reduce_scatter(self) -> Act:
        return self._new(self.open().reduce_scatter)

    def broadcast(self) -> Act:
        return self._new(self.open().broadcast)

    def split_list(self) -> Act:
        comm = self.open()
        return self._new(lambda array: comm.allgather([array, mine(9)], axis=-1))

    def norm(self) -> Act:
        comm, weight = self.open(), mine(256)
        return self._new(lambda rows: comm.allreduce_rmsnorm(rows.reshape(-1, 256), weight), 256)

    def _new(self, call: Callable[[Any], Any], multiple: int = 2) -> Act:
        """A call on an array whose shape is new."""
        self._shapes += 1
        array, comm = mine(multiple * SIZE * (50 + self._shapes)), self.comm
        return lambda: (call(array), comm.synchronize())

    def record(self) -> Act:
        array, comm = mine(), self.open()

        def act() -> None:
            with Graph(comm) as graph, graph.record():
                comm.allreduce(array)
            comm.synchronize()

        return act

    def capture(self) -> Act:
        """A recording whose graph is registered apart, at the end of ``capture()``."""
        array, comm = mine(), self.open()

        def act() -> None:
            with Graph(comm) as graph:
                with comm.capture(), graph.record():
                    comm.allreduce(array)
                comm.synchronize()

        return act

    def runner(self) -> Act:
        """A recording with a break by a runner, and its replay."""
        array, comm, pause = mine(), self.open(), eager_break(lambda: None)

        def model(given: Any) -> Any:
            result = comm.allreduce(given)
            pause()
            return comm.allreduce(result)

        def act() -> None:
            run = GraphRunner(model, comm)
            for _ in range(2):
                with forward_context(1):
                    run(array)
            comm.synchronize()

        return act

    def replay(self) -> Act:
        comm = self.open()
        if self.graph is None:
            self.graph = Graph(comm)
            with self.graph.record():
                comm.allreduce(mine())
            self.settle()
        graph = self.graph
        return lambda: (graph.replay(), comm.synchronize())

    def ending(self) -> Act:
        """The end of a graph, which this object keeps, so that it is not freed by being collected."""
        graph, comm = Graph(self.open()), self.open()
        with graph.record():
            comm.allreduce(mine())
        self.settle()
        self.ended.append(graph)
        return graph.close

    def recover(self) -> Act:
        return self.open().recover

    def suspend(self) -> Act:
        comm = self.open()
        return lambda: comm.suspend(pools=True)

    def resume(self) -> Act:
        comm = self.open()
        comm.suspend()
        return comm.resume

    def closing(self) -> Act:
        return self.open().close

    def starting(self) -> Act:
        self.close()
        return self.make


SPLITS = "allgather", "reduce_scatter", "broadcast", "split_list"
HOST = ("call", "cached", "list", "expression", "norm", *SPLITS, "recover", "closing", "starting")
SIMULATED = (*HOST, "record", "capture", "runner", "replay", "ending", "suspend", "resume")


def held() -> dict[str, int]:
    for _ in range(2):
        gc.collect()
    found = {"descriptors": len(os.listdir("/proc/self/fd")), "communicators": len(process.live)}
    if not options.host:
        library.get_default_memory_pool().free_all_blocks()
        found |= driver.leaks() | {"uses of NCCL's communicators behind their end": len(nccl.ghosts)}
    return found


def grown(before: dict[str, int]) -> dict[str, int]:
    """What is held beyond ``before``."""
    return {kind: count - before.get(kind, 0) for kind, count in held().items() if count > before.get(kind, 0)}


def outcome(act: Act) -> str:
    try:
        act()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except IpcReduceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Trial:
    """One thing to interrupt."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.communicators, self.lost = Communicators(), 0
        self.wrong: collections.Counter[str] = collections.Counter()

    def places(self) -> list[Key]:
        """Those of that rank, on every rank."""
        for _ in range(2):  # the second time nothing is loaded for the first time
            act = getattr(self.communicators, self.name)()
            WORLD.Barrier()
            points = Points()
            said = outcome(partial(points.run, act) if RANK == ONE else act)
            assert not said, said
            self._go_on("")
        return WORLD.bcast([*points.seen], ONE)

    def interrupt(self, key: Key) -> None:
        """Interrupt it at one place, and go on."""
        act = getattr(self.communicators, self.name)()
        WORLD.Barrier()
        points, begun = Points(key), time.monotonic()
        said = outcome(partial(points.run, act) if RANK == ONE else act)
        del act
        later = self._go_on(said)
        seconds = time.monotonic() - begun
        self.place = points.fired
        every, fired = WORLD.allgather([said, *later]), WORLD.bcast(points.fired, ONE)
        self.lost += bool(fired) and any("PeerLostError" in text for texts in every for text in texts)
        if fired and every[ONE][0] != "KeyboardInterrupt":
            self.wrong[f"{fired}: the rank is not interrupted: {every}"] += 1
        if any("PeerTimeoutError" in text for texts in every for text in texts) or max(WORLD.allgather(seconds)) > 20:
            self.wrong[f"{fired}: a rank was not told: {seconds:.1f} s, {every}"] += 1
        if any(texts[-1] for texts in every):
            self.wrong[f"{fired}: they do not go on: {every}"] += 1

    def _go_on(self, said: str) -> list[str]:
        """What this rank hears until all ranks have made a right call, with another communicator if theirs is lost."""
        communicators = self.communicators
        if said == "KeyboardInterrupt" and communicators.comm is not None:
            if self.name == "ending":
                communicators.ended[-1].close()
            outcome(communicators.comm.close if self.name == "closing" else communicators.comm.recover)
        later = [outcome(communicators.settle)]
        while later[-1] and len(later) < 5:
            if "PeerLostError" in later[-1] or "is closed" in later[-1]:
                communicators.close()
            later.append(outcome(communicators.settle))
        return later

    def run(self) -> None:
        self.communicators.open()
        self.communicators.close()
        WORLD.Barrier()
        before = held()
        places = self.places()
        chosen = places[options.first :: options.every]
        for key in chosen:
            faulthandler.dump_traceback_later(options.hang, exit=True)
            known = held() if options.leaks else {}
            self.interrupt(key)
            if known and (
                more := {kind: n - known.get(kind, 0) for kind, n in held().items() if n > known.get(kind, 0)}
            ):
                print(f"    {self.place} leaves {more} on rank {RANK}", flush=True)
        self.communicators.close()
        WORLD.Barrier()
        faulthandler.dump_traceback_later(options.hang, exit=True)
        more: dict[str, int] = {}
        for _ in range(50):
            more = grown(before)
            if not any(WORLD.allgather(bool(more))):
                break
            time.sleep(0.1)
        if more:
            self.wrong[f"rank {RANK} has left {more}"] += 1
        faulthandler.cancel_dump_traceback_later()
        wrong = sum(WORLD.allgather(self.wrong), collections.Counter())
        if RANK == 0:
            lost = f"{self.lost} lost, " if self.lost else ""
            verdict = "WRONG" if wrong else "right"
            print(f"{self.name}: {len(chosen)} of {len(places)} places, {lost}{verdict}", flush=True)
            for text in wrong:
                print("   ", text[:600], flush=True)
        assert not wrong, "see above"


def main() -> None:
    warnings.simplefilter("ignore")
    if not options.host:
        library.cuda.Device(RANK % library.cuda.runtime.getDeviceCount()).use()
    for name in options.what or (HOST if options.host else SIMULATED):
        Trial(name).run()


if __name__ == "__main__":
    worker.run(main)
