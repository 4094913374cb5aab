"""A call as the ranks compare it: the arguments from which kernels are planned and compiled."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..dtypes import KINDS
from ..page.fingerprint import Fingerprint

GROUP = 128  # elements that share a scale, with scales "group"
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}  # of the dtypes that can be normalised
_SCALES = {"given": "by a given scale", "token": "by row", "group": "by 128"}


class Member(NamedTuple):
    """An array of a call: its shape, and its dtype's name, one of ``dtypes.KIND_NAMES``."""

    shape: tuple[int, ...]
    kind: str

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return KINDS[self.kind].itemsize

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class NormShape:
    """RMSNorm after an all-reduce of ``rows`` rows of ``hidden`` elements, for each row of the sum.

    :ivar dtype: "float16", "bfloat16" or "float32".
    :ivar eps: rounded to float32, as ``weight_bias`` is, which is added to the weight.
    :ivar residual: a residual is added to the sum.
    :ivar scales: of the quantised result: "" for none, or "given" (one scale), "token" (one a row), "group" (one for
        each 128 elements).
    :ivar column_major: the scales of "group" lie by columns: :attr:`scales_stride` elements from one to the next.
    :ivar keeps_y: the normalised rows are written. False: only the quantised ones.
    """

    rows: int
    hidden: int
    dtype: str
    eps: float
    weight_bias: float
    residual: bool
    scales: str = ""
    column_major: bool = False
    keeps_y: bool = True

    @property
    def elements(self) -> int:
        """The elements of an array of this shape."""
        return self.rows * self.hidden

    @property
    def nbytes(self) -> int:
        """The bytes of an array of this shape and dtype."""
        return self.elements * ITEMSIZES[self.dtype]

    @property
    def scales_stride(self) -> int:
        """The elements from one column of scales to the next: a multiple of 16 bytes, as DeepGEMM takes them."""
        return -(-self.rows // 4) * 4

    def __str__(self) -> str:
        """The norm in words, after those of the sum. Records have room for 80 bytes of a call."""
        text = f", eps {self.eps:.7g}"
        if self.weight_bias:
            text += f", bias {self.weight_bias:.7g}"
        if self.residual:
            text += ", residual"
        if self.scales:
            text += f", e4m3 {_SCALES[self.scales]}{' in columns' * self.column_major}{', no out' * (not self.keeps_y)}"
        return text


class Moved(NamedTuple):
    """An array whose bytes are moved and not reduced, so that its dtype may be any. See :class:`Member`.

    :ivar part: the shape of every rank's part, which messages show in place of ``shape``; None if the parts may differ.
    """

    shape: tuple[int, ...]
    kind: str
    itemsize: int
    part: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.itemsize


def unit_of(itemsize: int) -> int:
    """The bytes that are moved at a time: the largest power of two up to 8 that divides an itemsize."""
    return min(itemsize & -itemsize, 8)


@dataclass(frozen=True, eq=False)  # there is one object of each, whose hash is quick
class Collective:
    """A collective that splits arrays among the ranks: all that the layers ask about it.

    :ivar gathers: ranks read their parts and write whole arrays. False: they read whole arrays and write their parts.
    :ivar reduces: an op is applied to the ranks' values. False: bytes are moved, whatever they mean.
    :ivar rooted: rank ``root``'s part is everything, and every array is its own output. False: there is an ``axis``.
    """

    name: str
    gathers: bool
    reduces: bool
    rooted: bool


GATHER = Collective("all-gather", gathers=True, reduces=False, rooted=False)
SCATTER = Collective("reduce-scatter", gathers=False, reduces=True, rooted=False)
BROADCAST = Collective("broadcast", gathers=True, reduces=False, rooted=True)


class Split(NamedTuple):
    """The way in which a collective splits arrays among the ranks.

    :ivar axis: along which arrays are split. :ivar sizes: by rank, of its part along ``axis``; None for equal parts.
    :ivar root: the rank whose part is everything, if the collective is rooted.
    """

    collective: Collective
    axis: int = 0
    sizes: tuple[int, ...] | None = None
    root: int = 0

    def __str__(self) -> str:
        if self.collective.rooted:
            return f" from rank {self.root}"
        return f", axis {self.axis}, " + ("no sizes=" if self.sizes is None else f"sizes={[*self.sizes]}")

    def places(self, shape: tuple[int, ...], n: int) -> list[tuple[slice, ...]]:
        """The index of each rank's part in a whole array of this shape."""
        axis = self.axis % len(shape)
        sizes = self.sizes or (shape[axis] // n,) * n
        return [(*(slice(None),) * axis, slice(*ends)) for ends in pairwise(accumulate(sizes, initial=0))]

    def rows(self, shape: tuple[int, ...], itemsize: int, n: int) -> Rows:
        """The places of the parts in a contiguous whole array of this shape."""
        if self.collective.rooted:  # as an all-gather along a new axis, where the root has one and the others none
            sizes = tuple(int(rank == self.root) for rank in range(n))
            return Split(GATHER, 0, sizes).rows((1, *shape), itemsize, n)
        parts = self.places(shape, n)
        axis = len(parts[0]) - 1
        inner = math.prod(shape[axis + 1 :]) * itemsize
        offsets = tuple(part[axis].start * inner for part in parts)
        widths = tuple((part[axis].stop - part[axis].start) * inner for part in parts)
        return Rows(math.prod(shape[:axis]), shape[axis] * inner, offsets, widths)


class Rows(NamedTuple):
    """The places of the ranks' parts in a whole array, as kernels/parts.cuh has them.

    :ivar rows: their number. :ivar pitch: bytes of a row of the whole array.
    :ivar offsets: by rank, the first byte of its part in each row. :ivar widths: by rank, the bytes of its part there.
    """

    rows: int
    pitch: int
    offsets: tuple[int, ...]
    widths: tuple[int, ...]


class Request(NamedTuple):
    """One call, without the memory of its arrays.

    :ivar op: one of ``dtypes.OPS``; "" where nothing is reduced.
    :ivar members: the arrays of the call, each a :class:`Member` or :class:`Moved`: one, or those of a list. The whole
        ones, if they are split.
    :ivar epilogue: what is applied to the result: None, an ``Expression`` (cuda/expressions.py), or a
        :class:`NormShape`.
    :ivar on_host: the arrays lie on the host.
    :ivar sms: the most blocks of a launch that exchanges data; None: as many as are fastest alone.
    :ivar split: of a call that is not an all-reduce.
    """

    op: str
    members: tuple[Any, ...]
    epilogue: Any = None
    is_list: bool = False
    on_host: bool = False
    sms: int | None = None
    split: Split | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """The call in words, and its checksum."""
        return _in_words(self)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(one.nbytes for one in self.members)

    def without_epilogue(self) -> Request:
        """The all-reduce alone."""
        return self._replace(epilogue=None)


@lru_cache(4096)
def _in_words(request: Request) -> Fingerprint:
    where = "" if request.sms is None else f" by {request.sms} blocks"
    where += " on the host" if request.on_host else ""
    doing, every = request.op, [f"{one.kind} {getattr(one, 'part', None) or one.shape}" for one in request.members]
    if request.split is not None:
        doing, where = request.split.collective.name + (f" by {doing}" if doing else ""), f"{request.split}{where}"
    if request.is_list:
        return Fingerprint.of(f"{doing} of {len(every)} arrays{where}: {', '.join(every)}")
    if request.split is not None:
        return Fingerprint.of(f"{doing} of {every[0]}{where}")
    shape, kind = request.members[0].shape, request.members[0].kind
    after = request.epilogue
    if isinstance(after, NormShape):
        text = f"sum and norm of {kind} {shape}{where}{after}"
        return Fingerprint.of(text, f"{text}\0{struct.pack('<2f', after.eps, after.weight_bias).hex()}")
    text = f"{request.op} of {kind} {shape}{where}"
    if after is None:
        return Fingerprint.of(text)
    text += f", then {after}"
    return Fingerprint.of(text, f"{text}\0{after.text}")


@lru_cache(4096)
def plain(
    shape: tuple[int, ...], kind: str, op: str, *, on_host: bool = False, sms: int | None = None
) -> Request:  # fmt: skip
    """An all-reduce of one array."""
    return Request(op, (Member(shape, kind),), on_host=on_host, sms=sms)


def with_norm(shape: tuple[int, ...], norm: NormShape, *, on_host: bool = False) -> Request:
    """An all-reduce of one array of shape ``shape``, and RMSNorm of its rows."""
    return Request("sum", (Member(shape, norm.dtype),), norm, on_host=on_host)
