"""System-scope memory accesses of kernels, read from their machine code by nvdisasm (no GPU needed).

``python -m tests.tools.sass`` checks every kernel, in every dtype, for every GPU of NVRTC's, and prints a table.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from ipcreduce.cuda import compiler
from ipcreduce.device.devices import MIN_CAPABILITY
from ipcreduce.dtypes import DTYPE_NAMES, OPS
from ipcreduce.errors import IpcReduceError
from ipcreduce.ipc import parts

SPLITS = "gather", "scatter", "bulk_gather", "bulk_scatter"
KERNELS = (
    "one_shot",
    "two_shot",
    "direct",
    "bulk",
    "spread",
    *SPLITS,
)  # those of every dtype and op; verify and limit have none
# Those with RMSNorm, and their dtypes: sums only.
NORMS = {
    "fused_one_shot": ("float16", "bfloat16"),
    "fused_two_shot": ("float16", "bfloat16"),
    "rmsnorm": ("float16", "bfloat16", "float32"),
}
SCALES, CLUSTERS = 4, (1, 2, 4, 8)
Case = tuple[str, dict[str, str]]  # a kernel and its macros

# Instructions such as STG.E.128.STRONG.SYS. No width means 32 bits.
_ACCESS = re.compile(r"\b(LD|ST)G?((?:\.\w+)*\.STRONG(?:\.\w+)*\.SYS(?:\.\w+)*)\b")
_WIDTH = re.compile(r"\.(?:[US](8|16)|(64|128|256))\b")


def nvdisasm() -> Path | None:
    """The disassembler from the wheel nvidia-cuda-nvdisasm; None if that is not installed."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name == "nvdisasm"), None)


def disassembly(cubin: bytes) -> str:
    """The machine code of a cubin, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([str(nvdisasm()), "-c", file.name], stderr=subprocess.DEVNULL, text=True)


def accesses(cubin: bytes) -> tuple[Counter[int], Counter[int]]:
    """(loads, stores) of system scope in a cubin: number of instructions by width in bits."""
    text = disassembly(cubin)
    found: dict[str, Counter[int]] = {"LD": Counter(), "ST": Counter()}
    for instruction, modifiers in _ACCESS.findall(text):
        width = _WIDTH.search(modifiers)
        found[instruction][int(width[1] or width[2]) if width else 32] += 1
    return found["LD"], found["ST"]


def problems(kernel: str, macros: dict[str, str], cubin: bytes) -> list[str]:
    """Deviations from code in which every packet is a single access of 128 bits; empty if there are none.

    By sync.cuh and packets.cuh, all other accesses of system scope are 32-bit words: two loads and three stores in
    check_wait, and with each packet of integers the sentinel words of its escape packet. Of flags (direct.cu, limit.cu,
    bulk.cu and its like) only the sentinel words are used, so a compiler may narrow the loads of some or all to them.
    """
    loads, stores = accesses(cubin)
    if kernel in ("rmsnorm", "copy"):  # which exchange nothing
        return [f"{kernel}: accesses of system scope, {dict(loads)}, {dict(stores)}"] if loads or stores else []
    peers = int(macros["IPCREDUCE_RANKS"]) - 1
    sentinels = 1 if int(macros["IPCREDUCE_WHOLE_PACKETS"]) else 2
    control_loads, control_stores = (1, 0) if kernel == "verify" else (2, 3)
    escapes = (
        0
        if kernel in ("verify", "limit") or kernel.startswith("bulk") or "float" in macros["IPCREDUCE_DTYPE"]
        else sentinels
    )
    flags = {
        "direct": peers,
        "limit": peers,
        "bulk": 2 * peers,
        "bulk_gather": 8 * peers,
        "bulk_scatter": 8 * peers,
        "spread": 2 * peers,
    }.get(kernel, 0)
    words = {  # if n flags are loaded as words
        control_loads + escapes * (loads[128] - flags + n) + sentinels * n for n in range(flags + 1)
    }
    least = {"loads": 0 if kernel.startswith("bulk") else peers, "stores": peers}  # bulk.cu exchanges flags only
    if kernel in ("verify", "limit"):
        least = {"loads": kernel == "verify", "stores": 1 if kernel == "verify" else 2 * peers}
    return [
        f"{kernel}: {direction} of {dict(found)} bits; expected {sorted(expected)} of 32, all others of 128"
        for direction, found, expected in [("loads", loads, words), ("stores", stores, {control_stores})]
        if found[128] < least[direction] or found[32] not in expected or found.keys() - {32, 128}
    ]


# ---- all of them
def macros(
    dtype: str = "float32", op: str = "sum", *, n: int = 2, rank: int = 0, whole: int = 1, depth: int = 1,
    scale: int | None = None, cluster: int = 1, members: int = 0,
) -> dict[str, str]:  # fmt: skip
    """Those of a kernel's source. ``scale`` and ``cluster``: with RMSNorm. ``members``: of :data:`SPLITS`."""
    norm = {"IPCREDUCE_SCALE": str(scale), "IPCREDUCE_CLUSTER": str(cluster)} if scale is not None else {}
    split = {"IPCREDUCE_MEMBERS": str(members)} if members else {}
    return (
        norm
        | split
        | {
            "IPCREDUCE_RANKS": str(n),
            "IPCREDUCE_RANK": str(rank),
            "IPCREDUCE_DTYPE": dtype,
            "IPCREDUCE_OP": op,
            "IPCREDUCE_DEPTH": str(depth),
            "IPCREDUCE_WHOLE_PACKETS": str(whole),
        }
    )


