"""The matrix of calls. ``mpirun -n 2 python -m tests.matrix BACKEND [--sim] [--way WORDS...] [--kind WORDS]``.

The backends are ipc, nccl, "one rank" (with -n 1), "host in shared memory" and "host over MPI". All cells are tried,
and printed with what became of them. --sim: on the simulated device.
"""

from __future__ import annotations

import argparse
import os


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.matrix")
    parser.add_argument("backend")
    parser.add_argument("--sim", action="store_true")
    parser.add_argument("--way", nargs="+", default=[""], help="only the ways with one of these in their names")
    parser.add_argument("--kind", default="", help="only the kinds with these words in their names")
    parser.add_argument("--algorithm", help="of the communicators")
    parser.add_argument("--among", nargs=3, help=argparse.SUPPRESS)  # see gone.py
    options = parser.parse_args()
    if options.sim:
        from tests import simulated

        os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")
        simulated.install()  # before anything of ipcreduce or CuPy is imported
    from tests.matrix import run

    run.main(options)


if __name__ == "__main__":
    main()
