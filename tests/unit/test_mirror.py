"""The mirror of a control page: what arrives, when, and what becomes of bytes that are no message."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import random
import re
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce.calls import faults
from ipcreduce.calls.sequence import CallSequence
from ipcreduce.errors import PeerLostError, UnsupportedError
from ipcreduce.page import control_page, mirror, watchdog
from ipcreduce.page.control_page import CLOSED_IT, REFUSED, Page
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.page.flight_recorder import RING, TEXTS
from ipcreduce.page.mirror import Mirror
from ipcreduce.ranks import connections, exchange
from tests.shared import bounds, clock
from tests.shared.bounds import HANG, LONG
from tests.unit.pages import in_threads, make_mirrored

SUM, MAX = Fingerprint.of("a sum"), Fingerprint.of("a maximum")
Ranks = tuple[list[Page], list[Mirror]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two ranks, which tell each other at once what their pages' writers want told."""
    made = make_mirrored(2)
    yield made
    for one in made[1]:
        one.close(0)


def exchange_all(ranks: Ranks) -> None:
    """One turn of both watchdogs."""
    for page in ranks[0]:
        page.changed = None
    for one in ranks[1]:
        one.send()
    for one in ranks[1]:
        one.receive()


def test_the_call_is_there_before_its_round(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """Also if the program makes it while a message is put together: a rank that has seen the round compares calls."""
    first, second = ranks[0]
    exchange_all(ranks)
    read_block = first.read_block

    def read_meanwhile() -> bytes:
        first.calls.enter(1, SUM)
        first.write_round(1, True, 0, b"")
        return read_block()

    second.calls.enter(1, MAX)
    first._tell()
    monkeypatch.setattr(first, "read_block", read_meanwhile)
    exchange_all(ranks)
    assert second.read_round(1)[0] is not None
    assert second.calls.compare(1, MAX) == 0


def test_the_word_is_there_before_the_block_that_may_lead_to_its_end(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """The program reads a meeting in the block, and clears the word of the fault before it: behind it would stay."""
    (first, second), seen = ranks[0], []

    class Watched:
        def __init__(self, memory: Any) -> None:
            self.memory = memory

        def __setitem__(self, place: Any, data: Any) -> None:
            seen.append(second.aborted)
            self.memory[place] = data

    monkeypatch.setattr(second, "_map", Watched(second._map))
    first.post_fault(REFUSED, 3, "why")
    assert seen == [True]


def test_what_is_written_arrives_with_the_page_untouched_elsewhere(ranks: Ranks):
    first, second = ranks[0]
    first.post_fault(REFUSED, 3, "why")
    assert second.aborted
    assert second.fault() == (3, 0, REFUSED, "why")
    assert second.identity(0) == watchdog.own_identity()
    second.post_lost(0, "it was interrupted")
    assert first.loss() == second.loss() == (0, "it was interrupted")
    first.leave()
    assert second.has_left(0)
    assert not second.has_left(1)


def test_an_abort_is_told_once_and_not_echoed(ranks: Ranks):
    """Or one that has been cleared would come back from a rank that was told of it."""
    first, second = ranks[0]
    first.abort()
    assert second.aborted
    for page in (first, second):
        page.clear()
    second.write_meeting(1, 1, 1)  # the next message, from the one who was told
    first.write_meeting(1, 1, 1)
    assert not first.aborted
    assert not second.aborted


def test_an_abort_does_not_come_back_later(ranks: Ranks):
    """From a rank that was told of it, and says nothing before it is cleared."""
    first, second = ranks[0]
    first.changed = second.changed = None
    first.abort()
    ranks[1][0].send()
    ranks[1][1].receive()
    assert second.aborted
    for page in (first, second):
        page.clear()
    for _ in range(2):
        exchange_all(ranks)
    assert not first.aborted
    assert not second.aborted


def test_no_words_are_left_for_a_rank_that_has_gone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """close() waits for those who have not read them yet. Here close() itself finds that the rank has gone."""
    pages, mirrors = ranks
    pages[0].changed = None
    mirrors[1].close(0)
    pages[0].leave()

    def sleep(seconds: float) -> None:
        raise AssertionError("close() waits")

    monkeypatch.setattr(mirror, "time", SimpleNamespace(sleep=sleep))
    mirrors[0].close(LONG)


def test_the_last_words_go_behind_what_a_connection_had_not_taken(ranks: Ranks):
    pages, mirrors = ranks
    pages[0].changed = None
    (peer,) = (peer for peer in mirrors[0]._peers.values() if peer.rank == 1)
    connection, peer.connection = peer.connection, Full()
    pages[0].calls.enter(1, SUM)
    mirrors[0].send()
    assert peer.outgoing
    pages[0].leave()
    peer.connection = connection
    mirrors[0].close(LONG)
    mirrors[1].receive()
    assert pages[1].calls.call_of(0) == 1
    assert pages[1].has_left(0)


class Full:
    """Stands for a connection that takes nothing at present."""

    def send(self, data: bytes) -> int:
        raise BlockingIOError


@pytest.mark.parametrize("calls", [1, RING - 2, 3 * RING])
def test_calls_arrive_with_their_texts(ranks: Ranks, calls: int):
    first, second = ranks[0]
    for call in range(1, calls + 1):
        first.calls.enter(call, MAX if call % 7 else SUM)
    exchange_all(ranks)
    assert second.calls.call_of(0) == calls
    for call in range(max(1, calls - RING + 3), calls + 1):
        assert second.calls.describe(0, call) == ("a maximum" if call % 7 else "a sum")


def test_more_texts_than_the_table_holds(ranks: Ranks):
    first, second = ranks[0]
    for call in range(1, TEXTS + 6):
        first.calls.enter(call, Fingerprint.of(f"call number {call}"))
        if call % 100 == 0:
            exchange_all(ranks)
    exchange_all(ranks)
    assert [second.calls.describe(0, TEXTS + more) for more in (1, 5)] == [f"call number {TEXTS + n}" for n in (1, 5)]


def test_the_end_of_a_rank(ranks: Ranks):
    first, second = ranks[0]
    second.post_fault(REFUSED, 1, "its last words")
    second.changed = None
    ranks[1][1].close(1.0)
    assert ranks[1][0].receive() == [(1, "its process has ended")]
    assert first.fault() == (1, 1, REFUSED, "its last words")
    assert ranks[1][0].receive() == []
    ranks[1][0].send()
    assert not second.has_left(0)


@pytest.mark.parametrize("used_again", [False, True])
def test_a_connection_that_the_program_has_closed(ranks: Ranks, used_again: bool):
    """What has its number by then is neither read, written nor closed, and the other rank sees an end."""
    first, second = ranks[1]
    ours, theirs = socket.socketpair()
    (descriptor,) = first.descriptors()
    os.close(descriptor)
    if used_again:
        os.dup2(ours.fileno(), descriptor)
        theirs.send(b"the program's")
    ranks[0][0].changed = None
    ranks[0][0].post_fault(REFUSED, 1, "its last words")
    first.send()
    ((rank, why),) = first.receive()
    assert (rank, first.descriptors()) == (1, [])
    assert "the program has closed a descriptor of ipcreduce" in why
    first.close(1.0)
    assert second.receive() == [(0, "its process has ended")]
    if used_again:
        assert os.path.samestat(os.fstat(descriptor), os.fstat(ours.fileno()))
        os.close(descriptor)
        theirs.shutdown(socket.SHUT_WR)
        assert (ours.recv(100), ours.recv(100)) == (b"the program's", b"")
        ours.close()
        assert theirs.recv(100) == b""
    ours.close()
    theirs.close()


# ---- a rank that has closed, of which a peer tells before its own block arrives
def hold_back(one: Mirror, rank: int) -> dict[int, Any]:
    """Let ``one`` tell ``rank`` nothing, until its ``_peers`` are given back what this returns."""
    (descriptor,) = (descriptor for descriptor, peer in one._peers.items() if peer.rank == rank)
    return {descriptor: one._peers.pop(descriptor)}


class Closing:
    """Four ranks in call 1. Rank 2 closes the communicator, and rank 0 tells rank 1 so; rank 2's block comes later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[Page], object], ahead: int) -> None:
        """:param before: what rank 2 does before it leaves. ``ahead``: the call in which rank 0 misses it."""
        self.pages, self.mirrors = make_mirrored(4)
        for page in self.pages:
            page.calls.enter(1, SUM)
        exchange_all((self.pages, self.mirrors))
        self.heard_by = self.pages[1]
        self.waits = 0
        self._monkeypatch = monkeypatch
        self._held = hold_back(self.mirrors[2], 1)
        before(self.pages[2])
        self.pages[2].leave()
        self.mirrors[2].send()
        self.mirrors[0].receive()
        self.pages[0].calls.enter(ahead, SUM)
        assert self.pages[0].has_left_before(2, ahead)
        self.pages[0].post_lost(2, CLOSED_IT)  # as rank 0's watchdog does
        self.mirrors[0].send()
        self.mirrors[1].receive()
        assert self.heard_by.aborted
        assert not self.heard_by.has_left(2)

    def arrive(self) -> None:
        """Let rank 2's block come to rank 1."""
        self.mirrors[2]._peers |= self._held
        self.mirrors[2].send()
        self.mirrors[1].receive()

    def then(self, act: Callable[[], object]) -> None:
        """Let ``act`` happen while rank 1 waits."""

        def sleep(_: float) -> None:
            self.waits += 1
            act()

        self._monkeypatch.setattr(control_page, "time", SimpleNamespace(sleep=sleep))

    def end(self) -> None:
        for one in self.mirrors:
            one.close(0)


MakeClosing = Callable[..., Closing]


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeClosing]:
    made: list[Closing] = []

    def close(before: Callable[[Page], object], ahead: int = 2) -> Closing:
        made.append(Closing(monkeypatch, before, ahead))
        return made[-1]

    yield close
    for one in made:
        one.end()


def says_why(page: Page) -> None:
    faults.say_why(page, "its program ended")


def test_the_reason_to_close_is_heard_though_a_peer_tells_of_the_end_first(close: MakeClosing):
    closing = close(says_why)
    closing.then(closing.arrive)
    with pytest.raises(PeerLostError, match="rank 2 is gone: its program ended, after its call 1"):
        faults.raise_lost(closing.heard_by, 2)
    assert closing.waits == 1


def test_the_first_to_go_is_named_though_a_peer_tells_of_the_second_first(close: MakeClosing):
    """Rank 2 has closed because of rank 3."""
    closing = close(lambda page: page.post_lost(3, "its process has ended"))
    closing.then(closing.arrive)
    with pytest.raises(PeerLostError, match="rank 3 is gone: its process has ended"):
        faults.raise_lost(closing.heard_by, 2)


def test_a_fault_is_found_though_a_peer_tells_first_that_its_rank_has_closed(close: MakeClosing):
    closing = close(lambda page: page.post_fault(REFUSED, 2, "ValueError: why"))
    closing.then(closing.arrive)
    assert closing.heard_by.fault() == (2, 2, REFUSED, "ValueError: why")


def test_a_rank_is_not_lost_to_a_call_that_it_has_made_though_that_is_heard_later(close: MakeClosing):
    closing = close(lambda page: page.calls.enter(2, SUM), ahead=3)
    closing.then(closing.arrive)
    faults.raise_lost(closing.heard_by, 2)
    with pytest.raises(PeerLostError, match="rank 2 is gone: it closed the communicator, after its call 2"):
        faults.raise_lost(closing.heard_by, 3)


@pytest.mark.parametrize("end", ["its connection", "the time"])
def test_a_block_that_does_not_come_is_not_waited_for_again(
    close: MakeClosing, monkeypatch: pytest.MonkeyPatch, end: str
):
    closing = close(says_why)
    if end == "the time":
        monkeypatch.setattr(control_page, "_END_SECONDS", -1.0)
        closing.then(lambda: None)
    else:
        closing.then(lambda: closing.heard_by.mark_dead(2))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 2 is gone: it closed the communicator, after its call 1"):
            faults.raise_lost(closing.heard_by, 2)
    assert closing.waits == (1 if end == "the time" else 2)


def test_a_fault_is_found_though_a_peer_tells_first_of_the_loss_that_came_of_it():
    """Rank 2 has failed, and rank 0 leaves the call halfway because of that. Rank 2's own record comes last."""
    pages, mirrors = make_mirrored(3)
    for page in pages:
        page.calls.enter(1, SUM)
    exchange_all((pages, mirrors))
    held = hold_back(mirrors[2], 1)
    pages[2].post_fault(REFUSED, 1, "SystemExit: 0")
    mirrors[2].send()
    mirrors[0].receive()
    calls = CallSequence(pages[0], LONG, [])
    calls.number = 1
    calls.lose("it left call 1 halfway", faults.fault_error(pages[0], 1, LONG))
    mirrors[0].send()
    mirrors[1].receive()
    assert pages[1].loss() is not None
    assert pages[1].fault() == (1, 2, REFUSED, "SystemExit: 0")
    mirrors[2]._peers |= held
    for one in mirrors:
        one.close(0)


def test_a_rank_that_does_not_read_is_not_flooded(ranks: Ranks):
    """Its process may be stopped; a full connection would be given up in the end, and the rank with it."""
    first, second = ranks[0]
    sender, reader = ranks[1]
    for call in range(1, 40 * RING):
        first.calls.enter(call, SUM)
        if call % (RING // 2) == 0:
            sender.send()
    (connection,) = [peer.connection for peer in reader._peers.values()]
    waiting = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, waiting)
    assert waiting[0] < 2 * mirror._MAX_UNREAD
    for _ in range(3):
        exchange_all(ranks)
        exchange_all(ranks)
    assert second.calls.call_of(0) == 40 * RING - 1


def receive_spoilt_bytes(seed: int) -> None:
    """Random bytes, and messages with a few bytes changed, end the connection or are stored: nothing else."""
    random_ = random.Random(seed)
    page, page_of_1 = Page.alone(0, 2), Page.alone(1, 2)
    ours, theirs = socket.socketpair()
    other, sent = socket.socketpair()
    for one in (ours, theirs, other, sent):
        one.setblocking(False)
    receiving, sending = Mirror(page, {1: ours}), Mirror(page_of_1, {0: other})
    try:
        for call in range(1, 20):
            page_of_1.calls.enter(call, SUM)
            page.calls.enter(call, SUM)
        page_of_1.post_fault(REFUSED, 20, "why")
        sending.send()
        data = bytearray(sent.recv(1 << 20))
        if seed % 4 == 0:
            data = bytearray(os.urandom(4096))
        for _ in range(random_.randrange(1, 6)):
            data[random_.randrange(len(data) if seed % 2 else mirror._HEAD.size)] ^= random_.randrange(1, 256)
        before = page.read_block()
        theirs.sendall(data)
        theirs.close()
        (ended,) = receiving.receive()
        assert ended[0] == 1
        assert page.read_block()[:64] == before[:64], "this rank's own identity was written"
        page.fault()
        page.loss()
        page.calls.describe(1, page.calls.call_of(1))
    finally:
        for one in (receiving, sending):
            one.close(0)
        for end in (theirs, sent):
            end.close()


def test_bytes_that_are_no_message(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_page, "_RECORD_SECONDS", 0.01)
    for seed in range(200):
        with subtests.test(seed=seed):
            receive_spoilt_bytes(seed)


# ---- the watchdog's thread
def test_the_watchdog_carries_rounds_and_hears_of_an_end():
    pages = [Page.alone(rank, 2) for rank in range(2)]
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    watches = [watchdog.watch(page, Mirror(page, {1 - page.rank: end})) for page, end in zip(pages, ends, strict=True)]
    try:
        for serial in range(1, 20):
            for page in pages:
                page.write_round(serial, True, 3, b"%d" % serial)
            bounds.until(lambda serial=serial: not any(None in page.read_round(serial) for page in pages))
        watches[1].stop()
        bounds.until(lambda: watches[0].lost)
        assert watches[0].lost == (1, "its process has ended")
        assert pages[0].loss() == (1, "its process has ended")
    finally:
        for one in watches:
            one.stop()


# ---- connections
class _Threads:
    """Ranks that are threads, as far as the exchange needs them."""

    def __init__(self, n: int) -> None:
        self._n, self._barrier = n, threading.Barrier(n)
        self._rows: list[Any] = [None] * n

    def of(self, rank: int) -> Any:
        world = self

        class Comm:
            size = world._n

            def gather(self, sent: Any, received: Any) -> Any:
                world._rows[rank] = sent.copy()
                world._barrier.wait(HANG)
                received.reshape(-1)[:] = np.concatenate([row.reshape(-1) for row in world._rows])
                world._barrier.wait(HANG)
                return self

            def Test(self) -> bool:
                return True

        made = Comm()
        made.rank = rank
        return made


@pytest.fixture(autouse=True)
def _no_rank_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAX_SECONDS", "_GREET_SECONDS"):
        monkeypatch.setattr(connections, name, LONG)


def connect_all(n: int) -> list[Any]:
    world = _Threads(n)

    def one(rank: int) -> Any:
        try:
            return connections.connect(world.of(rank), "this machine", clock.now() + 2 * LONG)
        except UnsupportedError as error:
            return error

    return in_threads([lambda rank=rank: one(rank) for rank in range(n)])


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_every_two_ranks_are_connected(n: int):
    made = connect_all(n)
    for rank, own in enumerate(made):
        for other, connection in own.items():
            connection.sendall(b"%d" % rank)
            assert other != rank
        assert len(own) == n - 1
    for own in made:
        for other, connection in own.items():
            connection.setblocking(True)
            assert connection.recv(10) == b"%d" % other
            connection.close()


CLAIM = struct.Struct("<I32s32s")  # rank, challenge, proof


def test_a_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch):
    """Who does not know the secret takes no rank's place, says he what he will."""
    listen, strangers = connections.Socket.listen, []

    def and_a_stranger(server: connections.Socket, backlog: int) -> None:
        listen(server, backlog)
        rank_1 = CLAIM.pack(1, bytes(32), bytes(32))  # the awaited rank, without the secret
        for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64), rank_1):
            strangers.append(socket.create_connection(("127.0.0.1", server.getsockname()[1])))
            strangers[-1].sendall(greeting)
            strangers[-1].shutdown(socket.SHUT_WR)

    monkeypatch.setattr(connections.Socket, "listen", and_a_stranger)
    made = connect_all(2)
    assert len(strangers) == 6
    for stranger in strangers:
        assert len(all_of(stranger)) in (0, 32), "more than a challenge"
        stranger.close()
    for own in made:
        assert len(own) == 1
        for connection in own.values():
            connection.close()


