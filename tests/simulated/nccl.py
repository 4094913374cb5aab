"""``nccl.bindings.nccl``, as much as the library uses of it, on the simulated device.

Data goes through a file in /dev/shm, whose name comes from the unique id, in chunks. As NCCL does, it compares nothing:
ranks whose counts differ wait for each other, and ops that differ give wrong bits. Ranks are reduced from the last to
the first, half types in their own type. Calls of a communicator order themselves, captured ones too unless
NCCL_GRAPH_MIXING_SUPPORT is 0. SIM_NCCL_ERROR="rank:operation" lets comm_get_async_error of a rank fail from
that operation on; with SIM_NO_NCCL=1 there is no such module.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import itertools
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from . import machine, machine_streams

_CHUNK = 1 << 18  # bytes of each rank
_LINE = 64
_POLL_SECONDS = 5e-5
ghosts: list[Comm] = []  # communicators that were used after their end: NCCL would access memory that is gone

_TYPES = [np.dtype(name) for name in ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")]
_TYPES.append(np.dtype(ml_dtypes.bfloat16))
_FUNCTIONS = (np.add, np.multiply, np.maximum, np.minimum, np.add)


class Result(enum.IntEnum):
    Success, UnhandledCudaError, SystemError, InternalError, InvalidArgument, InvalidUsage = range(6)
    RemoteError, InProgress = 6, 7


class NCCLError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"{Result(status).name} ({status}): simulated")
        self.status = status


class UniqueId:
    def __init__(self, data: bytes = bytes(128)) -> None:
        self._data = bytes(data)

    @classmethod
    def from_buffer(cls, data: bytes) -> UniqueId:
        assert len(data) == 128
        return cls(data)

    def __bytes__(self) -> bytes:
        return self._data


def get_version() -> int:
    return 23203


def get_unique_id() -> UniqueId:
    return UniqueId(secrets.token_bytes(128))


_Call = tuple[str, tuple[int, ...]]  # a method of Comm, and its arguments
_Ref = Any  # to a node: a graph keeps what its nodes use


class Comm:
    """Words of each rank, a cache line each: joined, bytes of the operation, chunks given, chunks read."""

    def __init__(self, nranks: int, identity: bytes, rank: int) -> None:
        self.context = machine.require()
        self.rank, self.n, self.dead, self.destroyed = rank, nranks, False, False
        self.operations, self.chunks = itertools.count(1), 0
        self.uses: weakref.WeakSet[_Use] = weakref.WeakSet()
        self.event = machine_streams.create_event()
        self.captured: dict[int, tuple[_Ref, _Ref]] = {}  # by capture: the last call's node, and that of its event
        path = f"{os.environ.get('SIM_SHARED', '/dev/shm')}/ipcreduce-sim-nccl-{identity[:16].hex()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        nbytes = nranks * (_LINE + _CHUNK)
        os.ftruncate(descriptor, nbytes)
        self._map = mmap.mmap(descriptor, nbytes)
        os.close(descriptor)
        words = np.frombuffer(self._map, np.uint64, nranks * _LINE // 8).reshape(nranks, -1)
        self._joined, self._bytes, self._given, self._read = words[:, 0], words[:, 1], words[:, 2], words[:, 3]
        self.suspended, self._resumed = False, words[:, 4]
        data = np.frombuffer(self._map, np.uint8, nranks * _CHUNK, nranks * _LINE)
        self._areas = data.reshape(nranks, _CHUNK)
        self._joined[rank] = 1
        if not self._wait(lambda: bool(self._joined.all())) or rank == 0:
            with contextlib.suppress(FileNotFoundError):  # another rank that has given up was quicker
                os.unlink(path)

    def _wait(self, condition: Any) -> bool:
        """True once the condition holds; False if the communicator is aborted before."""
        while not condition():
            if self.dead:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def resume(self) -> None:
        """Waits for all ranks."""
        self._resumed[self.rank] += 1
        mine = int(self._resumed[self.rank])
        if self._wait(lambda: bool((self._resumed >= mine).all())):
            self.suspended = False

    def make_all(self, calls: list[_Call]) -> None:
        """The operations of a group, in a stream's thread. Those that were launched before an abort end by it."""
        if self.destroyed or self.suspended:
            ghosts.append(self)
        for function, arguments in calls:
            if not self.dead:
                getattr(self, function)(*arguments)

    def exchange(self, source: int, nbytes: int, put: Callable[[int, list[np.ndarray]], None]) -> bool:
        """One operation, to which each rank gives so many bytes. ``put`` gets those of all, chunk by chunk."""
        self.last = next(self.operations)
        given = _memory(source, nbytes)
        for begin in range(0, nbytes, _CHUNK):
            part = given[begin : begin + _CHUNK]
            self.chunks += 1
            number = self.chunks
            if not self._wait(lambda number=number: bool((self._read >= number - 1).all())):
                return False
            self._areas[self.rank, : part.nbytes] = part
            self._bytes[self.rank] = nbytes
            self._given[self.rank] = number
            if not self._wait(
                lambda number=number: bool((self._given >= number).all()) and bool((self._bytes == nbytes).all())
            ):
                return False
            parts = [area[: part.nbytes].copy() for area in self._areas]
            self._read[self.rank] = number
            put(begin, parts)
        return True

    def all_reduce(self, source: int, target: int, count: int, kind: int, op: int) -> None:
        self._reduce(source, _memory(target, count * _TYPES[kind].itemsize), kind, op)

    def reduce(self, source: int, target: int, count: int, kind: int, op: int, root: int) -> None:
        nbytes = count * _TYPES[kind].itemsize
        self._reduce(source, _memory(target, nbytes) if self.rank == root else np.empty(nbytes, np.uint8), kind, op)

    def reduce_scatter(self, source: int, target: int, count: int, kind: int, op: int) -> None:
        nbytes = count * _TYPES[kind].itemsize
        whole = np.empty(self.n * nbytes, np.uint8)
        if self._reduce(source, whole, kind, op):
            _memory(target, nbytes)[:] = whole[self.rank * nbytes :][:nbytes]

    def all_gather(self, source: int, target: int, count: int, kind: int) -> None:
        nbytes = count * _TYPES[kind].itemsize
        whole = _memory(target, self.n * nbytes).reshape(self.n, nbytes)

        def put(begin: int, parts: list[np.ndarray]) -> None:
            for row, part in zip(whole, parts, strict=True):
                row[begin : begin + part.nbytes] = part

        self.exchange(source, nbytes, put)

    def broadcast(self, source: int, target: int, count: int, kind: int, root: int) -> None:
        nbytes = count * _TYPES[kind].itemsize

        def put(begin: int, parts: list[np.ndarray]) -> None:
            _memory(target, nbytes)[begin : begin + parts[root].nbytes] = parts[root]

        self.exchange(source if self.rank == root else target, nbytes, put)

    def _reduce(self, source: int, result: np.ndarray, kind: int, op: int) -> bool:
        dtype = _TYPES[kind]

        def put(begin: int, given: list[np.ndarray]) -> None:
            parts = [part.view(dtype) for part in given]
            with np.errstate(all="ignore"):
                total = parts[-1]
                for other in reversed(parts[:-1]):
                    total = _FUNCTIONS[op](total, other).astype(dtype)
                if op == RedOp.Avg:
                    total = _average(total, self.n)
            result[begin : begin + total.nbytes] = total.view(np.uint8)

        return self.exchange(source, result.nbytes, put)


