"""Runs a worker for GPUs on the simulated device: ``mpirun -n 4 python tests/sim/on_sim.py tests/gpu/sweep.py``."""

from __future__ import annotations

import os
import runpy
import sys

from tests import sim

os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")  # small, so that messages go in segments
sim.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