def all_of(connection: socket.socket) -> bytes:
    """All that still arrives until the other side closes."""
    data = b""
    with suppress(ConnectionResetError):  # closed before all was read
        while more := connection.recv(1000):
            data += more
    return data


@contextmanager
def strangers(monkeypatch: pytest.MonkeyPatch, visit: Callable[[socket.socket], object]) -> Iterator[None]:
    """Every port at which a rank listens is visited by strangers without end: they come before the ranks, and stay."""
    usual, ended, visitors = connections.Socket.listen, threading.Event(), []

    def come(port: int) -> None:
        came = []
        while not ended.is_set():
            with suppress(OSError):  # the rank listens no more
                came.append(socket.create_connection(("127.0.0.1", port), timeout=0.1))
                visit(came[-1])
            for one in came[:-200]:
                one.close()
            time.sleep(1e-3)
        for one in came:
            one.close()

    def listen(server: connections.Socket, backlog: int) -> None:
        usual(server, backlog)
        visitor = threading.Thread(target=come, args=[server.getsockname()[1]], daemon=True)
        visitor.start()
        visitors.append(visitor)

    monkeypatch.setattr(connections.Socket, "listen", listen)
    try:
        yield
    finally:
        monkeypatch.undo()
        ended.set()
        assert visitors
        for visitor in visitors:
            visitor.join()


