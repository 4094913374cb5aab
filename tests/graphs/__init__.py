"""Scenarios of graphs. The command line is read here, so that CuPy is the simulated one wherever it is imported."""

from __future__ import annotations

import argparse
import os

parser = argparse.ArgumentParser(prog="tests.graphs")
parser.add_argument("--sim", action="store_true", help="on the simulated device")
parser.add_argument("--algorithm")
parser.add_argument("--hosts", type=int, default=1, help="pretended ones")
parser.add_argument("--json", help="where rank 0 writes what was run and measured")
parser.add_argument("--modules", nargs="+", help="the scenarios of these files only")
parser.add_argument("--first", action="store_true", help="the first scenario of each file")
parser.add_argument("names", nargs="*")
options = parser.parse_args()
SIM: bool = options.sim
if SIM:
    from tests import simulated

    os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "4")
    simulated.install()
