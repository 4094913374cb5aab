"""Descriptors that go from process to process: between ranks, and from strangers."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ipcreduce import clock
from ipcreduce.errors import UnsupportedError
from ipcreduce.ranks import descriptors
from ipcreduce.ranks.descriptors import Mailbox
from tests.programs.descriptors_worker import Ranks, open_files
from tests.tools.machine import ROOT

NAME = f"ipcreduce-test-{os.getpid()}"  # of two mailboxes, behind which stands the number of the rank
# A process that sends a descriptor to a name; as another user, if there is one more argument.
SENDER = """
import array, os, socket, sys
descriptor = os.memfd_create("theirs")
os.write(descriptor, b"theirs")
if sys.argv[2:]:
    os.setuid(65534)
rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.setblocking(False)
try:
    while True:
        sender.sendmsg([b"?"], [rights], 0, b"\\0" + sys.argv[1].encode())
except OSError as error:
    print(os.getpid(), type(error).__name__)
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


def test_an_interrupt_as_a_descriptor_is_closed(tmp_path: Path):
    """Within the function that closes it, before that has begun."""
    before = open_files()

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in ("close", "_close") and "ipcreduce" in frame.f_code.co_filename:
            sys.settrace(None)
            raise KeyboardInterrupt

    deadline = clock.now() + 60
    rank = Ranks(tmp_path, 0, 1)
    with (
        contextlib.suppress(KeyboardInterrupt),
        descriptors.handed_over(rank, lambda: os.memfd_create("ours"), 4, deadline, "memory") as [one],
    ):
        assert os.fstat(one)
        sys.settrace(interrupt)
    assert sys.gettrace() is None, "it has come"
    gc.collect()
    assert open_files() == before


# ---- two mailboxes
@pytest.fixture
def mailboxes() -> Iterator[tuple[Mailbox, Mailbox]]:
    """Those of two ranks for each other. They must leave no descriptor open but those that were taken out."""
    before = open_files()
    pair = Mailbox(f"{NAME}-1"), Mailbox(f"{NAME}-2")
    yield pair
    for one in pair:
        one.close()
    assert open_files() <= before  # what other tests have left may go meanwhile


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("ours")
    os.write(descriptor, b"ours")
    yield descriptor
    os.close(descriptor)


def connect(mailboxes: tuple[Mailbox, Mailbox]) -> None:
    for own, other in ((1, 2), (2, 1)):
        mailboxes[own - 1].connect(f"{NAME}-{other}")


def filled_by_another(*user: str) -> tuple[int, str]:
    """The process that has sent descriptors to the first one's mailbox until that took no more, and has ended; why."""
    command = [sys.executable, "-I", "-S", "-c", SENDER, f"{NAME}-1", *user]
    pid, error = subprocess.run(command, check=True, text=True, stdout=-1, timeout=60).stdout.split()
    return int(pid), error


def taken(mailbox: Mailbox, pid: int, count: int = 1) -> list[bytes]:
    """The content behind each descriptor that is taken out."""
    found = mailbox.receive(1, pid, count)
    contents = [os.pread(one, 20, 0) for one in found]
    for one in found:
        os.close(one)
    return contents


def test_the_sender_may_be_gone(mailboxes: tuple[Mailbox, Mailbox]):
    assert taken(mailboxes[0], filled_by_another()[0]) == [b"theirs"]


@pytest.mark.parametrize("user", [[], ["nobody"]])
def test_who_fills_a_mailbox_keeps_nobody_out(mailboxes: tuple[Mailbox, Mailbox], memory: int, user: list[str]):
    """A stranger who comes before the ranks' mailboxes are connected is not heard; one who comes later cannot send."""
    if user and os.getuid():
        pytest.skip("only root can be another user")
    assert filled_by_another(*user)[1] == "BlockingIOError"
    connect(mailboxes)
    assert filled_by_another(*user)[1] == "PermissionError"
    for _ in range(2):
        mailboxes[1].send(memory)
    assert filled_by_another(*user)[1] == "PermissionError"
    assert [taken(mailboxes[0], os.getpid()) for _ in range(2)] == 2 * [[b"ours"]]


def test_a_process_that_is_no_rank_is_not_heard(mailboxes: tuple[Mailbox, Mailbox]):
    filled_by_another()
    connect(mailboxes)
    with pytest.raises(UnsupportedError, match=rf"no descriptor has come from rank 1, process {os.getpid()}: "):
        mailboxes[0].receive(1, os.getpid(), 1)


def test_another_user_is_not_heard(mailboxes: tuple[Mailbox, Mailbox], monkeypatch: pytest.MonkeyPatch):
    pid, _ = filled_by_another()
    with monkeypatch.context() as patched:
        patched.setattr(descriptors.os, "getuid", lambda: 4242)
        with pytest.raises(UnsupportedError, match="as one user"):
            mailboxes[0].receive(1, pid, 1)
    if os.getuid() == 0:
        pid, _ = filled_by_another("nobody")
        with pytest.raises(UnsupportedError, match="as one user"):
            mailboxes[0].receive(1, pid, 1)


def test_several_at_once(mailboxes: tuple[Mailbox, Mailbox], memory: int):
    """In their order, and only as many as are due."""
    connect(mailboxes)
    other = os.memfd_create("other")
    os.write(other, b"other")
    mailboxes[1].send(memory)
    mailboxes[1].send(memory, other, memory)
    mailboxes[1].send(*[memory] * descriptors.MAX_DESCRIPTORS)
    os.close(other)
    assert taken(mailboxes[0], os.getpid(), 3) == [b"ours", b"other", b"ours"]
    assert taken(mailboxes[0], os.getpid(), descriptors.MAX_DESCRIPTORS) == [b"ours"] * descriptors.MAX_DESCRIPTORS


def test_messages_that_are_none(mailboxes: tuple[Mailbox, Mailbox], memory: int):
    """Empty, too long, without a descriptor, with several."""
    connect(mailboxes)
    rights = descriptors.socket.SOL_SOCKET, descriptors.socket.SCM_RIGHTS
    for data, more in ((b"", []), (b"?", []), (b"?" * 9, [memory, memory]), (b"?", [memory] * 9)):
        ancillary = [(*rights, descriptors.array.array("i", more))] if more else []
        mailboxes[1]._socket.sendmsg([data], ancillary)
    mailboxes[1].send(memory)
    assert taken(mailboxes[0], os.getpid()) == [b"ours"]


def test_a_mailbox_that_is_gone(mailboxes: tuple[Mailbox, Mailbox], memory: int):
    """Whoever takes its name gets nothing."""
    connect(mailboxes)
    mailboxes[0].close()
    thief = Mailbox(f"{NAME}-1")
    with pytest.raises(ConnectionRefusedError):
        mailboxes[1].send(memory)
    thief.close()
    with pytest.raises(ConnectionRefusedError):
        mailboxes[1].connect(f"{NAME}-1")


@pytest.mark.parametrize("count", [1, 3])
def test_no_room_for_a_descriptor(mailboxes: tuple[Mailbox, Mailbox], memory: int, count: int):
    connect(mailboxes)
    mailboxes[1].send(*[memory] * count)
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
            mailboxes[0].receive(1, os.getpid(), count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in copies:
            os.close(one)


def test_no_mailbox_to_be_had(mailboxes: tuple[Mailbox, Mailbox]):
    """Its descriptor is closed."""
    before = open_files()
    with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        Mailbox(f"{NAME}-1")
    assert open_files() == before
