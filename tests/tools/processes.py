"""Processes found by a word in their environment, whoever their parent is, and what they leave in /dev/shm."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PASSES = 500  # of kill(), 10 ms apart
SHARED_MEMORY = Path("/dev/shm")
_OF_MPI = ("mpich_shm_*", "sm_segment.*", "vader_segment.*")  # the names that MPICH and Open MPI give their files there
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in Linux's sched.h: the flag of a process that has no program


def marked(word: str) -> Iterator[Path]:
    """The folders in /proc of the processes that have ``word``, which is NAME=VALUE, in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if word.encode() in words(process):
                yield process


def words(process: Path) -> list[bytes]:
    """A process's environment. :raises OSError: if it is gone, or another user's."""
    return (process / "environ").read_bytes().split(b"\0")


def kill(word: str) -> None:
    """Kill the processes that have ``word`` in their environment, and those that they start meanwhile.

    What they leave in /dev/shm is removed.
    A process that is just starting a program shows an empty environment, so it is waited for and looked at again.
    """
    for _ in range(_PASSES):
        found = [int(process.name) for process in marked(word)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found and not any(map(_starts_a_program, Path("/proc").glob("[0-9]*"))):
            break
        time.sleep(0.01)
    remove_left()


def _starts_a_program(process: Path) -> bool:
    with contextlib.suppress(OSError):
        if not (process / "environ").read_bytes():
            state, *fields = (process / "stat").read_text().rpartition(")")[2].split()
            return state not in "ZX" and not int(fields[5]) & _KERNEL_THREAD
    return False


def remove_left() -> None:
    """Remove what MPI's killed ranks of this user have left in /dev/shm: for whoever has killed some."""
    for file in left():
        with contextlib.suppress(FileNotFoundError):  # another one was quicker
            if any(file.match(name) for name in _OF_MPI) and file.lstat().st_uid == os.getuid():
                file.unlink()


def left() -> set[Path]:
    """The files in /dev/shm that no process has open or mapped; not those that this user cannot open."""
    return {file for file in SHARED_MEMORY.glob("*") if _is_left(file)}


def _is_left(file: Path) -> bool:
    """Ask for a lease, which Linux grants of a file that is open nowhere else, be it in another container."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # for who opens it now; SIGIO would end this process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
