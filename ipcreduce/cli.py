"""The command line: ``ipcreduce info``, ``bench`` and ``tune``, or ``python -m ipcreduce ...``.

Under a launcher rank 0 prints, and all ranks exit with the same status: 0, 1 if the command failed, 2 if its arguments
were wrong, 141 if nobody reads the output to its end, as of ``| head -1``. Ctrl-C on any rank ends all (130).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from . import __version__
from .bench import command as bench
from .bench import info, output, tune
from .bench.ranks import Ranks
from .errors import ArgumentError, IpcReduceError, UnsupportedError
from .options import unknown_variables


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Collective under a launcher. Exits with status 2 if the arguments are wrong, 1 on an error.

    :param arguments: the command line's arguments; None for ``sys.argv[1:]``.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell has closed it, as by >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    ranks = Ranks()
    try:
        options = _parsed(arguments, ranks)
        try:
            _run(options, ranks)
            output.settle()
        except output.ReaderLeftError:
            ranks.exit("", output.READER_LEFT_STATUS)
        except IpcReduceError as error:
            ranks.exit(f"ipcreduce: {error}", 2 if isinstance(error, ArgumentError) else 1)
        except Exception:  # perhaps on this rank only: without an abort the others would wait until the timeout
            ranks.abort(traceback.format_exc())
    except KeyboardInterrupt:  # perhaps on this rank only
        ranks.interrupted()


def _parsed(arguments: list[str] | None, ranks: Ranks) -> argparse.Namespace:
    """Parse the arguments. Exits after --help and --version, and if the arguments are wrong."""
    name = "python -m ipcreduce" if Path(sys.argv[0]).name == "__main__.py" else "ipcreduce"
    parser = argparse.ArgumentParser(prog=name, description="All-reduce for the GPUs of one host.")
    parser.add_argument("--version", action="version", version=f"ipcreduce {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shown = commands.add_parser("info", help="versions, MPI, GPUs, P2P, backend and why (also under mpirun)")
    info.add_arguments(shown)
    timed = commands.add_parser("bench", help="times beside peers and the machine's limit (under mpirun)")
    bench.add_arguments(timed)
    tuned = commands.add_parser("tune", help="measures what is quickest on these GPUs, and keeps it (under mpirun)")
    tune.add_arguments(tuned)
    written = io.StringIO()
    try:
        with redirect_stdout(written), redirect_stderr(written):
            options = parser.parse_args(arguments)
            if options.command == "bench":
                bench.check(timed, options)
    except SystemExit as end:
        ranks.exit(written.getvalue().rstrip(), int(end.code or 0))
    return options


def _run(options: argparse.Namespace, ranks: Ranks) -> None:
    try:
        ranks.join()
    except UnsupportedError:
        if options.command != "info":  # info reports that MPI is missing
            raise
    if ranks.rank:  # rank 0 warns for all ranks
        warnings.simplefilter("ignore")
    for text in unknown_variables():
        warnings.warn(text, RuntimeWarning, stacklevel=1)
    if options.command == "info":
        info.main(options, ranks)
    elif problem := ranks.mismatch():
        raise UnsupportedError(problem)
    else:
        (bench.main if options.command == "bench" else tune.main)(options)
