"""Storage of tuning tables in the user's cache: kernel and grid by message size, for a GPU model and number of ranks.

At start-up all ranks receive rank 0's table, because kernels whose grids differ between ranks hang.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..cuda.compiler import cache_directory
from ..errors import UnsupportedError
from ..ranks import exchange
from . import plan

TUNING = exchange.struct(
    exchange.Kind.TUNING, ("count", "<u4"), ("crc", "<u4"), ("up_to", "<u8", (plan.MOST_CHOICES,)),
    ("shape", "<u2", (plan.MOST_CHOICES, 4)),
)  # fmt: skip
_VERSION = 3  # of the tables. A change of the kernels that gives the rows another meaning raises it


def path_of(gpu: str, n: int) -> Path:
    """The path of the table for ``n`` ranks on GPUs of this name. :raises UnsupportedError: if no cache is usable."""
    return cache_directory() / f"tuned-{re.sub('[^A-Za-z0-9]+', '-', gpu)}-{n}.json"


def save(gpu: str, n: int, table: plan.Table) -> Path:
    """Store a table and return its path. :raises UnsupportedError: if that fails."""
    path = path_of(gpu, n)
    content = {"version": _VERSION, "gpu": gpu, "ranks": n, "choices": [asdict(choice) for choice in table]}
    spare = path.with_suffix(".new")
    try:
        spare.write_text(json.dumps(content, indent=1) + "\n")
        spare.replace(path)
    except OSError as error:
        advice = "Set IPCREDUCE_CACHE_DIR to a directory of yours"
        raise UnsupportedError(f"the table cannot be stored ({error}). {advice}") from error
    return path


def load(gpu: str, n: int, warn: Callable[[str], None]) -> plan.Table:
    """Load the table for ``n`` ranks on GPUs of this name. It is empty if there is none, or none that can be used.

    :param warn: takes a warning about a table that cannot be used.
    """
    path = path_of(gpu, n)
    try:
        content = json.loads(path.read_text())
        if content["version"] != _VERSION:
            return ()
        return plan.checked_table((plan.Choice(**choice) for choice in content["choices"]), n)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn(f"the table {path} cannot be used ({error}). Tune again, or remove it")
        return ()


def checksum(table: plan.Table) -> int:
    """A CRC-32 by which the ranks compare tables."""
    return zlib.crc32(repr(table).encode())


def message(table: plan.Table, problem: str = "") -> np.ndarray[Any, Any]:
    """Encode a table, and a warning if there is one, as a TUNING message."""
    record = exchange.message(TUNING, count=len(table), crc=checksum(table), text=problem)
    for index, choice in enumerate(table):
        kind = plan.ALGORITHMS.index(choice.algorithm)
        record[0]["up_to"][index] = choice.up_to
        record[0]["shape"][index] = kind, choice.block, choice.blocks, choice.depth
    return record


def received(record: Any, n: int) -> plan.Table:
    """Decode the table in a TUNING message. :raises ValueError: if it cannot be used, or arrived damaged."""
    rows = zip(record["up_to"].tolist(), record["shape"].tolist(), strict=True)
    choices = [
        plan.Choice(up_to, plan.ALGORITHMS[kind], block, blocks, depth)
        for up_to, (kind, block, blocks, depth) in list(rows)[: int(record["count"])]
    ]
    table = plan.checked_table(choices, n)
    if checksum(table) != int(record["crc"]):
        raise ValueError("the table differs from rank 0's")
    return table
