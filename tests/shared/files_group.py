"""A group of plain processes over files, without MPI: one of them may be killed, which under mpirun ends them all."""

from __future__ import annotations

import itertools
import time
from pathlib import Path


class Files:
    """A group over files of a directory. Its allgather blocks until all have come, or until one has failed."""

    def __init__(self, directory: str | Path, rank: int, size: int) -> None:
        self.directory, self.rank, self.size = Path(directory), rank, size
        self._numbers = itertools.count()

    def allgather(self, data: bytes) -> list[bytes]:
        number = next(self._numbers)
        files = [self.directory / f"{number}-{rank}" for rank in range(self.size)]
        self.write(files[self.rank].name, data)
        while not all(file.exists() for file in files):
            if (self.directory / "failed").exists():
                raise ConnectionResetError("a rank has failed")
            time.sleep(1e-3)
        return [file.read_bytes() for file in files]

    def write(self, name: str, data: bytes = b"") -> None:
        partial = self.directory / f"{name}.partial.{self.rank}"
        partial.write_bytes(data)
        partial.rename(self.directory / name)

    def await_file(self, name: str) -> None:
        while not (self.directory / name).exists():
            time.sleep(1e-3)

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1
