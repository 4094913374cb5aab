"""``mpirun -n 2 python -m tests.mpi.documents PAGE...`` runs the code of pages with the libraries that are installed.

Programs that need PyTorch or NCCL run here, too, with the environment variables of torchrun. tests/sim/documents.py
runs all others. NCCL needs a GPU for each rank.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.shared import documents, worker
from tests.shared.world import WORLD

MODULES = {None: "numpy", "needs PyTorch": "torch", "needs NCCL": "cupy"}  # by the reason of a fragment


def main() -> None:
    for page in map(Path, sys.argv[1:]):
        names: dict[str, Any] = {"__name__": "__main__"}
        for piece in documents.pieces(page):
            module = MODULES.get(piece.fragment)
            if module is None or importlib.util.find_spec(module) is None:
                continue
            os.environ |= {name: str(WORLD.rank) for name in ("RANK", "LOCAL_RANK")}
            os.environ |= {"WORLD_SIZE": str(WORLD.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            exec(piece.compiled(), names)
            WORLD.Barrier()
            if WORLD.rank == 0:
                print(f"{piece.page}, line {piece.line}: right", flush=True)


def free_port() -> str:
    """The same one on every rank, a new one for each program."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(WORLD.bcast(listener.getsockname()[1]))


if __name__ == "__main__":
    worker.run(main)
