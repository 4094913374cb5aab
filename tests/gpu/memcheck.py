"""Each rank runs the sweep under compute-sanitizer: ``mpirun -n 2 python tests/gpu/memcheck.py``."""

from __future__ import annotations

import os
import shutil
import sys

tool = shutil.which("compute-sanitizer")
if tool is None:
    print("compute-sanitizer is not installed", flush=True)
else:
    sweep = [sys.executable, "tests/gpu/sweep.py", "--cases", "40", "--largest", "20000", "--tight"]
    os.execv(tool, [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", *sweep])
