"""Accesses of kernels to memory that other processors see, read from their machine code by nvdisasm (no GPU needed)."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

# Instructions such as STG.E.128.STRONG.SYS: a width of 32 bits is not said.
_ACCESS = re.compile(r"\b(LD|ST)G?((?:\.\w+)*\.STRONG(?:\.\w+)*\.SYS(?:\.\w+)*)\b")
_WIDTH = re.compile(r"\.(?:[US](8|16)|(64|128|256))\b")


def nvdisasm() -> Path | None:
    """The disassembler from its wheel; None if that is not installed."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name == "nvdisasm"), None)


def accesses(cubin: bytes) -> tuple[Counter[int], Counter[int]]:
    """(loads, stores) of system scope in a cubin: how many instructions of each number of bits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([str(nvdisasm()), "-c", file.name], stderr=subprocess.DEVNULL, text=True)
    found: dict[str, Counter[int]] = {"LD": Counter(), "ST": Counter()}
    for what, rest in _ACCESS.findall(text):
        width = _WIDTH.search(rest)
        found[what][int(width[1] or width[2]) if width else 32] += 1
    return found["LD"], found["ST"]


def problems(kernel: str, macros: dict[str, str], cubin: bytes) -> list[str]:
    """Why this is not the code of a kernel whose packets are single accesses of 128 bits; none if it is.

    By sync.cuh and exchange.cuh all else at system scope is words of 32 bits: in check_wait two loads and three stores,
    and beside each packet of integers the marks of its escape. Of the flags of direct.cu only the marks are looked at,
    and compilers may load no more, of some or all.
    """
    loads, stores = accesses(cubin)
    peers = int(macros["IPCREDUCE_RANKS"]) - 1
    marks = 1 if int(macros["IPCREDUCE_WHOLE_PACKETS"]) else 2
    control, told = (0, 0) if kernel == "verify" else (2, 3)
    escapes = 0 if kernel == "verify" or "float" in macros["IPCREDUCE_DTYPE"] else marks
    flags = peers if kernel == "direct" else 0
    words = {control + escapes * (loads[128] - flags + n) + marks * n for n in range(flags + 1)}  # n flags by words
    least = 1 if kernel == "verify" else peers
    return [
        f"{kernel}: {what} of {dict(found)} bits; expected {sorted(expected)} of 32, all others of 128"
        for what, found, expected in [("loads", loads, words), ("stores", stores, {told})]
        if found[128] < least or found[32] not in expected or found.keys() - {32, 128}
    ]
