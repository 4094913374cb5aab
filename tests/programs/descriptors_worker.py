"""A rank among plain processes that share a folder, which hands a descriptor over: see tests/unit/test_descriptors.py.

``python -m tests.programs.descriptors_worker FOLDER RANK RANKS SECONDS WHAT...``. It prints what has come of each.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ipcreduce import clock
from ipcreduce.errors import CudaError, IpcReduceError
from ipcreduce.ranks import descriptors


class Ranks:
    """As much of the ranks as an exchange needs."""

    call, silence, left = 0, "no answer", False

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size, self.folder, self._number = rank, size, folder, itertools.count()

    def gather(self, sent: np.ndarray, received: np.ndarray) -> Any:
        number = next(self._number)
        files = [self.folder / f"{number}-{rank}" for rank in range(self.size)]
        partial = files[self.rank].with_suffix(".partial")
        partial.write_bytes(sent.tobytes())
        partial.rename(files[self.rank])

        def test() -> bool:
            if not all(file.exists() for file in files):
                if (self.folder / "dead").exists():  # what passes until the others wait no more
                    clock.now = lambda: time.monotonic() + 1000
                return False
            received[:] = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
            return True

        return types.SimpleNamespace(Test=test)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    folder, rank, size, seconds = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])
    ranks = Ranks(folder, rank, size)
    for what in sys.argv[5:]:
        before = open_files()
        print(said(ranks, what, seconds), flush=True)
        assert open_files() == before, f"{open_files() - before} descriptors are left"


def said(ranks: Ranks, what: str, seconds: float) -> str:
    """What comes of it, if the last rank does ``what``."""
    last = ranks.rank == ranks.size - 1
    nbytes = 4096 * (2 if what == "differs" and last else 1)

    def export() -> int:
        if what == "cannot" and last:
            raise CudaError("cuMemExportToShareableHandle", 1, "no")
        descriptor = os.memfd_create("memory")
        os.write(descriptor, bytes([ranks.rank]) * nbytes)
        return descriptor

    class Mailbox(descriptors.Mailbox):
        def send(self, *given: Any) -> None:
            super().send(*given)
            if what == "dies" and last:  # between two messages
                (ranks.folder / "dead").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raises" and last:
                raise KeyboardInterrupt

    with mock.patch.object(descriptors, "Mailbox", Mailbox):
        try:
            with descriptors.handed_over(ranks, export, nbytes, clock.now() + seconds, "memory") as found:
                assert [os.pread(one, 9, 0) for one in found] == [bytes([of]) * 9 for of in range(ranks.size)]
                assert not any(os.get_inheritable(one) for one in found)
            return "right"
        except (IpcReduceError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
