"""Kernels after a plain all-reduce: for an expression (copy.cu), or for RMSNorm (rmsnorm.cu).

Every backend has these, for calls that it cannot make in one kernel, and for a world of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import views
from ..calls.request import ITEMSIZES, NormShape, Request
from ..dtypes import KINDS
from ..errors import ArgumentError
from ..types import Stream
from . import arguments
from .kernels import Kernel, Kernels
from .prepared import KernelStep, OwnStep, Prepared, Step

SCALES = ("", "given", "token", "group")  # a kind's index is its code in rmsnorm.cuh
_UNIT = 8  # elements of a unit there
_MAX_THREADS, _MAX_DEPTH = 1024, 2  # of rmsnorm.cu, for rows that its threads hold
_MAX_BLOCKS = 1 << 16
_MAX_ROWS, _MAX_ROW_BYTES = 1 << 31, 1 << 30  # there, where rows, and the bytes of one, are counted in 32 bits
_MAP_BYTES = 1 << 30  # the most of one launch of copy.cu: kernels count bytes in 32 bits
_MAP_BLOCK, _MAP_BLOCKS = 256, 1056  # threads of a block, and the most blocks, which take further packets in turns
_PACKET_BYTES = 16


def behind(plain: Prepared | None, request: Request, kernels: Kernels, device: int) -> Prepared:
    """A call whose epilogue has kernels of its own.

    :param plain: the all-reduce that comes before; None for a world of one rank.
    :raises IpcReduceError: see :meth:`Kernels.load`; ArgumentError for more rows, or longer ones, than kernels count.
    """
    after = request.epilogue
    is_norm = isinstance(after, NormShape)
    launches: list[Step] = [*(_of_norm if is_norm else _of_map)(request, kernels, plain is not None)]
    names = [] if plain is None else [plain.kernels]
    names += ["rmsnorm" if is_norm else "copy"]
    if is_norm and not after.rows:
        launches, names, plain = [], ["nothing"], None
    whole = Prepared(
        request=request, fingerprint=request.fingerprint, kernels=", ".join(names), nbytes=request.nbytes,
        steps=tuple(launches),
    )  # fmt: skip
    return whole if plain is None else _handed_on(plain, whole, is_norm, device)


def _handed_on(plain: Prepared, after: Prepared, is_norm: bool, device: int) -> Prepared:
    """Both, one after the other."""
    reduce, wider = plain.quickest, plain.wire_dtypes[0]

    def first(addresses: Any, stream: Stream) -> None:
        reduce((addresses.source, addresses.between if is_norm else addresses.reduced), stream)

    steps: list[Step] = [OwnStep(first)]
    if wider is not None:
        ((shape, kind),) = after.request.members

        def narrow(addresses: Any, stream: Stream) -> None:
            source = views.at(addresses.reduced, shape, wider, device)
            views.copy_into(views.at(addresses.between, shape, KINDS[kind], device), source, stream)

        steps.append(OwnStep(narrow))
    fingerprint = after.fingerprint.made_by(plain.fingerprint.operations)
    return replace(
        after, fingerprint=fingerprint, steps=(*steps, *after.steps), wire_dtypes=plain.wire_dtypes, hands_on=True
    )


def _of_map(request: Request, kernels: Kernels, is_behind: bool) -> Iterator[KernelStep]:
    ((shape, kind),) = request.members
    expression, itemsize, nbytes = request.epilogue, KINDS[kind].itemsize, request.nbytes
    kernel = Kernel("copy", kind, expression=expression, alone=True)
    kernels.load([kernel])
    for at in range(0, nbytes, _MAP_BYTES):
        part = min(_MAP_BYTES, nbytes - at)
        table = arguments.operand_table(shape, at // itemsize, expression)
        args = np.concatenate([arguments.empty(part), table])
        launch = kernels.launch(kernel, min(_MAP_BLOCKS, -(-part // (_PACKET_BYTES * _MAP_BLOCK))), _MAP_BLOCK, args)
        yield KernelStep(launch, arguments.map_setter(args.data, at, itemsize, expression, behind=is_behind))


def _of_norm(request: Request, kernels: Kernels, is_behind: bool) -> Iterator[KernelStep]:
    shape = request.epilogue
    if not shape.rows:
        return
    longest = _MAX_ROW_BYTES // ITEMSIZES[shape.dtype]
    if shape.rows > _MAX_ROWS or shape.hidden > longest:
        raise ArgumentError(
            f"x has {shape.rows} rows of {shape.hidden} elements. On a GPU a call takes up to {_MAX_ROWS} rows of "
            f"up to {longest} elements of {shape.dtype}. Pass parts of x, one behind the other"
        )
    depth, grid, block = pair_grid(shape)
    kernel = Kernel("rmsnorm", shape.dtype, depth=depth, scale=SCALES.index(shape.scales), alone=True)
    args = np.concatenate([np.zeros(arguments.PAIR_WORDS, np.uint64), arguments.norm_table(shape)])
    launch = kernels.launch(kernel, grid, block, args)
    yield KernelStep(launch, arguments.norm_setter(args.data, arguments.PAIR_WORDS, shape, behind=is_behind))


def pair_grid(shape: NormShape) -> tuple[int, int, int]:
    """Depth, grid and block of rmsnorm.cu: a row a block. The depth is 0 for rows that no block can hold."""
    units = -(-shape.hidden // _UNIT)
    depth = -(-units // _MAX_THREADS)
    grid = min(shape.rows, _MAX_BLOCKS)
    if depth > _MAX_DEPTH:
        return 0, grid, _MAX_THREADS
    return depth, grid, 32 * -(-units // (32 * depth))
