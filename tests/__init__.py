from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - said here, before anything newer fails to load
    sys.exit(f"ipcreduce needs Python 3.10 or newer, this is {sys.version.split()[0]}: give another as PYTHON=")