VISITS: list[Callable[[socket.socket], object]] = [
    lambda stranger: None,
    lambda stranger: stranger.sendall(bytes(CLAIM.size - 1)),
    lambda stranger: stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100)),
    lambda stranger: stranger.close(),
]


@pytest.mark.parametrize("visit", VISITS, ids=["silent", "a greeting in part", "another protocol", "gone again"])
def test_strangers_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch, visit: Callable[[socket.socket], object]):
    before = len(os.listdir("/proc/self/fd"))
    with strangers(monkeypatch, visit):
        made = connect_all(3)
    for own in made:
        assert len(own) == 2, made
        for connection in own.values():
            connection.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_start_up_ends_though_strangers_come_without_end(monkeypatch: pytest.MonkeyPatch):
    """A rank that does not come is missed at the deadline."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(connections, "_MAX_SECONDS", 0.5)
    monkeypatch.setattr(connections, "_addresses", lambda place, own: [])
    with strangers(monkeypatch, lambda stranger: stranger.sendall(bytes(CLAIM.size))):
        found = connect_all(2)
    assert "rank 0 has no connection to rank 1: timed out" in str(found[0])
    assert "rank 1 has no connection to rank 0: it has no address" in str(found[0])
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rank_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "_MAX_SECONDS", 0.3)
    monkeypatch.setattr(connections.Socket, "connect_ex", lambda *_: errno.ECONNREFUSED)
    found = connect_all(2)
    assert all(isinstance(one, UnsupportedError) for one in found), found
    assert "connecting the ranks (is TCP between the hosts open?)" in str(found[0])
    assert re.search(r"rank 1 has no connection to rank 0: 127\.0\.0\.1 port \d+: Connection refused", str(found[0]))


@pytest.mark.parametrize(("most", "value"), [("_MAX_GUESTS", 1), ("_MAX_VISITS", 1)])
def test_ranks_take_turns_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch, most: str, value: int):
    """A guest that is sent away for the want of room comes again."""
    monkeypatch.setattr(connections, most, value)
    made = connect_all(6)
    assert [len(own) for own in made] == 6 * [5], made
    for own in made:
        for connection in own.values():
            connection.close()


# ---- two ranks, and whoever else listens at an address that both their hosts have
SECRET = os.urandom(32)


def places(port: int, *addresses: str, n: int = 2) -> Any:
    """What the ranks have told each other: rank 0 listens at one of these addresses."""
    made = np.concatenate(
        [exchange.message(connections._PLACE, network=f"of rank {rank}", port=port * (rank == 0)) for rank in range(n)]
    )
    made[0]["addresses"] = ",".join(addresses)
    return made


def hold(listener: socket.socket, rank: int, told: Any) -> dict[int, socket.socket]:
    with listener, connections._Meeting(listener, SECRET, rank, told) as meeting:
        return meeting.hold(time.monotonic() + 30)


Impostor = Callable[[socket.socket, Callable[[], None]], object]  # gets who has connected, and what lets rank 0 begin


def meet_beside(*impostors: Impostor) -> None:
    """Ranks 0 and 1 meet, while each impostor listens at the port and another address of rank 0."""
    real = socket.create_server(("127.0.0.1", 0))
    port = real.getsockname()[1]
    names = [f"127.0.0.{number}" for number in range(2, 2 + len(impostors))]
    told = places(port, *names, "127.0.0.1")
    with contextlib.ExitStack() as stack:
        begins = [stack.enter_context(listens(one, name, port)) for one, name in zip(impostors, names, strict=True)]

        def first() -> dict[int, socket.socket]:
            assert all(begin.wait(60) for begin in begins)
            return hold(real, 0, told)

        zero, one = in_threads([first, lambda: hold(socket.create_server(("127.0.0.1", 0)), 1, told)], 60)
    assert [*zero, *one] == [1, 0]
    assert one[0].getpeername() == ("127.0.0.1", port)
    zero[1].setblocking(True)
    one[0].sendall(b"it is me")
    assert zero[1].recv(10) == b"it is me"
    for connection in (zero[1], one[0]):
        connection.close()


@contextmanager
def listens(impostor: Impostor, name: str, port: int = 0) -> Iterator[Any]:
    """An impostor at an address; an event when rank 0 may begin, which has his port."""
    begin, ended = threading.Event(), threading.Event()
    with socket.create_server((name, port)) as listener:
        listener.settimeout(0.05)
        begin.port = listener.getsockname()[1]  # type: ignore[attr-defined]

        def serve() -> None:
            while not ended.is_set():
                with suppress(OSError):  # nobody is there, or has gone
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(HANG)
                        impostor(connection, begin.set)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield begin
        finally:
            ended.set()
            thread.join()


HEARD: list[bytes] = []


def guesses(visitor: socket.socket, begin: Callable[[], None]) -> None:
    visitor.sendall(bytes(32))
    HEARD.append(visitor.recv(1000))
    visitor.sendall(bytes(32))
    begin()


def reflects(visitor: socket.socket, begin: Callable[[], None]) -> None:
    """He sends the visitor's own proof back."""
    visitor.sendall(bytes(32))
    HEARD.append(visitor.recv(1000))
    visitor.sendall(HEARD[-1][-32:])
    begin()


