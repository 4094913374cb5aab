"""Device code within libraries: leave that of one GPU, and let the rest compress to nothing. Standard library only.

A library holds, for each of its sources, one fat binary: a header, then an entry for each GPU, as machine code or as
PTX, which the driver compiles. The driver chooses by the entries' headers and reads no other entry. So zeros in place
of the others change nothing on the GPU that is kept, and the library's layout stays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
SECTIONS = (".nv_fatbin", "__nv_relfatbin")


class Entry(NamedTuple):
    """One entry of a fat binary: what it is, for which architecture (90 for sm_90), and where its bytes lie."""

    kind: int
    arch: int
    start: int
    size: int


def blank(path: Path, arch: int, *, keep_ptx: bool) -> int:
    """Zero all device code of a library but that of ``arch``. Returns how many bytes were zeroed.

    Where a fat binary has no machine code for ``arch``, its PTX of older architectures stays, if ``keep_ptx``.
    """
    data = bytearray(path.read_bytes())
    zeroed = 0
    for entries in _fat_binaries(data):
        exact = any(one.kind == CUBIN and one.arch == arch for one in entries)
        for one in entries:
            machine_code = one.kind == CUBIN and one.arch == arch
            ptx = keep_ptx and not exact and one.kind == PTX and one.arch <= arch
            if not (machine_code or ptx):
                data[one.start : one.start + one.size] = bytes(one.size)
                zeroed += one.size
    path.write_bytes(data)
    return zeroed


def _fat_binaries(data: bytearray) -> Iterator[list[Entry]]:
    for start, size in _sections(data):
        at, end = start, start + size
        while at + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:  # padding between two
                at += 8
                continue
            yield list(_entries(data, at + header, at + header + length))
            at += header + length


def _entries(data: bytearray, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        yield Entry(kind, arch, at + header, size)
        at += header + size


def _sections(data: bytearray) -> Iterator[tuple[int, int]]:
    """(start, size) of the sections of a 64-bit ELF file that hold fat binaries."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count, names = struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + number * entry) for number in range(count)]
    for head in heads:
        name = heads[names][4] + head[0]
        if data[name : data.index(b"\0", name)].decode() in SECTIONS:
            yield head[4], head[5]
