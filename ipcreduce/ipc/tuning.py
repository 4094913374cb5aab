"""Storage of tuning tables in the user's cache, for a GPU model and number of ranks.

One has the kernel and grid by message size, the other one the kernel of rows with RMSNorm by their length and number.

At start-up all ranks receive rank 0's table, because kernels whose grids differ between ranks hang.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..cuda.compiler import cache_directory
from ..errors import UnsupportedError
from ..ranks import exchange
from . import norm_plan, plan

TUNING = exchange.struct(
    exchange.Kind.TUNING, ("count", "<u4"), ("crc", "<u4"), ("up_to", "<u8", (plan.MAX_CHOICES,)),
    ("shape", "<u2", (plan.MAX_CHOICES, 4)), ("norm_count", "<u4"), ("norms", "<u4", (norm_plan.MAX_CHOICES, 4)),
)  # fmt: skip
_NAMES = tuple(plan.ALGORITHMS)  # by their codes in messages
_VERSION = 3  # of the tables. A change of the kernels that gives the rows another meaning raises it


class Tables(NamedTuple):
    """Measured tables: for messages, and for rows with RMSNorm. Both are empty if nothing was measured."""

    messages: plan.Table = ()
    norms: norm_plan.NormTable = ()


def path_of(gpu: str, n: int) -> Path:
    """The path of the tables for ``n`` ranks on GPUs of this name. :raises UnsupportedError: if no cache is usable."""
    return cache_directory() / f"tuned-{re.sub('[^A-Za-z0-9]+', '-', gpu)}-{n}.json"


def save(gpu: str, n: int, tables: Tables) -> Path:
    """Store tables and return their path. :raises UnsupportedError: if that fails."""
    path = path_of(gpu, n)
    content = {"version": _VERSION, "gpu": gpu, "ranks": n, "choices": [asdict(choice) for choice in tables.messages]}
    content["norms"] = [asdict(choice) for choice in tables.norms]
    spare = path.with_suffix(".new")
    try:
        spare.write_text(json.dumps(content, indent=1) + "\n")
        spare.replace(path)
    except OSError as error:
        advice = "Set IPCREDUCE_CACHE_DIR to a directory of yours"
        raise UnsupportedError(f"the table cannot be stored ({error}). {advice}") from error
    return path


def load(gpu: str, n: int, warn: Callable[[str], None]) -> Tables:
    """Load the tables for ``n`` ranks on GPUs of this name. They are empty if there are none that can be used.

    :param warn: takes a warning about a table that cannot be used.
    """
    path = path_of(gpu, n)
    try:
        content = json.loads(path.read_text())
        if content["version"] != _VERSION:
            return Tables()
        messages = plan.checked_table((plan.Choice(**choice) for choice in content["choices"]), n)
        norms = (norm_plan.NormChoice(**choice) for choice in content.get("norms", ()))
        return Tables(messages, norm_plan.checked_table(norms))
    except FileNotFoundError:
        return Tables()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        warn(f"the table {path} cannot be used ({error}). Tune again, or remove it")
        return Tables()


def checksum(tables: Tables) -> int:
    """A CRC-32 by which the ranks compare tables."""
    return zlib.crc32(json.dumps([[*map(astuple, part)] for part in tables]).encode())


def message(tables: Tables, problem: str = "") -> np.ndarray[Any, Any]:
    """Encode tables, and a warning if there is one, as a TUNING message."""
    count, norm_count = len(tables.messages), len(tables.norms)
    record = exchange.message(TUNING, count=count, norm_count=norm_count, crc=checksum(tables), text=problem)
    for index, choice in enumerate(tables.messages):
        kind = _NAMES.index(choice.algorithm)
        record[0]["up_to"][index] = choice.up_to
        record[0]["shape"][index] = kind, choice.block, choice.blocks, choice.depth
    for index, norm in enumerate(tables.norms):
        record[0]["norms"][index] = norm.hidden, norm.up_to, _NAMES.index(norm.algorithm), norm.cluster
    return record


def received(record: Any, n: int) -> Tables:
    """Decode the tables in a TUNING message. :raises ValueError: if they cannot be used, or arrived damaged."""
    rows = zip(record["up_to"].tolist(), record["shape"].tolist(), strict=True)
    choices = [
        plan.Choice(up_to, _NAMES[kind], block, blocks, depth)
        for up_to, (kind, block, blocks, depth) in list(rows)[: int(record["count"])]
    ]
    norms = [
        norm_plan.NormChoice(hidden, up_to, _NAMES[kind], cluster)
        for hidden, up_to, kind, cluster in record["norms"].tolist()[: int(record["norm_count"])]
    ]
    tables = Tables(plan.checked_table(choices, n), norm_plan.checked_table(norms))
    if checksum(tables) != int(record["crc"]):
        raise ValueError("the table differs from rank 0's")
    return tables
