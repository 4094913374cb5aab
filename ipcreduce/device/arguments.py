"""The arguments of the kernels, as words of 64 bits: struct Args of packets.cuh, and the tables after it.

A function here that ends in ``_setter`` returns what sets the addresses of a call in a launch's words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..calls.addresses import MapAddresses, NormAddresses
from ..calls.request import GROUP, NormShape
from ..cuda.expressions import Expression
from ..dtypes import DTYPES
from ..errors import ArgumentError

Words = np.ndarray[Any, np.dtype[np.uint64]]
Setter = Callable[[Any], None]

# Words of struct Args
IN, OUT, BYTES, PEERS, HALF = 0, 1, 2, 3, 11
EPOCHS, ABORT, MISSING, TIMEOUT = 12, 13, 14, 15
OUTS, ARG_WORDS = 16, 24
PAIR_WORDS = 2  # of struct Args in rmsnorm.cu
_COLUMNS, _FIRST, _OPERANDS = 0, 1, 2  # words of struct OperandTable (map.cuh)
# Words of struct NormArgs (rmsnorm.cuh)
_RESIDUAL, _RESIDUAL_OUT, _WEIGHT, _QUANTISED, _SCALES = 0, 1, 2, 3, 4
_ROWS, _HIDDEN, _STRIDES, _NUMBERS, _RECIPROCAL = 5, 6, 7, 8, 9
NORM_WORDS = 10
_TOO_LONG = 1 << 32  # elements of a row, whose packets are counted in 32 bits, beside those of a launch
_NO_PART = 0xFFFFFFFF  # in struct ListTable (list.cuh)
_ITEMSIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


def empty(nbytes: int) -> Words:
    """The words of a kernel that exchanges nothing."""
    words = np.zeros(ARG_WORDS, np.uint64)
    words[BYTES] = nbytes
    return words


# ---- one array
def plain_setter(words: memoryview, offset: int) -> Setter:
    """A function that sets the addresses (source, target, ...). ``offset``: bytes of the message before the launch."""

    def set_addresses(addresses: Sequence[int]) -> None:
        words[IN], words[OUT] = addresses[0] + offset, addresses[1] + offset

    return set_addresses


# ---- an expression
def operand_table(shape: tuple[int, ...], first: int, expression: Expression) -> Words:
    """The words of struct OperandTable for a launch that begins at element ``first`` of an array of this shape.

    :raises ArgumentError: if a row is longer than kernels count.
    """
    words = np.zeros(_OPERANDS + len(expression.operands), np.uint64)
    columns = max(1, shape[-1] if shape else 1)
    if columns >= _TOO_LONG and any(one.kind == "row" for one in expression.operands):
        raise ArgumentError(
            f"array has rows of {columns} elements, and an operand is a row. On a GPU a row then has up to "
            f"{_TOO_LONG - 1} elements. Pass an operand of the shape of array"
        )
    words[_COLUMNS], words[_FIRST] = columns, first % columns
    return words


def map_setter(words: memoryview, offset: int, itemsize: int, expression: Expression, *, behind: bool) -> Setter:
    """A function that sets :class:`MapAddresses`. ``behind``: the launch reads the result of an earlier all-reduce."""
    full = [_ITEMSIZES[one.dtype] if one.kind == "full" else 0 for one in expression.operands]
    steps = [(index, offset // itemsize * size) for index, size in enumerate(full, ARG_WORDS + _OPERANDS)]

    def set_addresses(addresses: MapAddresses) -> None:
        words[IN] = (addresses[4] if behind else addresses[0]) + offset
        words[OUT] = addresses[1] + offset
        for word, (index, step) in zip(addresses[2], steps, strict=True):
            words[index] = word + step

    return set_addresses


# ---- a list
def part_table(places: int, first: Any, nbytes: Any) -> Words:
    """The words of struct ListTable of ``places`` parts, in which the addresses are still to be set."""
    words = np.zeros(3 * places, np.uint64)
    numbers, count = words[2 * places :].view(np.uint32), len(first)
    numbers[:places] = _NO_PART
    numbers[:count], numbers[places : places + count] = first, nbytes
    return words


# ---- a norm
def norm_table(shape: NormShape) -> Words:
    """The words of struct NormArgs, in which the addresses are still to be set."""
    words = np.zeros(NORM_WORDS, np.uint64)
    strides, floats = words[_STRIDES:].view(np.uint32), words[_NUMBERS:].view(np.float32)
    words[_ROWS], words[_HIDDEN] = shape.rows, shape.hidden
    if shape.scales == "group":
        strides[:2] = (1, shape.scales_stride) if shape.column_major else (shape.hidden // GROUP, 1)
    else:
        strides[:2] = 1, 0
    floats[:2] = shape.eps, shape.weight_bias
    floats[2] = 1 / shape.hidden
    return words


def norm_setter(words: memoryview, norm: int, shape: NormShape, *, behind: bool = False) -> Setter:
    """A function that sets :class:`NormAddresses`. struct NormArgs begins at word ``norm``.

    ``behind``: the launch follows an all-reduce, and reads its sum, also from ``out`` where no y is wanted.
    """
    keeps_y = shape.keeps_y or not behind

    def set_addresses(addresses: NormAddresses) -> None:
        source, weight, residual, out, residual_out, quantised, scales = addresses
        words[IN], words[OUT] = (out or residual_out) if behind else source, out * keeps_y
        words[norm + _RESIDUAL], words[norm + _RESIDUAL_OUT], words[norm + _WEIGHT] = residual, residual_out, weight
        words[norm + _QUANTISED], words[norm + _SCALES] = quantised, scales

    return set_addresses
