"""One rank that runs programs: it knows every rank's data, and with them every result beforehand."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import ipcreduce
from ipcreduce import Communicator, Graph
from ipcreduce.page import comparison
from tests.fuzz import bodies, deaths, faults, splits, suspends
from tests.fuzz.bodies import Wrong, expect_error
from tests.fuzz.job import Pipes
from tests.fuzz.programs import STREAMS, Step
from tests.shared import norms, reference
from tests.shared.bounds import HANG

TIMEOUT_SECONDS = HANG
_PENDING = 30  # results that are not looked at yet
# A rank that finds a mismatch first waits for its earlier calls. The watchdogs of other ranks wait only 1 s, and end
# those calls then: on a busy machine that is too soon, and their results would be missing.
_PATIENCE_SECONDS = 10.0


class Player:
    """The state of a program on this rank."""

    def __init__(self, group: Pipes, simulated: bool) -> None:
        self.group, self.rank, self.size, self.simulated = group, group.rank, group.size, simulated
        self.gpu().use()
        self.streams: list[Any] = [cupy.cuda.Stream.null]
        self.streams += [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS - 1)]
        self.comms: dict[int, Any] = {0: self.new_communicator()}
        self.graphs: dict[tuple[int, int], bodies.Recorded] = {}
        self.captures: dict[tuple[int, int], bodies.Recorded] = {}
        self.pending: list[tuple[str, Any, np.ndarray[Any, Any], Any]] = []
        self.uses: dict[int, Any] = {}  # the event behind the last work on graphs' arrays, by stream
        self.text = ""

    def gpu(self) -> Any:
        """This rank's GPU."""
        return cupy.cuda.Device(self.rank % cupy.cuda.runtime.getDeviceCount())

    def new_communicator(
        self, algorithm: str | None = None, timeout: float = TIMEOUT_SECONDS, memory: str = "vmm"
    ) -> Any:  # fmt: skip
        os.environ["IPCREDUCE_MEMORY"] = memory
        return Communicator(self.group, timeout=timeout, algorithm=algorithm)

    # ---- a program
    def run(self, steps: Sequence[Step]) -> None:
        """All steps, and the end of what they have made. :raises Wrong: if something is not as it has to be."""
        for index, step in enumerate(steps):
            self.text = f"step {index} ({step['kind']})"
            time.sleep(step.get("late", {}).get(str(self.rank), 0))
            self.act(step)
        self.text = "the end of the program"
        self.check()
        self.comms[0].synchronize()
        for recordings in (self.graphs, self.captures):
            for key in list(recordings):
                self.let_go(recordings, key)
        for slot in [slot for slot in self.comms if slot]:
            self.comms.pop(slot).close()
        self.meet("end")

    def act(self, step: Step) -> None:
        comm = self.comms.get(step["slot"])
        if step["kind"] == "death":
            self.check()
            deaths.run(self, step)
        elif step["kind"] in ("new", "close"):
            self.replace(step)
        elif comm is None:  # a communicator that this program has not made
            return
        elif step["kind"] in faults.STEPS:
            self.check()  # packets that are later than the kernels' grace would be missing in what came before
            faults.STEPS[step["kind"]](self, comm, step)
        elif step["kind"] == "suspend":
            suspends.suspend(self, comm, step)
        elif step["kind"] == "split":
            splits.split(self, comm, step)
        else:
            getattr(self, "do_" + step["kind"].replace(" ", "_"))(comm, step)

    def meet(self, word: object) -> list[Any]:
        """Every rank's word."""
        return [json.loads(one) for one in self.group.allgather(json.dumps(word).encode())]

    def later(self, array: Any, expected: np.ndarray[Any, Any], stream: Any) -> None:
        """Look at an array at some later time, when the stream has come to it."""
        self.pending.append((self.text, array, expected, stream))
        if len(self.pending) > _PENDING:
            self.check()

    def check(self) -> None:
        """:raises Wrong: if a result so far is not as expected."""
        pending, self.pending = self.pending, []
        for text, array, expected, stream in pending:
            with stream:
                found = cupy.asnumpy(array)
            if found.dtype != expected.dtype and found.dtype.itemsize == expected.dtype.itemsize:
                found = found.view(expected.dtype)  # bfloat16 as CuPy shows it
            if not reference.same(found, expected):
                at = np.flatnonzero((found != expected).reshape(-1))[:4]
                raise Wrong(
                    f"the result of {text} at {at}: found {found.reshape(-1)[at]}, expected {expected.reshape(-1)[at]}"
                )

    def held(self) -> dict[str, int]:
        """The resources that this process has with one communicator, which has made one call."""
        self.lose(0)
        self.comms[0] = self.new_communicator()
        self.comms[0].allreduce(faults.ones(3))
        for _ in range(2):  # a graph's finaliser lets go of more
            gc.collect()
        self.comms[0].synchronize()
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        self.meet("freed")
        self.comms[0].synchronize()  # memory that peers had mapped goes now
        maps = Path("/proc/self/maps").read_text()
        counts = {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "mapped pages": maps.count("/dev/shm/ipcreduce-"),
            "mapped files": sum("/" in line and ".so" not in line for line in maps.splitlines()),
            "host KB": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024,
        }
        if self.simulated:
            from tests.simulated import driver

            return counts | {f"the driver's {kind}": count for kind, count in driver.leaks().items()}
        free, total = cupy.cuda.runtime.memGetInfo()
        return counts | {"GPU KB": (total - free) // 1024}

    # ---- steps without faults
    def do_check(self, comm: Any, step: Step) -> None:
        comm.synchronize()
        self.check()

    def replace(self, step: Step) -> None:
        """Close a communicator, and make another if the step says so."""
        slot = step["slot"]
        if slot == 0 and step["kind"] == "new":
            slot = 1
        if slot in self.comms:
            self.lose(slot)
        if step["kind"] == "new" or slot == 0:
            self.comms[slot] = self.new_communicator(step.get("algorithm"), memory=step.get("memory", "vmm"))

    def lose(self, slot: int) -> None:
        """Close a communicator; its graphs must say so from now on."""
        self.comms.pop(slot).close()
        for key in [key for key in self.graphs if key[0] == slot]:
            graph = self.let_go(self.graphs, key).graph
            expect_error(self.text, [ipcreduce.ArgumentError], "the communicator is closed", graph.replay)
        for key in [key for key in self.captures if key[0] == slot]:
            self.let_go(self.captures, key)

    def do_reduce(self, comm: Any, step: Step) -> None:
        dtype, op = bodies.dtype_of(step["dtype"]), step["op"]
        draws = bodies.draws(step, self.size, dtype, reference.is_float(dtype) and step["special"])
        stream = self.streams[step["stream"]]
        with stream:
            source = bodies.on_device(draws[self.rank], step["layout"])
            out, result = bodies.output(source, step["out"], comm)
            if step["by"] != "stream":
                call = comm.allreduce if step["by"] == "method" else _by_function(comm)
                returned = call(source, op, out=out)
        if step["by"] == "stream":
            returned = comm.allreduce(source, op, out=out, stream=stream)
        if out is not None and returned is not out:
            raise Wrong(f"{self.text}: out= was not returned")
        self.later(returned if result is None else result, reference.wrapping(draws, op), stream)

    def do_reduce_list(self, comm: Any, step: Step) -> None:
        """One call on a list, and the same again: it is cached then."""
        op, drawn = step["op"], []
        for index, (name, count, _) in enumerate(step["members"]):
            one, dtype = {"count": count, "seed": step["seed"] + index}, bodies.dtype_of(name)
            drawn.append(bodies.draws(one, self.size, dtype, reference.is_float(dtype) and step["special"]))
        stream = self.streams[step["stream"]]
        for turn in range(step["calls"]):
            with stream:
                layouts = [layout for *_, layout in step["members"]]
                pairs = zip(drawn, layouts, strict=True)
                sources = [bodies.on_device(values[self.rank], layout) for values, layout in pairs]
                outs = [bodies.output(one, step["out"], comm) for one in sources]
                out = None if step["out"] == "new" else [
                    source if given is None else given for source, (given, _) in zip(sources, outs, strict=True)
                ]  # fmt: skip
                call = comm.allreduce if step["by"] == "method" else _by_function(comm)
                if step["by"] != "stream":
                    returned = call(sources if turn else tuple(sources), op, out=out)
            if step["by"] == "stream":
                returned = comm.allreduce(sources, op, out=out, stream=stream)
            if out is not None and returned is not out:
                raise Wrong(f"{self.text}: out= was not returned")
            for (_, result), one, values in zip(outs, returned, drawn, strict=True):
                self.later(one if result is None else result, reference.wrapping(values, op), stream)

    def do_reduce_norm(self, comm: Any, step: Step) -> None:
        """One call with RMSNorm, and the same again in place, on the same arrays: it is cached then."""
        hidden, scales, dtype = step["hidden"], step["scales"], bodies.dtype_of(step["dtype"])
        form = step["count"] // hidden, hidden
        draws = bodies.draws(step, self.size, dtype, step["special"])
        (row,) = bodies.draws({"count": hidden, "seed": step["seed"] + 1}, 1, dtype, False)
        (added,) = bodies.draws(step | {"seed": step["seed"] + 2}, 1, dtype, False)
        with np.errstate(all="ignore"):
            right = norms.results(
                reference.reduce(draws, "sum").reshape(form), added.reshape(form) if step["residual"] else None, row,
                eps=1e-5, scales=scales, given=0.5,
            )  # fmt: skip
        stream = self.streams[step["stream"]]
        with stream:
            x, residual = (
                bodies.on_device(flat, step["layout"]).reshape(form) if step["layout"] != "strided"
                else bodies.on_device(flat.reshape(form)[:, ::-1].copy(), "plain")[:, ::-1]
                for flat in (draws[self.rank], added)
            )  # fmt: skip
            scale = cupy.full((1,), 0.5, np.float32)
            options: dict[str, Any] = {"quantize": None}
            if scales:
                per = {"token": "token", "group": 128}.get(scales)
                options["quantize"] = ipcreduce.FP8(None if per else scale, per)
            if step["in_place"]:
                options |= {"out": x} | ({"residual_out": residual} if step["residual"] else {})
            weight, sources = cupy.asarray(row), (x.copy(), residual.copy())
            for _ in range(step["calls"]):
                x[...], residual[...] = sources
                given = residual if step["residual"] else None
                found = comm.allreduce_rmsnorm(x, weight, 1e-5, residual=given, **options)
                results = {"residual_out": found[-1]} | ({"quantised": found[0].view(np.uint8)} if scales else {})
                if not scales or step["in_place"]:
                    results["y"] = x if step["in_place"] else found[0]
                if right.scales is not None:
                    results["scales"] = found[1]
                for name, result in results.items():
                    self.later(result.copy(), getattr(right, name), stream)

    def do_threads(self, comm: Any, step: Step) -> None:
        """Calls of two communicators from two threads, each on a stream of its own.

        Every rank launches them in one order: in two orders they may wait for each other, as README says.
        """
        if {0, 1} <= self.comms.keys():
            turns = threading.Semaphore(1), threading.Semaphore(0)
            found: list[Any] = []
            threads = [
                threading.Thread(target=self._in_thread, args=(slot, step["calls"], turns, found), daemon=True)
                for slot in (0, 1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_SECONDS)
            if len(found) != 2 or found != [None, None]:
                raise Wrong(f"{self.text}: {found}")

    def _in_thread(self, slot: int, calls: int, turns: Sequence[threading.Semaphore], found: list[Any]) -> None:
        try:
            with self.gpu(), self.streams[slot + 1]:
                for turn in range(calls):
                    if not turns[slot].acquire(timeout=TIMEOUT_SECONDS):
                        raise Wrong("the other thread did not make its call")
                    result = self.comms[slot].allreduce(cupy.full((100 + turn,), self.rank + turn, np.int32))
                    turns[1 - slot].release()
                    total = sum(rank + turn for rank in range(self.size))
                    if not (cupy.asnumpy(result) == total).all():
                        raise Wrong(f"in a thread: {cupy.asnumpy(result)[:4]}, expected {total}")
            found.append(None)
        except BaseException as error:
            found.append(f"{type(error).__name__}: {error}")

    # ---- graphs
    def do_record(self, comm: Any, step: Step) -> None:
        key = step["slot"], step["graph"]
        self.let_go(self.graphs, key)
        others = [one.graph for (slot, _), one in sorted(self.graphs.items()) if slot == key[0]]
        pool = others[0].pool if step["shares"] and others else None
        graph = Graph(comm, pool=pool, check=step["check"], breaks=step["breaks"])
        stream = self.streams[step["stream"]]
        with stream, comm.capture() if step["within_capture"] else contextlib.nullcontext():
            recorded = bodies.Recorded(graph, step, self)
            self.follow(stream)
            recorded.fill(step["seed"])
            with graph.record():
                recorded.trace(comm, breaks=True)
        recorded.expect(self, stream)
        self.graphs[key] = recorded

    def do_replay(self, comm: Any, step: Step) -> None:
        recorded = self.graphs.get((step["slot"], step["graph"]))
        if recorded is not None:
            self.play(recorded, step, recorded.graph.replay)

    def play(self, recorded: bodies.Recorded, step: Step, launch: Callable[[], object]) -> None:
        stream = self.streams[step["stream"]]
        for turn in range(step["times"]):
            with stream:
                self.follow(stream)
                recorded.fill(step["seed"] + turn)
                launch()
            recorded.expect(self, stream)

    def used(self, stream: Any) -> None:
        """Note a stream's work so far on a graph's arrays, such as a copy of its output."""
        event = self.uses[id(stream)] = cupy.cuda.Event()
        event.record(stream)

    def follow(self, stream: Any) -> None:
        """Order a stream behind all that work: graphs may share a pool, and write over each other's outputs."""
        for event in self.uses.values():
            stream.wait_event(event)

    def let_go(self, recordings: dict[tuple[int, int], bodies.Recorded], key: tuple[int, int]) -> Any:
        """Take one out of ``recordings``, if it is there. Its memory is used again behind all work on it."""
        recorded = recordings.pop(key, None)
        if recorded is not None:
            self.follow(recorded.stream)
        return recorded

    def do_close_graph(self, comm: Any, step: Step) -> None:
        recorded = self.let_go(self.graphs, (step["slot"], step["graph"]))
        if recorded is not None and not step["dropped"]:
            recorded.graph.close()
            expect_error(self.text, [ipcreduce.GraphStateError], "closed", recorded.graph.replay)
            faults.settle(self, step["slot"])  # it is a refused call

    def do_capture(self, comm: Any, step: Step) -> None:
        """A graph of CuPy's own capture."""
        stream = self.streams[step["stream"] or 1]
        self.let_go(self.captures, (step["slot"], step["graph"]))
        comm.synchronize(stream)
        with stream:
            recorded = bodies.Recorded(None, step, self)
            recorded.fill(step["seed"])
            recorded.output = cupy.zeros(recorded.source.shape, recorded.source.dtype)
            stream.begin_capture()
            try:
                recorded.trace(comm, breaks=False, into=recorded.output)
            finally:
                recorded.graph = stream.end_capture()
        self.used(stream)
        self.captures[step["slot"], step["graph"]] = recorded

    def do_launch(self, comm: Any, step: Step) -> None:
        recorded = self.captures.get((step["slot"], step["graph"]))
        if recorded is not None:
            stream = self.streams[step["stream"]]
            self.play(recorded, step, lambda: recorded.graph.launch(stream))


def _by_function(comm: Any) -> Callable[..., Any]:
    return lambda source, op, out: ipcreduce.allreduce(source, op, out=out, comm=comm)


def live(group: Pipes, end: socket.socket, simulated: bool) -> None:
    """Run the programs that come, and answer each by a line, until no more come."""
    logging.getLogger("ipcreduce").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    comparison._PATIENCE_SECONDS = _PATIENCE_SECONDS
    with end.makefile("r") as programs:
        player = Player(group, simulated)
        for line in programs:
            task = json.loads(line)
            notes: dict[str, Any] = {"rank": group.rank, "wrong": ""}
            try:
                player.run(task["steps"])
                if task["measured"]:
                    notes["held"] = player.held()
            except deaths.Heard as heard:
                notes |= heard.notes
            except BaseException as error:
                notes["wrong"] = f"{player.text}: {error!r}\n{''.join(traceback.format_exception(error))[-3000:]}"
            end.sendall(json.dumps(notes).encode() + b"\n")
            if notes["wrong"] or task["steps"][-1]["kind"] == "death":
                return
            if task["number"] % 50 == 0:
                gc.collect()
        for comm in player.comms.values():
            comm.close()
