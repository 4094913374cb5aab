"""The handshake of two processes: who knows the secret, in both directions, whatever else is said."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from ipcreduce.ranks.handshake import STRANGER, Guest, Visit

SECRET, OTHER = os.urandom(32), os.urandom(32)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


Ends = tuple[socket.socket, socket.socket]


def test_both_know_it(ends: Ends):
    guest, visit = Guest(ends[0], SECRET, 2), Visit(ends[1], SECRET, 5, 2)
    assert guest.rank() is None
    assert visit.is_host() is None
    assert guest.rank() == 5
    assert visit.is_host() is None, "before the host has taken it"
    guest.welcome()
    ends[0].sendall(b"first message")
    assert visit.is_host() is True
    assert ends[1].recv(100) == b"first message"


def test_who_connects_does_not(ends: Ends):
    guest, visit = Guest(ends[0], SECRET, 2), Visit(ends[1], OTHER, 5, 2)
    assert visit.is_host() is None
    assert guest.rank() == STRANGER


@pytest.mark.parametrize(("secret", "host"), [(OTHER, 2), (SECRET, 3)], ids=["another secret", "another rank"])
def test_who_listens_does_not(ends: Ends, secret: bytes, host: int):
    """Or it is a rank, and not the one that is visited."""
    guest, visit = Guest(ends[0], secret, host), Visit(ends[1], SECRET, 5, 2)
    assert visit.is_host() is None
    assert guest.rank() == STRANGER
    guest._proven = guest._proof(b"listens", host, 5, bytes(32), bytes(32))
    guest.welcome()
    assert visit.is_host() is False


def test_a_proof_is_of_one_side(ends: Ends):
    """Of a visitor's proof nobody makes a host's."""
    visit = Visit(ends[1], SECRET, 5, 2)
    ends[0].sendall(bytes(32))
    assert visit.is_host() is None
    ends[0].sendall(ends[0].recv(1000)[-32:])
    assert visit.is_host() is False


def test_a_claim_serves_once(ends: Ends):
    """Each guest has a challenge of his own."""
    guest, visit = Guest(ends[0], SECRET, 2), Visit(ends[1], SECRET, 5, 2)
    assert visit.is_host() is None
    claim = ends[0].recv(1000, socket.MSG_PEEK)
    assert guest.rank() == 5
    one, other = socket.socketpair()
    with one, other:
        again = Guest(one, SECRET, 2)
        other.sendall(claim)
        assert again.rank() == STRANGER


def test_messages_in_pieces(ends: Ends):
    """TCP may tear them apart."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        guest, visit = Guest(ends[0], SECRET, 2), Visit(theirs, SECRET, 5, 2)

        def carry(source: socket.socket, target: socket.socket) -> Iterator[None]:
            source.setblocking(False)
            while True:
                try:
                    data = source.recv(1000)
                except BlockingIOError:
                    return
                for byte in data:
                    target.sendall(bytes([byte]))
                    yield

        for _ in carry(ends[1], theirs_end := ours):
            assert visit.is_host() is None
        found = []
        for _ in carry(theirs_end, ends[1]):
            found.append(guest.rank())
        assert found == [None] * (len(found) - 1) + [5]
        guest.welcome()
        answers = [visit.is_host() for _ in carry(ends[1], ours)]
        assert answers == [None] * 31 + [True]


def test_the_secret_does_not_travel(ends: Ends):
    guest, visit = Guest(ends[0], SECRET, 2), Visit(ends[1], SECRET, 5, 2)
    sent = ends[1].recv(1000, socket.MSG_PEEK)
    assert visit.is_host() is None
    sent += ends[0].recv(1000, socket.MSG_PEEK)
    assert guest.rank() == 5
    guest.welcome()
    sent += ends[1].recv(1000, socket.MSG_PEEK)
    assert len(sent) == 32 + 68 + 32
    assert SECRET not in sent


@pytest.mark.parametrize("end", [0, 1])
def test_the_other_has_gone(ends: Ends, end: int):
    guest, visit = Guest(ends[0], SECRET, 2), Visit(ends[1], SECRET, 5, 2)
    ends[end].close()
    if end:
        assert guest.rank() == STRANGER
    else:
        with pytest.raises(BrokenPipeError):
            visit.is_host()
