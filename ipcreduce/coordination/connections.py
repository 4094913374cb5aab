"""TCP connections between every two ranks, for the mirror of their control pages. Made at start-up.

A rank listens at a port of its own choice until all have come, and takes nobody who does not know the secret that the
ranks have shared over MPI.
"""

from __future__ import annotations

import fcntl
import hmac
import secrets
import socket
import struct
import time
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import exchange

_SECRET_BYTES = 32
_GREETING = struct.Struct(f"<{_SECRET_BYTES}sI")  # secret, rank
_PLACE = exchange.struct(8, ("machine", "S64"), ("port", "<u4"), ("addresses", "S256"), ("secret", f"V{_SECRET_BYTES}"))
_TRY_SECONDS = 5.0  # for one address of several
_GREET_SECONDS = 2.0
_MOST_SECONDS = 20.0  # for all of them, where ranks do not reach each other
_SIOCGIFADDR = 0x8915  # linux/sockios.h
# Keepalive probes tell of a host that has gone, within 4 s. A process that is stopped still answers them.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 4000),
)


def connect(mpi: Any, machine: str, deadline: float) -> dict[int, socket.socket]:
    """A connection to every other rank, by rank; not blocking. Collective.

    :param machine: an identifier of this machine. Ranks of one machine meet at its loopback address.
    :param deadline: on ``time.monotonic()``'s clock.
    :raises UnsupportedError: if two ranks do not reach each other.
    """
    rank, n = mpi.Get_rank(), mpi.Get_size()
    with ExitStack() as failed:
        listener: socket.socket | None = None
        error: OSError | None = None
        try:
            listener = failed.enter_context(socket.create_server(("", 0), backlog=n))
        except OSError as caught:
            error = caught
        record = exchange.message(
            _PLACE, error, machine=machine, port=listener.getsockname()[1] if listener else 0,
            addresses=",".join(own_addresses()), secret=np.void(secrets.token_bytes(_SECRET_BYTES)),
        )  # fmt: skip
        places = exchange.allgather(mpi, record, deadline, "listening for the other ranks")
        exchange.check(mpi, places, "listening for the other ranks")
        assert listener is not None
        connections: dict[int, socket.socket] = {}
        now = time.monotonic()
        until = min(now + _MOST_SECONDS, (now + deadline) / 2)  # so that the votes still meet
        secret = places[0]["secret"].tobytes()
        with exchange.step(mpi, deadline, "connecting the ranks (is TCP between the hosts open?)"):
            try:
                for other in range(rank):
                    connections[other] = failed.enter_context(_reach(places[other], record[0], until))
                    connections[other].sendall(_GREETING.pack(secret, rank))
                while len(connections) < n - 1:
                    other, connection = _accept(listener, secret, until)
                    failed.enter_context(connection)
                    if rank < other < n:
                        connections[other] = connection
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
    local = place["machine"] == own["machine"]
    addresses = ["127.0.0.1"] if local else bytes(place["addresses"]).decode().split(",")
    last = OSError("it has no address")
    for address in filter(None, addresses):
        try:
            left = deadline - time.monotonic()
            return socket.create_connection((address, int(place["port"])), timeout=max(0.01, min(_TRY_SECONDS, left)))
        except OSError as error:
            last = OSError(f"{address} port {place['port']}: {error}")
    raise last


def _accept(listener: socket.socket, secret: bytes, deadline: float) -> tuple[int, socket.socket]:
    """The next rank that comes, and its connection. Whoever does not know the secret is sent away.

    :raises TimeoutError: at ``deadline``.
    """
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        with ExitStack() as refused, suppress(OSError):
            refused.enter_context(connection)
            connection.settimeout(_GREET_SECONDS)
            greeting = connection.recv(_GREETING.size, socket.MSG_WAITALL)
            if len(greeting) == _GREETING.size:
                known, rank = _GREETING.unpack(greeting)
                if hmac.compare_digest(known, secret):
                    refused.pop_all()
                    return rank, connection


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setblocking(False)
