"""File descriptors handed over between the ranks of one host, which then have the same memory open.

Each rank has a Unix socket for datagrams, with a name of 128 random bits that no file system shows and that ends with
its process. A message counts only if the kernel says that it is of this user and of the process that the rank has
told. A message lies in the receiver's queue as soon as it is sent. So once all ranks have voted that they have sent,
each finds all descriptors there, and waits for nobody.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ..errors import UnsupportedError
from ..originals import Socket
from . import exchange
from .exchange import Channel, Kind

_PLACE = exchange.struct(Kind.DESCRIPTOR, ("socket", "S64"), ("pid", "<u4"), ("nbytes", "<u8"))
_RANK = struct.Struct("<I")  # all that a message says beside its descriptor
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid: struct ucred
MOST = 32  # descriptors of a rank at a time: a process may have only 1,024 files open
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * MOST)
_MOST_MESSAGES = 1000  # that are looked at: whoever sends without end keeps no rank


class Mailbox:
    """A socket at which this rank gets descriptors from each peer. :raises OSError: if there is none to be had."""

    def __init__(self) -> None:
        self.name = f"ipcreduce-{secrets.token_hex(16)}"
        self._socket = Socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # each message says who sent it
            self._socket.setblocking(False)
            self._socket.bind(_address(self.name))
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close the socket, and with it all descriptors that nobody has received."""
        self._socket.close()

    def send(self, name: str, rank: int, *descriptors: int) -> None:
        """Send descriptors to the mailbox of another process. The caller keeps its own, and may close them.

        :param rank: this process's one. :raises OSError: if the mailbox is gone, or full.
        """
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)
        self._socket.sendmsg([_RANK.pack(rank)], [rights], 0, _address(name))

    def receive(self, pids: Mapping[int, int], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Take out each peer's descriptors, by rank, which the caller closes. All of them must have been sent.

        :param pids: the peers' processes, by rank. Descriptors from any other process are closed.
        :param counts: how many each of them has sent at once.
        :raises UnsupportedError: if a rank's are not there. :raises OSError: if this process can open no further file.
        """
        found: dict[int, list[int]] = {}
        try:
            for _ in range(_MOST_MESSAGES):
                if len(found) == len(pids):
                    return found
                self._receive_one(pids, counts, found)
            raise BlockingIOError
        except BaseException as error:
            for descriptors in found.values():
                for descriptor in descriptors:
                    os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            missing = min(pids.keys() - found.keys())
            raise UnsupportedError(
                f"no descriptor has come from rank {missing}, process {pids[missing]}: the ranks see each other's "
                "processes only in one PID namespace and as one user"
            ) from None

    def _receive_one(self, pids: Mapping[int, int], counts: Mapping[int, int], found: dict[int, list[int]]) -> None:
        data, parts, flags, _ = self._socket.recvmsg(_RANK.size, _ROOM, socket.MSG_CMSG_CLOEXEC)
        pid, uid, descriptors = _contents(parts)
        try:
            rank = int(_RANK.unpack(data)[0]) if len(data) == _RANK.size else -1
            if uid != os.getuid() or pids.get(rank) != pid or rank in found:
                return
            if flags & socket.MSG_CTRUNC and len(descriptors) < counts[rank]:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if len(descriptors) == counts[rank]:
                found[rank], descriptors = descriptors, []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _address(name: str) -> bytes:
    return b"\0" + name.encode()


def _contents(parts: list[tuple[int, int, bytes]]) -> tuple[int, int, list[int]]:
    """(pid, uid, descriptors) of a message. -1 for a pid or a uid that the kernel does not tell."""
    pid, uid, descriptors = -1, -1, array.array("i")
    for level, kind, data in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _CREDENTIALS.size:
            pid, uid, _ = _CREDENTIALS.unpack(data)
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) // 4 * 4])
    return pid, uid, descriptors.tolist()


@contextmanager
def handed_over(
    ranks: Channel, export: Callable[[], int], nbytes: int, deadline: float, what: str
) -> Iterator[list[int]]:  # fmt: skip
    """Give every rank's descriptor to every rank, for a block: a list by rank. Collective.

    :param export: makes this rank's descriptor. See :func:`several_handed_over` for the rest.
    """
    with several_handed_over(ranks, [export], [1] * ranks.size, nbytes, deadline, what) as found:
        yield [one for [one] in found]


@contextmanager
def several_handed_over(
    ranks: Channel, exports: Sequence[Callable[[], int]], counts: Sequence[int], nbytes: int, deadline: float, what: str
) -> Iterator[list[list[int]]]:  # fmt: skip
    """Give every rank's descriptors to every rank, for a block: a list of them by rank. Collective.

    All descriptors, those that ``exports`` have made among them, are closed at the end of the block.

    :param exports: each makes one of this rank's descriptors. There are at most :data:`MOST`.
    :param counts: how many each rank has.
    :param nbytes: the size of the memory behind them, which must be the same on every rank.
    :param what: what the descriptors stand for, in messages.
    :raises Agreed: on every rank, if one of them cannot take part. :raises IpcReduceError: see ``exchange.allgather``.
    """
    mailbox: Mailbox | None = None
    own: list[int] = []
    with ExitStack() as held:

        def make() -> dict[str, Any]:
            nonlocal mailbox
            for export in exports:
                own.append(export())
                held.callback(_close, own[-1])
            mailbox = Mailbox()
            held.callback(mailbox.close)
            return {"socket": mailbox.name, "pid": os.getpid(), "nbytes": nbytes}

        places = exchange.share(ranks, _PLACE, make, deadline, f"exporting {what}")
        assert mailbox is not None
        pids = {rank: int(place["pid"]) for rank, place in enumerate(places) if rank != ranks.rank}
        with exchange.step(ranks, deadline, f"sending {what}"):
            if (places["nbytes"] != nbytes).any():
                raise UnsupportedError(f"{what} differ in size: {places['nbytes'].tolist()} bytes")
            for rank in pids if own else ():
                mailbox.send(bytes(places[rank]["socket"]).decode(), ranks.rank, *own)
        with exchange.step(ranks, deadline, f"receiving {what}"):
            sent = {rank: count for rank, count in enumerate(counts) if count and rank != ranks.rank}
            found = mailbox.receive({rank: pids[rank] for rank in sent}, sent)
            for descriptors in found.values():
                for descriptor in descriptors:
                    held.callback(_close, descriptor)
        yield [own if rank == ranks.rank else found.get(rank, []) for rank in range(ranks.size)]


def _close(descriptor: int) -> None:
    with suppress(OSError):  # an error that is told may not hide another one
        os.close(descriptor)
