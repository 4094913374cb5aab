"""An MPI communicator among plain processes, of which one may be killed or end: under mpirun that ends them all."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI


class ByFiles(MPI.Intracomm):
    """As much of an MPI communicator as the library uses, among processes that share a directory."""

    def __new__(cls, *_: Any) -> ByFiles:
        return super().__new__(cls, MPI.COMM_SELF)

    def __init__(self, directory: str, rank: str, size: str) -> None:
        self._directory, self._rank, self._size = Path(directory), int(rank), int(size)
        self._messages, self._copies = itertools.count(), itertools.count()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def Idup(self) -> tuple[ByFiles, Any]:
        copy = self._directory / f"copy{next(self._copies)}"
        copy.mkdir(exist_ok=True)
        return ByFiles(str(copy), str(self._rank), str(self._size)), self._exchange(b"", lambda _: None)

    def Iallgather(self, sent: Any, received: Any) -> Any:
        return self._exchange(sent.tobytes(), lambda of_all: self._fill(received, of_all))

    def Ialltoall(self, sent: Any, received: Any) -> Any:
        part = slice(self._rank * sent[0].nbytes, (self._rank + 1) * sent[0].nbytes)
        return self._exchange(sent.tobytes(), lambda of_all: self._fill(received, [data[part] for data in of_all]))

    def Free(self) -> None:
        pass

    @staticmethod
    def _fill(received: Any, parts: list[bytes]) -> None:
        received.reshape(-1)[:] = np.frombuffer(b"".join(parts), np.uint8)

    def _exchange(self, data: bytes, receive: Callable[[list[bytes]], None]) -> Any:
        number = next(self._messages)
        files = [self._directory / f"{number}-{rank}" for rank in range(self._size)]
        partial = files[self._rank].with_suffix(".partial")
        partial.write_bytes(data)
        partial.rename(files[self._rank])

        def test() -> bool:
            if not all(file.exists() for file in files):
                return False
            receive([file.read_bytes() for file in files])
            return True

        return types.SimpleNamespace(Test=test)
