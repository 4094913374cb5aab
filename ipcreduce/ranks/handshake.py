"""The proof of two processes that a connection has brought together that both know the secret of this start-up.

    who listens                        who connects
    challenge                    ──►
                                 ◄──   rank, challenge, proof
    proof, if the rank is taken  ──►

A proof is an HMAC over both challenges, both ranks and the side that gives it. So the secret itself never travels, no
proof serves twice, and none can be sent back to where it came from.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

SECRET_BYTES = 32
STRANGER = -1
_CHALLENGE_BYTES = 32
_CLAIM = struct.Struct(f"<I{_CHALLENGE_BYTES}s32s")  # rank, challenge, proof
_PROVED = struct.Struct(f"<16sII{_CHALLENGE_BYTES}s{_CHALLENGE_BYTES}s")  # side, who listens, who connects, challenges
_PROOF_BYTES = 32
_LISTENS, _CONNECTS = b"listens", b"connects"


class _End:
    """One end of a connection. It does not block."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        connection.setblocking(False)
        self.connection, self._secret = connection, secret
        self._received = b""

    def _next(self, nbytes: int) -> bytes | None:
        """The next message, of this length; None while more has to arrive. :raises OSError: if none will."""
        try:
            data = self.connection.recv(nbytes - len(self._received))
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the connection was closed before anybody had answered")
        self._received += data
        if len(self._received) < nbytes:
            return None
        whole, self._received = self._received, b""
        return whole

    def _proof(self, side: bytes, listening: int, connecting: int, asked: bytes, asked_back: bytes) -> bytes:
        return hmac.digest(self._secret, _PROVED.pack(side, listening, connecting, asked, asked_back), "sha256")


class Guest(_End):
    """Somebody who has connected to this rank. :raises OSError: if he has gone again."""

    def __init__(self, connection: socket.socket, secret: bytes, rank: int) -> None:
        super().__init__(connection, secret)
        self._rank, self._challenge, self._proven = rank, secrets.token_bytes(_CHALLENGE_BYTES), b""
        self.connection.sendall(self._challenge)

    def rank(self) -> int | None:
        """The rank that has come; STRANGER if it is none, or has gone; None while more has to arrive."""
        try:
            claim = self._next(_CLAIM.size)
        except OSError:
            return STRANGER
        if claim is None:
            return None
        rank, challenge, proof = _CLAIM.unpack(claim)
        if not hmac.compare_digest(proof, self._proof(_CONNECTS, self._rank, rank, self._challenge, challenge)):
            return STRANGER
        self._proven = self._proof(_LISTENS, self._rank, rank, self._challenge, challenge)
        return int(rank)

    def welcome(self) -> None:
        """Answer a rank that has come and is taken. :raises OSError: if it has gone."""
        self.connection.sendall(self._proven)


class Visit(_End):
    """A connection to an address at which rank ``host`` may listen, or anybody else."""

    def __init__(self, connection: socket.socket, secret: bytes, rank: int, host: int) -> None:
        super().__init__(connection, secret)
        self._rank, self._host = rank, host
        self._due = b""  # the host's proof, once this rank has given its own

    def is_host(self) -> bool | None:
        """True once the host has taken this rank; False if somebody else answers; None while more has to arrive.

        :raises OSError: if the connection has ended.
        """
        if not self._due:
            asked = self._next(_CHALLENGE_BYTES)
            if asked is None:
                return None
            back = secrets.token_bytes(_CHALLENGE_BYTES)
            proof = self._proof(_CONNECTS, self._host, self._rank, asked, back)
            self._due = self._proof(_LISTENS, self._host, self._rank, asked, back)
            self.connection.sendall(_CLAIM.pack(self._rank, back, proof))
        answer = self._next(_PROOF_BYTES)
        return None if answer is None else hmac.compare_digest(answer, self._due)
