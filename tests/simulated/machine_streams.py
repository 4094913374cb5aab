"""Streams, events and captures of the simulated machine.

A stream is an OS thread that works through a queue, made when the first work comes. An event, and all order between
streams, is a fence, which is set when a piece of work and all before it on its stream are done.

Real streams run no Python. So no object may end in a stream's thread, where its finaliser could wait for that very
stream: :func:`collect`, on the way of every driver call, does it for them, and install() turns the collector's own
runs off.
"""

from __future__ import annotations

import gc
import itertools
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from . import machine
from .machine import Context, Fault

Work = Callable[[], Any]
LEGACY, PER_THREAD = 1, 2  # and 0, which is LEGACY
FAILED = 719
LATE = float(os.environ.get("SIM_LATE", "0"))  # seconds, at most, by which each piece of work begins late

_handles = itertools.count(0x51000000, 0x40)
_streams: dict[int, Stream] = {}
_destroyed: set[int] = set()
_events: dict[int, Event] = {}
_captures: list[Capture] = []  # those that are open
_thread = threading.local()
_capture_ids = itertools.count(1)


class Fence:
    """An event without a lock, which would stay taken if Ctrl-C came right behind its acquire()."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[queue.SimpleQueue[None]] = []

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            self._waiting.pop().put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        """Wait until it is set."""
        if not self._is_set:
            waiting: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._waiting.append(waiting)
            if not self._is_set:  # or set() may not have seen it
                waiting.get()


@dataclass(eq=False)
class Stream:
    """``blocking`` ones and the context's legacy stream wait for each other."""

    context: Context
    handle: int
    blocking: bool = True
    done: Fence | None = None  # the fence of the last work
    queue: queue.SimpleQueue[Any] | None = None
    capture: Capture | None = None
    frontier: frozenset[int] = frozenset()  # of the capture: the nodes that the next one follows
    waits: int = 0  # for events, since the last node
    awaited: Fence | None = None  # the last fence of another stream that its thread has come to

    def put(self, work: Work | None, fences: Iterable[Fence]) -> Fence:
        if self.queue is None:
            self.queue = queue.SimpleQueue()
            threading.Thread(target=self._run, args=[self.queue], daemon=True, name=f"stream {self.handle:#x}").start()
        self.done = Fence()
        self.queue.put((work, list(fences), self.done))
        return self.done

    def waits_or_ends(self) -> Callable[[], bool]:
        """A condition for tests: what comes next on the stream waits for another one, or is over."""
        before = self.done

        def condition() -> bool:
            done, awaited = self.done, self.awaited
            waits = awaited is not None and not awaited.is_set()
            return waits or (done is not before and done is not None and done.is_set())

        return condition

    def _run(self, items: queue.SimpleQueue[Any]) -> None:
        while (item := items.get()) is not None:
            work, fences, done = item
            for fence in fences:
                self.awaited = fence
                fence.wait()
            if work is not None and LATE:
                time.sleep(random.random() * LATE)
            try:
                if work is not None and not self.context.error:
                    work()
            except Exception:  # as a kernel that failed: nothing works in this context any more
                traceback.print_exc(file=sys.stderr)
                self.context.error = FAILED
            _finished.append((done, work))
            item = work = None  # before done says that collect() may drop the last reference
            done.set()


@dataclass(eq=False)
class Event:
    context: Context
    fence: Fence | None = None
    captured: tuple[Capture, frozenset[int]] | None = None


@dataclass(eq=False)
class Node:
    """What a graph holds. ``after``: the nodes that it follows; ``waits``: by so many events too."""

    work: Work | None
    after: frozenset[int]
    waits: int = 0
    waits_for: Event | None = None  # at each launch, for its last record before that
    records: Event | None = None


class Nodes(list[Node]):
    """A graph."""


@dataclass(eq=False)
class Capture:
    identity: int
    origin: Stream
    mode: str  # "global", "thread_local", "relaxed"
    thread: int
    nodes: Nodes = field(default_factory=Nodes)
    streams: set[Stream] = field(default_factory=set)
    valid: bool = True


_COLLECT_EVERY = 500  # driver calls; each of them once a test has set the collector's threshold to 1
_finished: deque[tuple[Fence, Work | None]] = deque()
_collecting = threading.Lock()
_calls = itertools.count()


def collect() -> None:
    """Lets go of what finished work has used, and now and then of cycles."""
    if _collecting.acquire(blocking=False):  # one thread at a time: another one would take what has not finished
        try:
            while _finished and _finished[0][0].is_set():
                _finished.popleft()
        finally:
            _collecting.release()
    number = next(_calls)
    if number % _COLLECT_EVERY == 0 or gc.get_threshold()[0] == 1:
        gc.collect()
    if number == 0:  # modules: no later collection looks at them again, which would take most of its time
        gc.freeze()


def create(blocking: bool = True) -> int:
    context = machine.require()
    with machine.lock:
        handle = next(_handles)
        _streams[handle] = context.streams[handle] = Stream(context, handle, blocking)
        return handle


