"""System-scope memory accesses of kernels, read from their machine code by nvdisasm (no GPU needed)."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

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


def accesses(cubin: bytes) -> tuple[Counter[int], Counter[int]]:
    """(loads, stores) of system scope in a cubin: number of instructions by width in bits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([str(nvdisasm()), "-c", file.name], stderr=subprocess.DEVNULL, text=True)
    found: dict[str, Counter[int]] = {"LD": Counter(), "ST": Counter()}
    for instruction, modifiers in _ACCESS.findall(text):
        width = _WIDTH.search(modifiers)
        found[instruction][int(width[1] or width[2]) if width else 32] += 1
    return found["LD"], found["ST"]


def problems(kernel: str, macros: dict[str, str], cubin: bytes) -> list[str]:
    """Deviations from code in which every packet is a single access of 128 bits; empty if there are none.

    By sync.cuh and exchange.cuh, all other accesses of system scope are 32-bit words: two loads and three stores in
    check_wait, and with each packet of integers the sentinel words of its escape packet. Of the flags of direct.cu only
    the sentinel words are used, so a compiler may narrow the loads of some or all flags to them.
    """
    loads, stores = accesses(cubin)
    peers = int(macros["IPCREDUCE_RANKS"]) - 1
    sentinels = 1 if int(macros["IPCREDUCE_WHOLE_PACKETS"]) else 2
    control_loads, control_stores = (0, 0) if kernel == "verify" else (2, 3)
    escapes = 0 if kernel == "verify" or "float" in macros["IPCREDUCE_DTYPE"] else sentinels
    flags = peers if kernel == "direct" else 0
    words = {  # if n flags are loaded as words
        control_loads + escapes * (loads[128] - flags + n) + sentinels * n for n in range(flags + 1)
    }
    least = 1 if kernel == "verify" else peers
    return [
        f"{kernel}: {direction} of {dict(found)} bits; expected {sorted(expected)} of 32, all others of 128"
        for direction, found, expected in [("loads", loads, words), ("stores", stores, {control_stores})]
        if found[128] < least or found[32] not in expected or found.keys() - {32, 128}
    ]
