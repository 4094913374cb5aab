"""The mirror of a control page, for ranks that share no memory: each rank copies its own part to every other, over TCP.

The page's readers and writers are the same as on one host. Copies are of states, not of events: a message has this
rank's block if that has changed, the keys of its calls since the last message, and the abort word if it has raised it.
So a rank that could not send for a while leaves nothing out. A message that shows a meeting shows also every abort
raised before it. So none arrives later than the meeting after which the abort word is cleared.

Calls are compared when their keys have arrived (comparison.py), not before they start: an exchange between hosts takes
longer than a call.
"""

from __future__ import annotations

import struct

from .. import clock
from ..originals import RLock, Socket, time
from .control_page import Page
from .owned import CLOSED_BY_PROGRAM, Known

_MAX_UNREAD = 64 << 10  # bytes: a process that is stopped must not fill the connection, which would then be given up
_READ_BYTES = 1 << 18
_ENDED = "its process has ended"

# Bytes after the head; bytes of messages read so far; times the abort word was raised, and its value; the number of
# the last call; the first key's call, and how many there are; the first text's index, and how many; bytes of the block.
_HEAD = struct.Struct("<QQIIQQIIII")


class _Peer:
    """The connection to one rank, with the states up to which it has been told."""

    def __init__(self, rank: int, connection: Socket) -> None:
        self.rank, self.connection, self.descriptor = rank, connection, Known(connection.fileno())
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.sent = self.read = self.read_told = self.acknowledged = 0  # bytes of messages
        self.version = self.aborts = 0
        self.last = (0, 0)  # the number of our last call, and its key, which changes if it is made anew
        self.texts = (0, 0)  # (restarts of the table, texts)

    def close(self) -> None:
        """Close the connection, unless the program has: its number may be another file's."""
        if self.descriptor.is_ours:
            self.connection.close()
        else:
            self.connection.detach()


class Mirror:
    """The connections of one rank's page."""

    def __init__(self, page: Page, connections: dict[int, Socket]) -> None:
        """:param connections: by rank; connected, and not blocking."""
        self._page = page
        self._turn = RLock()
        self._peers = {connection.fileno(): _Peer(rank, connection) for rank, connection in connections.items()}
        self._most = page.calls.most_news + len(page.read_block())  # bytes after a head

    def descriptors(self) -> list[int]:
        """The connections that are open."""
        return [number for number, peer in list(self._peers.items()) if peer.descriptor.is_ours]

    # ---- receiving
    def receive(self) -> list[tuple[int, str]]:
        """Store all that has arrived. Returns (rank, why) for each connection that has ended."""
        with self._turn:
            ended = [(peer.rank, why) for peer in self._peers.values() if (why := self._receive(peer)) is not None]
            for descriptor, peer in list(self._peers.items()):
                if peer.rank in dict(ended):
                    self._close(descriptor)
        return ended

    def _receive(self, peer: _Peer) -> str | None:
        """The reason for which the connection has ended; None while it stands."""
        if not peer.descriptor.is_ours:
            return f"the connection to it has ended ({CLOSED_BY_PROGRAM})"
        why = None
        try:
            while data := peer.connection.recv(_READ_BYTES):
                peer.incoming += data
            why = _ENDED  # the system closes its connections
        except BlockingIOError:
            pass
        except ConnectionResetError:  # it has ended before it has read all
            why = _ENDED
        except TimeoutError:
            why = "its host does not answer any more"
        except OSError as error:
            why = f"the connection to it has ended ({error.strerror})"
        try:
            self._read_messages(peer)
        except (ValueError, struct.error):
            return "it sent something that is no message of ipcreduce"
        return why

    def _read_messages(self, peer: _Peer) -> None:
        """Store the messages that have arrived whole. :raises ValueError: if something else has arrived."""
        page, incoming = self._page, peer.incoming
        while len(incoming) >= _HEAD.size:
            nbytes, read, aborts, word, number, first, keys, text, texts, block = _HEAD.unpack_from(incoming)
            if nbytes > self._most:
                raise ValueError("too long")
            if len(incoming) < _HEAD.size + nbytes:
                return
            body = bytes(incoming[_HEAD.size : _HEAD.size + nbytes])
            del incoming[: _HEAD.size + nbytes]
            peer.read += nbytes
            peer.acknowledged = read
            page.calls.store(peer.rank, number, first, keys, text, texts, body[: nbytes - block])  # before the state
            page.store(peer.rank, body[nbytes - block :] if block else b"", aborts, word)

    # ---- sending
    def send(self) -> None:
        """Tell every rank what it has not been told yet, as far as its connection takes it."""
        with self._turn:
            for peer in [peer for peer in self._peers.values() if peer.descriptor.is_ours]:
                if not peer.outgoing:
                    peer.outgoing += self._news(peer)
                try:
                    while peer.outgoing:
                        del peer.outgoing[: peer.connection.send(peer.outgoing)]
                except BlockingIOError:
                    pass
                except OSError:  # it has gone, which receive() finds: nothing is left to say to it
                    peer.outgoing.clear()

    def _news(self, peer: _Peer) -> bytes:
        page, calls = self._page, self._page.calls
        full = peer.sent - peer.acknowledged > _MAX_UNREAD
        version = page.version  # before the block; the aborts after it
        block = page.read_block() if version != peer.version else b""
        # After the block: a rank that sees the round of a call compares calls next. Before the keys, and these before
        # their texts.
        number = calls.number[0]
        last = number, calls.own_key(number)
        first, keys = (0, b"") if full or last == peer.last else calls.keys_from(peer.last[0], number)
        texts = calls.restarts, len(calls.agreed)
        begin = peer.texts[1] if peer.texts[0] == texts[0] else 0
        new_texts = b"" if full else calls.own_texts(begin, texts[1])
        raised = page.aborts
        aborts = raised - peer.aborts
        body = keys + new_texts + block
        if not body and not aborts and peer.read - peer.read_told < _MAX_UNREAD // 4:
            return b""
        if not full:
            peer.last, peer.texts = last, texts
        peer.version, peer.aborts, peer.read_told = version, raised, peer.read
        peer.sent += len(body)
        head = _HEAD.pack(
            len(body), peer.read, aborts, page.abort_word[0], peer.last[0], first, len(keys) // calls.KEY_BYTES,
            begin, len(new_texts) // calls.TEXT_BYTES, len(block),
        )  # fmt: skip
        return head + body

    # ---- ends
    def close(self, seconds: float) -> None:
        """Send what is left to say, for up to ``seconds``, and close the connections."""
        deadline = clock.now() + seconds
        with self._turn:
            for _ in range(2):  # what a connection had not taken yet, and then the news after that
                self.send()
                while any(peer.outgoing for peer in self._peers.values()) and clock.now() < deadline:
                    time.sleep(1e-3)
                    self.send()
            for descriptor in list(self._peers):
                self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._peers.pop(descriptor).close()  # first: after an interrupt the last reference closes the connection

    def forked(self) -> None:
        """Close a forked child's copies of the connections, or nobody would see the parent's end."""
        for peer in self._peers.values():
            peer.close()
