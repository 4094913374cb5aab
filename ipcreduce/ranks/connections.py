"""TCP connections between every two ranks, made at start-up. They carry the mirror of the control pages.

Each rank listens at a port that the system chooses, until all ranks have connected. Both sides of a connection prove
that they know a secret which the ranks have shared at start-up (handshake.py). Otherwise the connection is closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from .. import clock
from ..errors import UnsupportedError
from ..originals import Socket, select
from . import exchange
from .exchange import Kind, Ranks
from .handshake import SECRET_BYTES, STRANGER, Guest, Visit

_ADDRESSES_BYTES = 1024  # for the addresses of one rank, which is room for at least 64
_PLACE = exchange.struct(
    Kind.PLACE,
    ("network", "S64"),
    ("port", "<u4"),
    ("addresses", f"S{_ADDRESSES_BYTES}"),
    ("secret", f"V{SECRET_BYTES}"),
)
_GREET_SECONDS = 2.0  # the time in which a guest has to prove itself. A rank that was slower connects again
_TICK_SECONDS = 0.1  # between two looks for guests that take too long, and for visits to be repeated
_MAX_GUESTS = 64  # guests that have not proved themselves yet
_MAX_VISITS = 128  # visits without an answer yet
_MAX_REASONS = 3  # in an error message
_MAX_SECONDS = 20.0  # for all connections together
_SIOCGIFADDR = 0x8915  # linux/sockios.h
# Keepalive probes detect within 4 s that a host is gone. The system of a stopped process still answers them.
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000),
)


def connect(ranks: Ranks, network: str, deadline: float) -> dict[int, Socket]:
    """A non-blocking connection to every other rank, by rank. Collective.

    :param network: an identifier of this process's loopback network. Ranks with the same one connect over loopback.
    :param deadline: on the clock of :mod:`ipcreduce.clock`.
    :raises UnsupportedError: if two ranks do not reach each other.
    """
    rank, n = ranks.rank, ranks.size
    listener: Socket | None = None
    with ExitStack() as failed:

        def own() -> dict[str, Any]:
            nonlocal listener
            listener = failed.enter_context(Socket(socket.AF_INET, socket.SOCK_STREAM))
            listener.bind(("", 0))
            listener.listen(n + _MAX_GUESTS)
            secret = np.void(secrets.token_bytes(SECRET_BYTES))
            addresses = joined(own_addresses())  # opens a socket: without one to spare, no connection can be made
            return {"network": network, "port": listener.getsockname()[1], "addresses": addresses, "secret": secret}

        places = exchange.share(ranks, _PLACE, own, deadline, "listening for the other ranks")
        assert listener is not None
        now = clock.now()
        until = min(now + _MAX_SECONDS, (now + deadline) / 2)  # leaves time for the vote
        secret = places[0]["secret"].tobytes()
        with exchange.step(ranks, deadline, "connecting the ranks (is TCP between the hosts open?)", waits=True):
            with _Meeting(listener, secret, rank, places) as meeting:
                connections = meeting.hold(until)
            for connection in connections.values():
                failed.enter_context(connection)
            for connection in connections.values():
                for option in _OPTIONS:
                    connection.setsockopt(*option)
        failed.pop_all()
        listener.close()
    return connections


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, one for each interface that is up, without those of loopback."""
    found = []
    with Socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def joined(addresses: Sequence[str]) -> str:
    """The addresses as one text. The last ones are left out if there is no room for them."""
    while len(text := ",".join(addresses)) > _ADDRESSES_BYTES:
        addresses = addresses[:-1]
    return text


def _addresses(place: Any, own: Any) -> list[str]:
    """The addresses at which the rank of record ``place`` may be reached.

    An address that this host also has would lead back to this host, so it is left out if the rank has others.
    """
    if place["network"] == own["network"]:
        return ["127.0.0.1"]
    mine = bytes(own["addresses"]).decode().split(",")
    found = [address for address in dict.fromkeys(bytes(place["addresses"]).decode().split(",")) if address]
    return [address for address in found if address not in mine] or found


