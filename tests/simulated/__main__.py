"""``python -m tests.simulated PROGRAM ARGUMENT...``, or ``-m MODULE ARGUMENT...``, runs it on the simulated device."""

from __future__ import annotations

import os
import runpy
import sys

from tests import simulated
from tests.shared import bounds

os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")  # small, so that messages go in segments
simulated.install()
bounds.patient(at_the_end=False)
sys.modules["torch"] = None  # type: ignore[assignment]  # not to be found: it knows only real GPUs
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