def destroy(handle: int) -> None:
    """Work that is queued still runs. Needs no context."""
    with machine.lock:
        stream = _streams.pop(handle, None)
        if stream is None:
            raise Fault(400)
        _destroyed.add(handle)
        del stream.context.streams[handle]
        if stream.queue is not None:
            stream.queue.put(None)


def find(handle: int) -> Stream:
    """:raises Fault: for a handle that never was one. For one that was destroyed the driver crashes, and so do we."""
    context = machine.require()
    if handle in _destroyed:
        traceback.print_stack()
        print(f"simulated SIGSEGV: stream {handle:#x} has been destroyed", file=sys.stderr, flush=True)
        os._exit(139)
    if handle > PER_THREAD:
        if handle not in _streams:
            raise Fault(400)
        return _streams[handle]
    key: Any = LEGACY if handle != PER_THREAD else (PER_THREAD, threading.get_ident())
    with machine.lock:
        return context.streams.setdefault(key, Stream(context, handle or LEGACY))


def _is_legacy(stream: Stream) -> bool:
    return stream.handle == LEGACY


def _blocking(context: Context) -> list[Stream]:
    return [stream for stream in context.streams.values() if stream.blocking and not _is_legacy(stream)]


def submit(handle: int, work: Work | None, fences: Iterable[Fence] = ()) -> Fence | None:
    """Queues work on a stream, or records it if the stream captures; the fence after it, or None.

    Work with a method ``launched()`` is told of each launch, also as a part of a graph.
    """
    with machine.lock:
        stream = find(handle)
        if stream.capture is not None:
            capture = _valid(stream.capture)
            if work is not None:
                capture.nodes.append(Node(work, stream.frontier, stream.waits))
                stream.frontier, stream.waits = frozenset([len(capture.nodes) - 1]), 0
            return None
        _refuse_implicit(stream)
        if hasattr(work, "launched"):
            work.launched()
        legacy = stream.context.streams.get(LEGACY)
        others = _blocking(stream.context) if _is_legacy(stream) else [legacy] if stream.blocking and legacy else []
        return stream.put(work, [*fences, *(other.done for other in others if other.done is not None)])


def synchronize(handle: int) -> None:
    stream = find(handle)
    refuse_while_capturing()
    _refuse_unsafe(stream.context, [stream])
    fence = submit(handle, None) if _is_legacy(stream) else stream.done
    if fence is not None:
        fence.wait()
    collect()
    machine.require()


def synchronize_context() -> None:
    context = machine.require()
    with machine.lock:
        streams = list(context.streams.values())
    _refuse_unsafe(context, streams)
    for stream in streams:
        if stream.done is not None:
            stream.done.wait()
    collect()
    machine.require()


def wait_for_all() -> None:
    """As several calls do on their way, which leaves captures alone."""
    for stream in list(machine.require().streams.values()):
        if stream.done is not None:
            stream.done.wait()
    collect()
    machine.require()


def is_idle(handle: int) -> bool:
    stream = find(handle)
    refuse_while_capturing()
    _refuse_unsafe(stream.context, [stream])
    return stream.done is None or stream.done.is_set()


# ---- events
def create_event() -> int:
    context = machine.require()
    with machine.lock:
        handle = next(_handles)
        _events[handle] = Event(context)
        return handle


def _event(handle: int) -> Event:
    machine.require()
    if handle not in _events:
        raise Fault(400)
    return _events[handle]


def close_event(handle: int) -> None:
    _event(handle)
    del _events[handle]


def drop_event(handle: int) -> None:
    """Destroys it in any thread, whatever is current there."""
    _events.pop(handle, None)


def synchronize_event(handle: int) -> None:
    fence = _fence(handle)
    if fence is not None:
        fence.wait()
    collect()


def is_over(handle: int) -> bool:
    fence = _fence(handle)
    return fence is None or fence.is_set()


def _fence(handle: int) -> Fence | None:
    event = _event(handle)
    refuse_while_capturing()
    if event.captured is not None:
        raise Fault(907)
    return event.fence


def record_event(handle: int, stream_handle: int) -> None:
    with machine.lock:
        event, stream = _event(handle), find(stream_handle)
        if event.context is not stream.context:
            raise Fault(400)
        fence = submit(stream_handle, None)
        event.fence = fence
        event.captured = (stream.capture, stream.frontier) if stream.capture is not None else None


def wait_event(stream_handle: int, handle: int) -> None:
    with machine.lock:
        event, stream = _event(handle), find(stream_handle)
        if event.captured is not None:
            capture, frontier = event.captured
            if capture not in _captures or _is_legacy(stream):
                raise Fault(907 if capture not in _captures else 906)
            _valid(capture)
            if stream.capture not in (None, capture):
                raise _invalidated(stream.capture, 905)
            stream.capture = capture  # which the stream joins, if it is not in it
            stream.frontier |= frontier
            stream.waits += 1
            capture.streams.add(stream)
        elif stream.capture is not None:
            if event.fence is not None:
                raise _invalidated(stream.capture, 905)
        else:
            submit(stream_handle, None, [event.fence] if event.fence is not None else [])


