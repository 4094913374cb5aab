"""Descriptors that go from process to process: between ranks, and from strangers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcreduce.errors import UnsupportedError
from ipcreduce.ranks import descriptors
from ipcreduce.ranks.descriptors import Mailbox
from tests.programs.descriptors_worker import open_files
from tests.tools.machine import ROOT

ONE = dict.fromkeys(range(9), 1)
# A process that sends a descriptor, as rank sys.argv[2]; as another user, if there is one more argument.
SENDER = """
import array, os, socket, sys
descriptor = os.memfd_create("theirs")
os.write(descriptor, b"theirs")
if sys.argv[3:]:
    os.setuid(65534)
rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])
data = int(sys.argv[2]).to_bytes(4, "little")
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendmsg([data], [rights], 0, b"\\0" + sys.argv[1].encode())
print(os.getpid())
"""


def ranks(folder: Path, size: int, *whats: str, seconds: float = 60, absent: tuple[int, ...] = ()) -> list[list[str]]:
    """What has come of each of ``whats`` on each of the ranks that come; less if it was killed."""
    command = [sys.executable, "-m", "tests.programs.descriptors_worker", folder]
    running = [
        subprocess.Popen([*command, str(rank), str(size), str(seconds), *whats], cwd=ROOT, text=True, stdout=-1)
        for rank in range(size) if rank not in absent
    ]  # fmt: skip
    said = [one.communicate(timeout=60)[0].splitlines() for one in running]
    assert {one.returncode for one in running} <= {0, -9}
    return said


def test_every_rank_has_the_descriptors_of_all_or_none_has(tmp_path: Path):
    cannot = "exporting memory failed on 1 of 3 ranks: rank 2: cuMemExportToShareableHandle failed: no (1)"
    differ = "memory differ in size: [4096, 4096, 8192] bytes"
    for rank, said in enumerate(ranks(tmp_path, 3, "right", "cannot", "differs", "right", "raises")):
        assert [said[0], said[1], said[3]] == ["right", f"Agreed: {cannot}", "right"]
        assert said[2].startswith("Agreed: ")
        assert differ in said[2]
        if rank < 2:
            assert said[4].startswith("PeerFailedError: ")
            assert "rank 2 has left start-up (KeyboardInterrupt)" in said[4]
        else:
            assert said[4] == "KeyboardInterrupt: "


def test_a_rank_that_dies_among_its_messages(tmp_path: Path):
    *others, own = ranks(tmp_path, 3, "dies")
    assert own == []
    assert all(said.startswith("PeerTimeoutError: ") for [said] in others), others


def test_a_rank_that_never_comes(tmp_path: Path):
    for [said] in ranks(tmp_path, 3, "absent", seconds=0.5, absent=(1,)):
        assert said.startswith("PeerTimeoutError: ")
        assert "not all 3 ranks came to exporting memory" in said


# ---- one mailbox
@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """It must leave no descriptor open but those that were taken out."""
    before = open_files()
    made = Mailbox()
    yield made
    made.close()
    assert open_files() <= before  # what other tests have left may go meanwhile


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("ours")
    os.write(descriptor, b"ours")
    yield descriptor
    os.close(descriptor)


def sent_by_another(mailbox: Mailbox, rank: int = 1, *user: str) -> int:
    """The process that has sent a descriptor, and has ended."""
    command = [sys.executable, "-I", "-S", "-c", SENDER, mailbox.name, str(rank), *user]
    return int(subprocess.run(command, check=True, text=True, stdout=-1, timeout=60).stdout)


def taken(mailbox: Mailbox, pids: dict[int, int]) -> dict[int, bytes]:
    """The content behind each descriptor that is taken out."""
    found = mailbox.receive(pids, ONE)
    contents = {rank: os.pread(one, 20, 0) for rank, [one] in found.items()}
    for [one] in found.values():
        os.close(one)
    return contents


def test_the_sender_may_be_gone(mailbox: Mailbox):
    assert taken(mailbox, {1: sent_by_another(mailbox)}) == {1: b"theirs"}


def test_a_process_that_is_no_rank_is_not_heard(memory: int, mailbox: Mailbox):
    """It comes first, as another rank, and as the right one."""
    for rank in (0, 1, 7):
        sent_by_another(mailbox, rank)
    with pytest.raises(UnsupportedError, match=rf"no descriptor has come from rank 1, process {os.getpid()}: "):
        mailbox.receive({1: os.getpid()}, ONE)
    sent_by_another(mailbox)
    mailbox.send(mailbox.name, 1, memory)
    mailbox.send(mailbox.name, 2, memory)
    assert taken(mailbox, {1: os.getpid(), 2: os.getpid()}) == {1: b"ours", 2: b"ours"}


def test_another_user_is_not_heard(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch):
    pid = sent_by_another(mailbox)
    with monkeypatch.context() as patched:
        patched.setattr(descriptors.os, "getuid", lambda: 4242)
        with pytest.raises(UnsupportedError, match="as one user"):
            mailbox.receive({1: pid}, ONE)
    if os.getuid() == 0:
        pid = sent_by_another(mailbox, 1, "nobody")
        with pytest.raises(UnsupportedError, match="as one user"):
            mailbox.receive({1: pid}, ONE)


def test_what_came_is_closed_if_another_is_missing(memory: int, mailbox: Mailbox):
    mailbox.send(mailbox.name, 1, memory)
    with pytest.raises(UnsupportedError, match="no descriptor has come from rank 2"):
        mailbox.receive({1: os.getpid(), 2: os.getpid()}, ONE)


def test_several_at_once(memory: int, mailbox: Mailbox):
    """In their order, and only as many as are due."""
    other = os.memfd_create("other")
    os.write(other, b"other")
    mailbox.send(mailbox.name, 1, memory)
    mailbox.send(mailbox.name, 1, memory, other, memory)
    mailbox.send(mailbox.name, 1, *[memory] * descriptors.MOST)
    found = mailbox.receive({1: os.getpid()}, {1: 3})
    assert [os.pread(one, 20, 0) for one in found[1]] == [b"ours", b"other", b"ours"]
    most = mailbox.receive({1: os.getpid()}, {1: descriptors.MOST})
    for one in [other, *found[1], *most[1]]:
        os.close(one)


def test_messages_that_are_none(memory: int, mailbox: Mailbox):
    """Too short, too long, without a descriptor, with several, twice."""
    rights = descriptors.socket.SOL_SOCKET, descriptors.socket.SCM_RIGHTS
    there = b"\0" + mailbox.name.encode()
    for data, more in ((b"", []), (b"\1\0\0\0", []), (b"\1\0", [memory]), (b"\2\0\0\0\0", [memory])):
        ancillary = [(*rights, descriptors.array.array("i", more))] if more else []
        mailbox._socket.sendmsg([data], ancillary, 0, there)
    many = descriptors.array.array("i", [memory] * 9)
    mailbox._socket.sendmsg([b"\1\0\0\0"], [(*rights, many)], 0, there)
    mailbox.send(mailbox.name, 1, memory)
    mailbox.send(mailbox.name, 2, memory)
    assert taken(mailbox, {1: os.getpid(), 2: os.getpid()}) == {1: b"ours", 2: b"ours"}


def test_a_full_mailbox_keeps_nobody(memory: int, mailbox: Mailbox):
    def fill() -> None:
        while True:
            mailbox.send(mailbox.name, 5, memory)

    with pytest.raises(BlockingIOError):
        fill()


def test_a_mailbox_that_is_gone(memory: int, mailbox: Mailbox):
    other = Mailbox()
    other.close()
    with pytest.raises(ConnectionRefusedError):
        mailbox.send(other.name, 1, memory)


@pytest.mark.parametrize("count", [1, 3])
def test_no_room_for_a_descriptor(memory: int, mailbox: Mailbox, count: int):
    mailbox.send(mailbox.name, 1, *[memory] * count)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(map(int, os.listdir("/proc/self/fd"))) + 1 + count  # at least count numbers are free
    copies: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
        with contextlib.suppress(OSError):
            while True:
                copies.append(os.dup(memory))
        for _ in range(count - 1):  # one too few
            os.close(copies.pop())
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            mailbox.receive({1: os.getpid()}, {1: count})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in copies:
            os.close(one)


def test_no_name_is_used_twice():
    first, second = Mailbox(), Mailbox()
    assert first.name != second.name
    first.close()
    second.close()
