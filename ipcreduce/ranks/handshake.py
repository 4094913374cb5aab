"""The handshake on a new connection, in which both sides prove that they know the secret of this start-up.

    the side that listens              the side that connects
    challenge                    ──►
                                 ◄──   rank, challenge, proof
    proof, if the rank is taken  ──►

A proof is an HMAC over both challenges, both ranks and the side that gives it. So the secret itself is never sent, a
proof is valid once, and a proof of one side is no proof of the other.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from ..originals import Socket

SECRET_BYTES = 32
STRANGER = -1
_CHALLENGE_BYTES = 32
_CLAIM = struct.Struct(f"<I{_CHALLENGE_BYTES}s32s")  # rank, challenge, proof
_PROVED = struct.Struct(f"<16sII{_CHALLENGE_BYTES}s{_CHALLENGE_BYTES}s")  # side, both ranks, both challenges
_PROOF_BYTES = 32
_LISTENS, _CONNECTS = b"listens", b"connects"


class _End:
    """One end of a connection, whose methods do not block."""

    def __init__(self, connection: Socket, secret: bytes) -> None:
        connection.setblocking(False)
        self.connection, self._secret = connection, secret
        self._received = b""

    def _next(self, nbytes: int) -> bytes | None:
        """The next message, of this length; None while it is incomplete. :raises OSError: if the connection ends."""
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
    """The connection of a process that has connected to this rank. :raises OSError: if it is closed already."""

    def __init__(self, connection: Socket, secret: bytes, rank: int) -> None:
        super().__init__(connection, secret)
        self._rank, self._challenge, self._proven = rank, secrets.token_bytes(_CHALLENGE_BYTES), b""
        self.connection.sendall(self._challenge)

    def rank(self) -> int | None:
        """The guest's rank once it is proved, and None before. STRANGER for a wrong proof or a closed connection."""
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
        """Prove to a guest that this rank knows the secret, too. :raises OSError: if the guest is gone."""
        self.connection.sendall(self._proven)


class Visit(_End):
    """A connection to an address at which rank ``host`` or another program listens."""

    def __init__(self, connection: Socket, secret: bytes, rank: int, host: int) -> None:
        super().__init__(connection, secret)
        self._rank, self._host = rank, host
        self._due = b""  # the proof that the host has to give, once this rank has given its own

    def is_host(self) -> bool | None:
        """True once the host has proved itself; None before that. False for a wrong proof.

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
