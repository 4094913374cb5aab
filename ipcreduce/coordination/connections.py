"""TCP connections between every two ranks, for the mirror of their control pages. Made at start-up.

A rank listens at a port of its own choice until all have come, and takes nobody who does not know the secret that the
ranks have shared at start-up.
"""

from __future__ import annotations

import fcntl
import hmac
import secrets
import selectors
import socket
import struct
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from .. import clock
from ..errors import UnsupportedError
from . import exchange
from .exchange import Ranks

_SECRET_BYTES = 32
_GREETING = struct.Struct(f"<{_SECRET_BYTES}sI")  # secret, rank
_PLACE = exchange.struct(8, ("network", "S64"), ("port", "<u4"), ("addresses", "S256"), ("secret", f"V{_SECRET_BYTES}"))
_TRY_SECONDS = 5.0  # for one address of several
_GREET_SECONDS = 2.0  # for a connection to say who it is
_TICK_SECONDS = 0.1  # between two looks for guests that take too long
_MOST_GUESTS = 64  # connections that have not said it yet
_STRANGER = -1
_MOST_SECONDS = 20.0  # for all of them, where ranks do not reach each other
_SIOCGIFADDR = 0x8915  # linux/sockios.h
# Keepalive probes tell of a host that has gone, within 4 s. A process that is stopped still answers them.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 4000),
)


def connect(ranks: Ranks, network: str, deadline: float) -> dict[int, socket.socket]:
    """A connection to every other rank, by rank; not blocking. Collective.

    :param network: an identifier of this process's loopback address, at which ranks that share it meet.
    :param deadline: on the clock of :mod:`ipcreduce.clock`.
    :raises UnsupportedError: if two ranks do not reach each other.
    """
    rank, n = ranks.rank, ranks.size
    with ExitStack() as failed:
        listener: socket.socket | None = None
        error: OSError | None = None
        try:
            listener = failed.enter_context(socket.create_server(("", 0), backlog=n + _MOST_GUESTS))
        except OSError as caught:
            error = caught
        record = exchange.message(
            _PLACE, error, network=network, port=listener.getsockname()[1] if listener else 0,
            addresses=",".join(own_addresses()), secret=np.void(secrets.token_bytes(_SECRET_BYTES)),
        )  # fmt: skip
        places = exchange.allgather(ranks, record, deadline, "listening for the other ranks")
        exchange.check(ranks, places, "listening for the other ranks")
        assert listener is not None
        connections: dict[int, socket.socket] = {}
        now = clock.now()
        until = min(now + _MOST_SECONDS, (now + deadline) / 2)  # so that the votes still meet
        secret = places[0]["secret"].tobytes()
        with exchange.step(ranks, deadline, "connecting the ranks (is TCP between the hosts open?)"):
            try:
                for other in range(rank):
                    connections[other] = failed.enter_context(_reach(places[other], record[0], until))
                    connections[other].sendall(_GREETING.pack(secret, rank))
                found = _accept(listener, secret, set(range(rank + 1, n)), until)
                connections |= {other: failed.enter_context(connection) for other, connection in found.items()}
            except OSError as caught:
                missing = [other for other in range(n) if other != rank and other not in connections]
                raise UnsupportedError(f"rank {rank} has no connection to rank {missing[0]}: {caught}") from caught
            for connection in connections.values():
                _prepare(connection)
        failed.pop_all()
        listener.close()
    return connections


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, one for each interface that is up, without loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def _reach(place: Any, own: Any, deadline: float) -> socket.socket:
    """A connection to a rank, at the first of its addresses that answers. :raises OSError: if none does."""
    local = place["network"] == own["network"]
    addresses = ["127.0.0.1"] if local else bytes(place["addresses"]).decode().split(",")
    last = OSError("it has no address")
    for address in filter(None, addresses):
        try:
            left = deadline - clock.now()
            return socket.create_connection((address, int(place["port"])), timeout=max(0.01, min(_TRY_SECONDS, left)))
        except OSError as error:
            last = OSError(f"{address} port {place['port']}: {error}")
    raise last


class _Guest:
    """A connection of somebody who has not said yet who it is."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.until, self._greeting = connection, clock.now() + _GREET_SECONDS, b""

    def rank(self, secret: bytes) -> int | None:
        """The rank that has come; _STRANGER if it is none, or has gone; None while more has to arrive."""
        try:
            data = self.connection.recv(_GREETING.size - len(self._greeting))
        except BlockingIOError:
            return None
        except OSError:
            return _STRANGER
        self._greeting += data
        if data and len(self._greeting) < _GREETING.size:
            return None
        known, rank = _GREETING.unpack(self._greeting.ljust(_GREETING.size, b"\0"))
        return int(rank) if hmac.compare_digest(known, secret) else _STRANGER


def _accept(listener: socket.socket, secret: bytes, awaited: set[int], deadline: float) -> dict[int, socket.socket]:
    """The connections of the ``awaited`` ranks, by rank. Whoever does not know the secret is sent away.

    All who have connected are heard at once, so that a silent stranger keeps nobody waiting.

    :raises TimeoutError: at ``deadline``, however many strangers come.
    """
    found: dict[int, socket.socket] = {}
    guests: list[_Guest] = []  # the oldest first
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, ExitStack() as failed:
        selector.register(listener, selectors.EVENT_READ)

        def take(guest: _Guest) -> socket.socket:
            guests.remove(guest)
            selector.unregister(guest.connection)
            return guest.connection

        try:
            while awaited - found.keys():
                now = clock.now()
                if now > deadline:
                    raise TimeoutError("timed out")
                for key, _ in selector.select(min(_TICK_SECONDS, deadline - now)):
                    if key.fileobj is listener:
                        with suppress(BlockingIOError, ConnectionAbortedError):  # it has gone again
                            guests.append(_Guest(listener.accept()[0]))
                            selector.register(guests[-1].connection, selectors.EVENT_READ, guests[-1])
                    elif (rank := key.data.rank(secret)) in awaited - found.keys():
                        found[rank] = failed.enter_context(take(key.data))
                    elif rank is not None:
                        take(key.data).close()
                for guest in [guest for guest in guests if guest.until < now] or guests[:-_MOST_GUESTS]:
                    take(guest).close()
        finally:
            for guest in guests:
                guest.connection.close()
        failed.pop_all()
    return found


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setblocking(False)