def event_node(waits_for: int = 0, records: int = 0) -> Node:
    """A node that follows none so far."""
    return Node(
        None,
        frozenset(),
        waits_for=_event(waits_for) if waits_for else None,
        records=_event(records) if records else None,
    )


def follow(handle: int, nodes: Iterable[Node]) -> None:
    """The next node captured on the stream follows these too."""
    with machine.lock:
        stream = find(handle)
        if stream.capture is None:
            raise Fault(1)
        stream.frontier |= {_valid(stream.capture).nodes.index(node) for node in nodes}


# ---- captures
def begin_capture(handle: int, mode: str = "relaxed") -> None:
    with machine.lock:
        stream = find(handle)
        if _is_legacy(stream):
            raise Fault(900)
        if stream.capture is not None:
            raise Fault(401)
        stream.capture = Capture(next(_capture_ids), stream, mode, threading.get_ident(), streams={stream})
        stream.frontier = frozenset()
        _captures.append(stream.capture)


def end_capture(handle: int) -> Nodes:
    """The graph: its nodes, each after those that it follows."""
    with machine.lock:
        stream = find(handle)
        capture = stream.capture
        if capture is None or capture.origin is not stream:
            raise Fault(401)
        joined = set(stream.frontier)
        for index in range(len(capture.nodes) - 1, -1, -1):
            if index in joined:
                joined |= capture.nodes[index].after
        unjoined = any(not member.frontier <= joined for member in capture.streams)
        for member in capture.streams:
            member.capture, member.frontier, member.waits = None, frozenset(), 0
        _captures.remove(capture)
        if not capture.valid or unjoined:
            raise Fault(904 if capture.valid else 901)
        return capture.nodes


def capture_id(handle: int) -> int:
    """Of the capture that the stream is part of; 0 if it is in none, or in one that has failed."""
    with machine.lock:
        stream = find(handle)
        if stream.capture is None:
            _refuse_implicit(stream, invalidate=False)
            return 0
        return stream.capture.identity if stream.capture.valid else 0


def launch(graph: Nodes, handle: int) -> None:
    """Runs the nodes of a graph, in their order. Not in a capture, which that ends."""
    with machine.lock:
        capture = find(handle).capture
        if capture is not None:
            raise _invalidated(capture, 900)
        before = {node.waits_for: node.waits_for.fence for node in graph if node.waits_for is not None}
        for node in graph:
            awaited = before[node.waits_for] if node.waits_for is not None else None
            fence = submit(handle, node.work, [awaited] if awaited is not None else [])
            if node.records is not None:
                node.records.fence, node.records.captured = fence, None


def in_some_order(nodes: Nodes) -> Nodes:
    """The nodes of an executable: in any order that the edges allow, so that an edge which is missing shows."""
    left, order = dict(enumerate(nodes)), Nodes()
    while left:
        index = random.choice([index for index, node in left.items() if not node.after & left.keys()])
        order.append(replace(left.pop(index)))
    return order


def without_events(nodes: Nodes) -> list[Node]:
    """The nodes that work, each after those that it follows, directly or through nodes of events."""
    numbers = {index: number for number, index in enumerate(i for i, node in enumerate(nodes) if node.work is not None)}

    def followed(node: Node) -> frozenset[int]:
        return frozenset().union(*({numbers[i]} if i in numbers else followed(nodes[i]) for i in node.after))

    return [replace(nodes[index], after=followed(nodes[index])) for index in numbers]


@contextmanager
def relaxed() -> Iterator[None]:
    """This thread's calls are not refused, whoever captures: cuThreadExchangeStreamCaptureMode."""
    previous, _thread.relaxed = getattr(_thread, "relaxed", False), True
    try:
        yield
    finally:
        _thread.relaxed = previous


def refuse_while_capturing() -> None:
    """For calls that a capture in a mode other than relaxed does not bear: those that wait, allocate or free."""
    machine.require()
    if getattr(_thread, "relaxed", False):
        return
    with machine.lock:
        for capture in _captures:
            if capture.mode == "global" or (capture.mode == "thread_local" and capture.thread == threading.get_ident()):
                raise _invalidated(capture, 900)


def _valid(capture: Capture) -> Capture:
    if not capture.valid:
        raise Fault(901)
    return capture


def _invalidated(capture: Capture | None, code: int) -> Fault:
    assert capture is not None
    capture.valid = False
    return Fault(code)


def _refuse_implicit(stream: Stream, invalidate: bool = True) -> None:
    """The legacy stream would have to wait for blocking streams, which it cannot while one of them captures."""
    for other in _blocking(stream.context) if _is_legacy(stream) else []:
        if other.capture is not None:
            raise _invalidated(other.capture, 906) if invalidate else Fault(906)


def _refuse_unsafe(context: Context, streams: list[Stream]) -> None:
    """Nobody can wait for work that is only recorded."""
    with machine.lock:
        for stream in streams:
            if stream.capture is not None:
                raise _invalidated(stream.capture, 900)
            _refuse_implicit(stream)