def goes(visitor: socket.socket, begin: Callable[[], None]) -> None:
    """He is visited again and again, and the others meanwhile."""
    HEARD.append(b"")
    if len(HEARD) > 1:
        begin()


@pytest.mark.parametrize("impostor", [guesses, reflects, goes])
def test_whoever_listens_at_an_address_of_a_rank_is_not_taken_for_it(impostor: Impostor):
    """As at 172.17.0.1, which every host with Docker has: he gets no secret, and the next address counts."""
    HEARD.clear()
    meet_beside(impostor)
    assert HEARD
    assert SECRET not in b"".join(HEARD)


def test_all_addresses_are_tried_at_once():
    """Rank 0 answers only when all those who stay silent have been visited."""

    def stays_silent(visitor: socket.socket, begin: Callable[[], None]) -> None:
        begin()
        all_of(visitor)

    meet_beside(*12 * [stays_silent])


def test_nobody_but_impostors():
    with (
        listens(guesses, "127.0.0.2") as there,
        pytest.raises(UnsupportedError, match=r"0: 127\.0\.0\.2 port \d+: another program answers, which"),
    ):
        hold(socket.create_server(("127.0.0.1", 0)), 1, places(there.port, "127.0.0.2"))


def test_an_address_that_stays_silent_is_named():
    told = places(1, "127.0.0.2")
    with socket.create_server(("127.0.0.2", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as listener:
        told[0]["port"] = silent.getsockname()[1]
        with (
            connections._Meeting(listener, SECRET, 1, told) as meeting,
            pytest.raises(UnsupportedError, match=r"to rank 0: timed out; 127\.0\.0\.2 port \d+: no answer$"),
        ):
            meeting.hold(time.monotonic() + 0.3)


def test_addresses_of_both_hosts_are_left_out():
    """They lead back to the host that tries them."""
    told = places(1, "172.17.0.1", "10.0.0.1", "192.168.122.1", "10.0.0.1")
    told[1]["addresses"] = "10.0.0.2,172.17.0.1,192.168.122.1"
    assert connections._addresses(told[0], told[1]) == ["10.0.0.1"]
    told[1]["addresses"] = "10.0.0.1,172.17.0.1,192.168.122.1"  # of one host after all, whose networks are not told
    assert connections._addresses(told[0], told[1]) == ["172.17.0.1", "10.0.0.1", "192.168.122.1"]
    told[1]["network"] = told[0]["network"]
    assert connections._addresses(told[0], told[1]) == ["127.0.0.1"]


def test_all_addresses_of_a_host_are_told_as_far_as_they_fit():
    """And none is cut: what is left of one may be another host's."""
    for count in (1, 24, 64, 500):
        own = [f"10.200.{100 + index // 256}.{index % 256}" for index in range(count)]
        place = exchange.message(connections._PLACE, addresses=connections.joined(own))[0]
        told = bytes(place["addresses"]).decode().split(",")
        assert told == own[: len(told)]
        assert len(told) >= min(count, 64)
