"""Scenarios of the library on the simulated device. The command line is read here, before CuPy is imported anywhere."""

from __future__ import annotations

import argparse
import os

from tests import simulated
from tests.shared import world
from tests.shared.by_files import ByFiles

parser = argparse.ArgumentParser(prog="tests.sim.scenarios")
parser.add_argument("--visible")
parser.add_argument("--among", nargs=3)
parser.add_argument("names", nargs="+")
options = parser.parse_args()

WORLD = ByFiles(*options.among) if options.among else world.WORLD
os.environ.setdefault("SIM_DEVICES", str(WORLD.Get_size()))
os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")
if options.visible is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = options.visible.split("/")[WORLD.Get_rank()]
simulated.install()
