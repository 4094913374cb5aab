"""A sweep, and a small graph staged and direct, under compute-sanitizer: ``mpirun -n 2 python tests/gpu/memcheck.py``.

Arrays end where their memory does, and come from no pool but the graphs': what reads or writes behind one is found.
"""

from __future__ import annotations

import os
import shutil
import sys

INSIDE = "--inside"  # this is the process that the tool watches


def start() -> None:
    """Becomes the tool, which runs this file again."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed", flush=True)
        return
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    os.execv(tool, [tool, *options, sys.executable, __file__, INSIDE, "--cases", "40", "--largest", "20000", "--tight"])


def small_graphs() -> None:
    """Odd sizes and tails, recorded and replayed."""
    import cupy
    import numpy as np

    import ipcreduce

    for algorithm in (None, "one_shot", "two_shot", "direct"):
        with ipcreduce.Communicator(algorithm=algorithm) as comm, ipcreduce.Graph(comm) as graph:
            sources = [cupy.zeros(count, np.float16) for count in (1, 511, 4096, 10_001)]
            with graph.record():
                results = [comm.allreduce(source * 2) for source in sources]
            for turn in range(3):
                for source in sources:
                    source.fill(comm.rank + turn)
                graph.replay()
                for result in results:
                    assert (result.get() == 2 * sum(rank + turn for rank in range(comm.size))).all(), algorithm
            if comm.rank == 0:
                print(f"a small graph, {algorithm or 'planned'}: right", flush=True)


def main() -> None:
    from tests.gpu import sweep

    sweep.main()
    small_graphs()


if __name__ == "__main__":
    if INSIDE not in sys.argv:
        start()
    else:
        from tests import worker

        sys.argv.remove(INSIDE)
        worker.run(main)
