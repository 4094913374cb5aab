"""File descriptors handed over between the ranks of one host, which then have the same memory open.

Each rank has a Unix socket for datagrams for every other rank, with a name of 128 random bits that no file system shows
and that ends with its process. Other users can read the names, and send there until the sockets of two ranks are
connected to each other. Then the kernel refuses everybody else, and what strangers have sent keeps nothing out. A
message counts only if the kernel says that it is of this user and of the process that the rank has told. A message lies
in the receiver's queue as soon as it is sent. So once all ranks have voted that they have sent, each finds all
descriptors there, and waits for nobody.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ..errors import UnsupportedError
from ..interrupts import uninterrupted
from ..originals import Socket
from ..page.owned import Owned
from . import exchange
from .exchange import Channel, Kind

_PLACE = exchange.struct(Kind.DESCRIPTOR, ("socket", "S64"), ("pid", "<u4"), ("nbytes", "<u8"))
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid: struct ucred
MAX_DESCRIPTORS = 32  # descriptors of a rank at a time: a process may have only 1,024 files open
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)


class Mailbox:
    """A socket at which this rank gets descriptors from one peer, and sends it some. :raises OSError: if it cannot be.

    :param name: of the socket, and of the one that the peer has for this rank.
    """

    def __init__(self, name: str) -> None:
        self._socket = Socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # each message says who sent it
            self._socket.setblocking(False)
            self._socket.bind(f"\0{name}")
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close the socket, and with it all descriptors that nobody has received."""
        self._socket.close()

    def connect(self, name: str) -> None:
        """Take messages of the peer's mailbox only. :raises OSError: if it is gone, or connected to another one."""
        self._socket.connect(f"\0{name}")

    def send(self, *descriptors: int) -> None:
        """Send descriptors to the peer, which has connected its mailbox. The caller keeps its own, and may close them.

        :raises OSError: if the mailbox is gone.
        """
        self._socket.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])

    def receive(self, rank: int, pid: int, count: int) -> list[int]:
        """Take out the peer's descriptors, which the caller closes. They must have been sent.

        :param rank: the peer, for messages. :param pid: its process. Descriptors from any other process are closed.
        :param count: how many it has sent at once.
        :raises UnsupportedError: if they are not there. :raises OSError: if this process can open no further file.
        """
        while True:  # nobody can add to what strangers have sent
            try:
                _, parts, flags, _ = self._socket.recvmsg(1, _ROOM, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                raise UnsupportedError(
                    f"no descriptor has come from rank {rank}, process {pid}: the ranks see each other's processes "
                    "only in one PID namespace and as one user"
                ) from None
            sender, descriptors = _contents(parts)
            if sender == (pid, os.getuid()):
                if len(descriptors) == count:
                    return descriptors
                _close(*descriptors)
                if flags & socket.MSG_CTRUNC and len(descriptors) < count:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            else:
                _close(*descriptors)


def _contents(parts: list[tuple[int, int, bytes]]) -> tuple[tuple[int, int], list[int]]:
    """(pid, uid) of a message's sender, -1 where the kernel does not tell, and the descriptors."""
    pid, uid, descriptors = -1, -1, array.array("i")
    for level, kind, data in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _CREDENTIALS.size:
            pid, uid, _ = _CREDENTIALS.unpack(data)
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) // 4 * 4])
    return (pid, uid), descriptors.tolist()


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

    :param exports: each makes one of this rank's descriptors. There are at most :data:`MAX_DESCRIPTORS`.
    :param counts: how many each rank has.
    :param nbytes: the size of the memory behind them, which must be the same on every rank.
    :param what: what the descriptors stand for, in messages.
    :raises Agreed: on every rank, if one of them cannot take part. :raises IpcReduceError: see ``exchange.allgather``.
    """
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    boxes: dict[int, Mailbox] = {}
    every: list[list[int]] = [[] for _ in range(ranks.size)]
    own = every[ranks.rank]
    with ExitStack() as held:

        def make() -> dict[str, Any]:
            name = f"ipcreduce-{secrets.token_hex(16)}"
            with uninterrupted():
                for export in exports:
                    own.append(export())
                    held.callback(Owned(own[-1]).close)  # by an object, which goes even if this is interrupted
                for rank in others:
                    boxes[rank] = Mailbox(f"{name}-{rank}")
                    held.callback(boxes[rank].close)
            return {"socket": name, "pid": os.getpid(), "nbytes": nbytes}

        places = exchange.share(ranks, _PLACE, make, deadline, f"exporting {what}")
        with exchange.step(ranks, deadline, f"connecting for {what}"):
            if (places["nbytes"] != nbytes).any():
                raise UnsupportedError(f"{what} differ in size: {places['nbytes'].tolist()} bytes")
            for rank, mailbox in boxes.items():
                mailbox.connect(f"{places[rank]['socket'].decode()}-{ranks.rank}")
        with exchange.step(ranks, deadline, f"sending {what}"):
            for mailbox in boxes.values() if own else ():
                mailbox.send(*own)
        with exchange.step(ranks, deadline, f"receiving {what}"):
            for rank, mailbox in boxes.items():
                if counts[rank]:
                    every[rank] = mailbox.receive(rank, int(places[rank]["pid"]), counts[rank])
                    for one in every[rank]:
                        held.callback(Owned(one).close)
        yield every


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with suppress(OSError):  # an error that is told may not hide another one
            os.close(descriptor)