def members_of(kernel: str, turn: int) -> int:
    """The places in the table of a kernel of :data:`SPLITS`, which take turns; 0 for others."""
    if kernel.startswith("bulk"):
        return int(kernel in SPLITS)
    return (parts.ONE, parts.SHORT, parts.LONG)[turn % 3] if kernel in SPLITS else 0


def cases(turn: int) -> Iterator[Case]:
    """Every kernel with every dtype, in both forms of packets; ops, world sizes, ranks and depths take turns."""
    for whole in (0, 1):
        for name in ("verify", "limit"):
            yield name, macros("int32", n=2 + (turn + whole) % 7, whole=whole)
        yield "copy", macros(DTYPE_NAMES[turn % len(DTYPE_NAMES)], n=1)
        for column, kernel in enumerate(KERNELS):
            for row, dtype in enumerate(DTYPE_NAMES):
                at = turn + column + row + whole
                n, depth = 2 + at % 7, (1, 2, 4)[at % 3] if kernel != "one_shot" else 1
                members = members_of(kernel, at)
                given = macros(dtype, OPS[at % len(OPS)], n=n, rank=at % n, whole=whole, depth=depth, members=members)
                yield kernel, given


def norm_cases(turn: int, capability: tuple[int, int]) -> Iterator[Case]:
    """The kernels with RMSNorm, each with its dtypes; the kinds of scales, clusters, depths and ranks take turns."""
    for column, (kernel, dtypes) in enumerate(NORMS.items()):
        for row, dtype in enumerate(dtypes):
            at = turn + column + row
            n, whole = (2 + at % 7, at % 2) if kernel != "rmsnorm" else (1, 1)
            cluster = CLUSTERS[at % 4] if capability >= (9, 0) and kernel != "rmsnorm" else 1
            depth = {"rmsnorm": at % 3, "fused_one_shot": 1 + at % 2}.get(kernel, 1)
            given = macros(dtype, n=n, rank=at % n, whole=whole, depth=depth, scale=at % SCALES, cluster=cluster)
            yield kernel, given


def architectures() -> list[tuple[int, int]]:
    """The compute capabilities that NVRTC offers."""
    from cuda.bindings import nvrtc

    code, found = nvrtc.nvrtcGetSupportedArchs()
    assert not int(code), code
    return [divmod(int(number), 10) for number in found]


def check(capability: tuple[int, int], chosen: Iterable[Case]) -> dict[str, Any]:
    """A row of the table: how many kernels were compiled for an architecture, their packets' accesses, the problems."""
    row: dict[str, Any] = {"arch": "sm_{}{}".format(*capability), "kernels": 0, "loads": 0, "stores": 0, "problems": []}
    if capability < MIN_CAPABILITY:
        return row | {"left out": "ipcreduce needs compute capability {}.{}".format(*MIN_CAPABILITY)}

    def look(case: Case) -> tuple[int, int, list[str]]:
        kernel, given = case
        try:
            cubin = compiler.compile_kernel(kernel, given, capability)
            loads, stores = accesses(cubin)
            return loads[128], stores[128], problems(kernel, given, cubin)
        except (IpcReduceError, subprocess.CalledProcessError) as error:
            return 0, 0, [f"{kernel}: {error}"]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for loads, stores, found in pool.map(look, chosen):
            row["kernels"] += 1
            row["loads"] += loads
            row["stores"] += stores
            row["problems"] += found
    return row


def main() -> int:
    from ipcreduce.bench import report

    parser = argparse.ArgumentParser(prog="tests.tools.sass", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table there, too")
    options = parser.parse_args()
    if nvdisasm() is None:
        print("nvidia-cuda-nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
        return 2
    print(f"{'arch':8} {'kernels':>7} {'128-bit loads':>13} {'stores':>7}  problems")
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["IPCREDUCE_CACHE_DIR"] = cache
        for turn, capability in enumerate(architectures()):
            rows.append(row := check(capability, [*cases(turn), *norm_cases(turn, capability)]))
            told = row.get("left out") or "; ".join(row["problems"]) or "none"
            print(f"{row['arch']:8} {row['kernels']:7} {row['loads']:13} {row['stores']:7}  {told}", flush=True)
    if options.json:
        report.write_json(options.json, report.header(["-m", "tests.tools.sass"]) | {"rows": rows})
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