class _Meeting:
    """The connections of one rank while they are made: it visits all lower ranks, and all higher ranks are its guests.

    It tries all addresses and listens to all guests at the same time, so a silent one delays nobody.
    """

    def __init__(self, listener: Socket, secret: bytes, rank: int, places: Any) -> None:
        self._listener, self._secret, self._rank = listener, secret, rank
        self._ports = [int(place["port"]) for place in places]
        self._addresses = [_addresses(place, places[rank]) for place in places[:rank]]
        self._awaited = set(range(len(places))) - {rank}
        self._found: dict[int, Socket] = {}
        self._guests: dict[Guest, float] = {}  # with the time until which each has to prove itself, the oldest first
        self._visits: dict[Visit, tuple[int, str]] = {}  # with the rank and the address
        self._due = deque((other, address) for other in range(rank) for address in self._addresses[other])
        self._again: list[tuple[float, int, str]] = []  # visits to repeat: from when on, rank, address
        self._reasons: list[dict[str, str]] = [{} for _ in range(rank)]  # why visits failed, by rank and address
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Guest | Visit | None, bool]] = {}  # by descriptor; True: it connects still

    def __enter__(self) -> _Meeting:
        self._listener.setblocking(False)
        self._watch(self._listener, None)
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections except those that :meth:`hold` has returned."""
        self._epoll.close()
        for one in (*self._guests, *self._visits):
            one.connection.close()
        for connection in self._found.values():
            connection.close()

    def hold(self, until: float) -> dict[int, Socket]:
        """Make the connections, and return them by rank.

        :raises UnsupportedError: if not all are made at ``until``, or if all addresses of a rank have failed.
        """
        while self._awaited - self._found.keys():
            now = clock.now()
            if now > until:
                raise self._missing(min(self._awaited - self._found.keys()), ["timed out"])
            self._visit(now)
            events = self._epoll.poll(min(_TICK_SECONDS, max(0.0, until - now)))
            for one, connects in [self._watched[descriptor] for descriptor, _ in events]:
                self._act(one, connects)
            guests = list(self._guests)
            for guest in [guest for guest in guests if self._guests[guest] < now] or guests[:-_MAX_GUESTS]:
                self._close(guest)
        found, self._found = self._found, {}
        return found

    def _watch(self, connection: Socket, one: Guest | Visit | None, *, connects: bool = False) -> None:
        """Wait for something to read from a new connection, or for it to be made."""
        self._epoll.register(connection.fileno(), select.EPOLLOUT if connects else select.EPOLLIN)
        self._watched[connection.fileno()] = one, connects

    def _act(self, one: Guest | Visit | None, connects: bool) -> None:
        if one is None:
            self._admit()
        elif isinstance(one, Guest):
            self._heard(one)
        elif one not in self._visits:
            pass  # another visit to the same rank has just succeeded
        elif connects:
            self._connected(one)
        else:
            self._answered(one)

    def _missing(self, rank: int, reasons: list[str]) -> UnsupportedError:
        noted = {address: "no answer" for of, address in self._visits.values() if of == rank}
        if rank < self._rank:
            noted = self._reasons[rank] | noted
        reasons += [f"{address} port {self._ports[rank]}: {why}" for address, why in noted.items()][:_MAX_REASONS]
        return UnsupportedError(
            f"rank {self._rank} has no connection to rank {rank}: {'; '.join(reasons) or 'it has no address'}"
        )

    # ---- visits, to lower ranks
    def _visit(self, now: float) -> None:
        """Begin the visits that are due."""
        for one in [one for one in self._again if one[0] < now]:
            self._again.remove(one)
            self._due.append(one[1:])
        while self._due and len(self._visits) < _MAX_VISITS:
            rank, address = self._due.popleft()
            if rank not in self._found:
                self._dial(rank, address)
        for rank in range(self._rank):
            if rank not in self._found and len(self._reasons[rank]) == len(self._addresses[rank]):
                raise self._missing(rank, [])

    def _dial(self, rank: int, address: str) -> None:
        connection = Socket(socket.AF_INET, socket.SOCK_STREAM)
        visit = Visit(connection, self._secret, self._rank, rank)
        self._visits[visit] = rank, address
        try:
            code = connection.connect_ex((address, self._ports[rank]))
        except OSError as error:  # the text is not an address
            self._fail(visit, str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._fail(visit, os.strerror(code))
            return
        self._watch(connection, visit, connects=True)

    def _connected(self, visit: Visit) -> None:
        if code := visit.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(visit, os.strerror(code))
        else:
            self._unwatch(visit.connection)
            self._watch(visit.connection, visit)

    def _answered(self, visit: Visit) -> None:
        rank, address = self._visits[visit]
        try:
            known = visit.is_host()
        except OSError:  # the rank has too many guests, or this visit took too long
            self._close(visit)
            self._again.append((clock.now() + _TICK_SECONDS, rank, address))
            return
        if known:
            self._found[rank] = self._take(visit)
            for other in [other for other, (of, _) in self._visits.items() if of == rank]:
                self._close(other)
        elif known is not None:
            self._fail(visit, "another program answers, which does not know the secret of this start-up")

    def _fail(self, visit: Visit, why: str) -> None:
        """Close a visit, and note for the error message why it has failed."""
        rank, address = self._visits[visit]
        self._reasons[rank][address] = why
        self._close(visit)

    # ---- guests, of which the right ones are higher ranks
    def _admit(self) -> None:
        with suppress(BlockingIOError, ConnectionError):  # the guest has gone again
            connection, _ = self._listener.accept()
            with ExitStack() as failed:
                failed.callback(connection.close)
                guest = Guest(connection, self._secret, self._rank)
                failed.pop_all()
            self._guests[guest] = clock.now() + _GREET_SECONDS
            self._watch(connection, guest)

    def _heard(self, guest: Guest) -> None:
        rank = guest.rank()
        if rank is None:
            return
        if rank != STRANGER and rank > self._rank and rank in self._awaited - self._found.keys():
            with suppress(OSError):  # the rank has closed this connection, and connects again
                guest.welcome()
                self._found[rank] = self._take(guest)
                return
        self._close(guest)

    # ---- both
    def _take(self, one: Guest | Visit) -> Socket:
        self._guests.pop(one, None) if isinstance(one, Guest) else self._visits.pop(one)
        self._unwatch(one.connection)
        return one.connection

    def _unwatch(self, connection: Socket) -> None:
        if self._watched.pop(connection.fileno(), None) is not None:
            self._epoll.unregister(connection.fileno())

    def _close(self, one: Guest | Visit) -> None:
        self._take(one).close()
