"""What every program that a test runs on several ranks ends with."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


def run(main: Callable[[], object]) -> None:
    """``main()``; an exception ends all ranks, and is shown first."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