class _Use:
    """Of a communicator, by a call on a stream or in a graph, as long as that lives."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        comm.uses.add(self)


class _Group:
    """The calls of a group on one communicator: a piece of work on a stream, or a node of a graph."""

    def __init__(self, comm: Comm, calls: list[_Call]) -> None:
        self._use, self._calls = _Use(comm), calls

    def launched(self) -> None:
        comm = self._use.comm
        if comm.dead or comm.suspended:
            ghosts.append(comm)

    def __call__(self) -> None:
        self._use.comm.make_all(self._calls)


def _average(total: np.ndarray, n: int) -> np.ndarray:
    if total.dtype.kind in "iu":
        divisor = np.asarray(n, total.dtype)
        down = (total < 0) & (total % divisor != 0)
        return (total // divisor + down).astype(total.dtype)  # toward zero
    return (total / total.dtype.type(n)).astype(total.dtype)


def _memory(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)


class RedOp(enum.IntEnum):
    Sum, Prod, Max, Min, Avg = range(5)


def comm_init_rank(nranks: int, comm_id: UniqueId, rank: int) -> Comm:
    return Comm(nranks, bytes(comm_id), rank)


class _Groups(threading.local):
    """The open groups of a thread, and the calls within them."""

    def __init__(self) -> None:
        self.depth, self.calls = 0, []


_groups = _Groups()


def group_start() -> None:
    _groups.depth += 1


def group_end() -> None:
    """As NCCL does, it puts the calls on their streams only when the outermost group ends."""
    if not _groups.depth:
        raise NCCLError(Result.InvalidUsage)
    _groups.depth -= 1
    if not _groups.depth:
        calls, _groups.calls = _groups.calls, []
        for place in dict.fromkeys(call[-2:] for call in calls):
            _put(*place, [call for call, *there in calls if tuple(there) == place])


def _call(function: str, *given: Any) -> None:
    *arguments, comm, stream = given
    if not isinstance(comm, Comm):
        raise TypeError(f"Cannot convert {type(comm).__name__} to nccl.bindings.nccl.Comm")
    if comm.dead:
        raise NCCLError(Result.InvalidArgument)
    call = function, tuple(arguments)
    if _groups.depth:
        _groups.calls.append((call, comm, int(stream)))
    else:
        _put(comm, int(stream), [call])


all_reduce, reduce, reduce_scatter, all_gather, broadcast = (
    functools.partial(_call, name) for name in ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast")
)


def _put(comm: Comm, handle: int, calls: list[_Call]) -> None:
    """Put the calls of a group on a stream as one piece of work, which an abort ends as a whole."""
    if comm.dead:
        raise NCCLError(Result.InvalidArgument)
    group = _Group(comm, calls)
    capture = machine_streams.find(handle).capture
    if capture is None:
        machine_streams.wait_event(handle, comm.event)
    elif _mixes():
        machine_streams.follow(handle, [_before(comm, capture)])
    machine_streams.submit(handle, group)
    if capture is None:
        machine_streams.record_event(comm.event, handle)
    elif _mixes():
        _, record = comm.captured[capture.identity]
        record().after = frozenset([len(capture.nodes) - 1])
        comm.captured[capture.identity] = weakref.ref(capture.nodes[-1]), record


def _mixes() -> bool:
    return os.environ.get("NCCL_GRAPH_MIXING_SUPPORT", "1") != "0"


def _before(comm: Comm, capture: machine_streams.Capture) -> machine_streams.Node:
    """The node that the next call of a capture follows: the last call, or a wait for those of others."""
    if capture.identity not in comm.captured:
        nodes = machine_streams.event_node(waits_for=comm.event), machine_streams.event_node(records=comm.event)
        capture.nodes += nodes
        comm.captured[capture.identity] = weakref.ref(nodes[0]), weakref.ref(nodes[1])
    return comm.captured[capture.identity][0]()


def comm_suspend(comm: Comm, flags: int) -> None:
    if flags != 1 or comm.dead or comm.suspended:
        raise NCCLError(Result.InvalidArgument)
    comm.suspended = True


def comm_resume(comm: Comm) -> None:
    if comm.dead or not comm.suspended:
        raise NCCLError(Result.InvalidUsage)
    comm.resume()


def comm_get_async_error(comm: Comm) -> int:
    rank, _, operation = os.environ.get("SIM_NCCL_ERROR", "").partition(":")
    failed = rank == str(comm.rank) and getattr(comm, "last", 0) >= int(operation)
    return Result.RemoteError if failed else Result.Success


def comm_abort(comm: Comm) -> None:
    """As NCCL does, it ends the calls at once, and returns when no graph holds one any more."""
    comm.dead = True
    while comm.uses:
        time.sleep(_POLL_SECONDS)


def comm_destroy(comm: Comm) -> None:
    """For a communicator whose calls are over."""
    comm.destroyed = True
    comm_abort(comm)
