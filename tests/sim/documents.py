"""``mpirun -n 2 python -m tests.sim.documents PAGE...`` runs the code in pages: see tests/shared/documents.py.

With ``--first`` it runs the first block of each page.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests import simulated
from tests.shared import documents, worker

os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")
simulated.install()
sys.modules["torch"] = None  # type: ignore[assignment]  # not to be found: it knows only real GPUs


from ipcreduce import Communicator, Graph, GraphRunner  # noqa: E402
from tests.shared.world import WORLD  # noqa: E402


def main() -> None:
    import cupy

    cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    first = sys.argv[1:] == ["--first"]
    for page in documents.pages() if first else map(Path, sys.argv[1:]):
        names: dict[str, Any] = {"__name__": "__main__"}
        for piece in documents.first_pieces(page) if first else documents.pieces(page):
            if piece.fragment is None:
                exec(piece.compiled(), names)
                WORLD.Barrier()
            if WORLD.rank == 0:
                verdict = "right" if piece.fragment is None else "a fragment"
                print(f"{piece.page}, line {piece.line}: {verdict}", flush=True)
        for kind in (GraphRunner, Graph, Communicator):  # in this order, on every rank alike
            for value in names.values():
                if isinstance(value, kind):
                    value.close()


if __name__ == "__main__":
    worker.run(main)
