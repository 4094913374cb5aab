"""The shape of an all-reduce with RMSNorm: all that the ranks must share, and by which kernels are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GROUP = 128  # elements that share a scale, with scales "group"
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}  # of the dtypes that can be normalised


@dataclass(frozen=True)
class NormShape:
    """An all-reduce of ``rows`` rows of ``hidden`` elements, and the norm of each row of the sum.

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
        """From one column of scales to the next: so many elements, a multiple of 16 bytes, as DeepGEMM takes them."""
        return -(-self.rows // 4) * 4


class NormAddresses(NamedTuple):
    """The addresses of a call's arrays on the GPU, 0 where there is none.

    ``residual_out`` may be ``residual``, and ``out`` may be ``source``: then the call is in place.
    """

    source: int
    weight: int
    residual: int
    out: int
    residual_out: int
    quantised: int
    scales: int
