"""Processes found by a word in their environment, whoever their parent is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PASSES = 500  # of kill(), 10 ms apart
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

    A process that is just starting a program shows an empty environment, so it is waited for and looked at again.
    """
    for _ in range(_PASSES):
        found = [int(process.name) for process in marked(word)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found and not any(map(_starts_a_program, Path("/proc").glob("[0-9]*"))):
            return
        time.sleep(0.01)


def _starts_a_program(process: Path) -> bool:
    with contextlib.suppress(OSError):
        if not (process / "environ").read_bytes():
            state, *fields = (process / "stat").read_text().rpartition(")")[2].split()
            return state not in "ZX" and not int(fields[5]) & _KERNEL_THREAD
    return False
