"""Fingerprints of calls, which the ranks compare to see that they make the same call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..texts import encoded
from .norm_shape import NormShape


@dataclass(frozen=True)
class Fingerprint:
    """A description of a call for people, and its checksum, which every rank's call of that number must have.

    :ivar operations: of the call: the launches of kernels that exchange packets.
    """

    text: str
    crc: int
    operations: int = field(default=0, compare=False)

    @classmethod
    def of(cls, text: str, checked: str | None = None) -> Fingerprint:
        """The fingerprint of ``text``. ``checked`` is checksummed in its place, if given."""
        return cls(text, zlib.crc32(encoded(checked or text)))

    def made_by(self, operations: int) -> Fingerprint:
        """The same with a number of :attr:`operations`."""
        return replace(self, operations=operations)

    def __str__(self) -> str:
        return self.text


def by_rank(texts: Mapping[int, str]) -> str:
    """The calls of some ranks that differ, in words."""
    return " and ".join(f"{text} on rank {rank}" for rank, text in texts.items())


def of_list(members: Sequence[tuple[tuple[int, ...], str]], op: str, where: str = "") -> Fingerprint:
    """The fingerprint of an all-reduce of a list of arrays, of these shapes and dtypes."""
    every = ", ".join(f"{dtype} {shape}" for shape, dtype in members)
    text = f"{op} of {len(members)} arrays{where}"
    return Fingerprint.of(f"{text}: {every}")


def of_map(shape: tuple[int, ...], dtype: str, op: str, expression: str, source: str, where: str = "") -> Fingerprint:
    """The fingerprint of an all-reduce with a user's expression.

    :param expression: it and its operands, in one line. :param source: the expression as it is compiled.
    """
    text = f"{op} of {dtype} {shape}{where}, then {expression}"
    return Fingerprint.of(text, f"{text}\0{source}")


def of_allreduce(shape: tuple[int, ...], dtype: str, op: str) -> Fingerprint:
    """The fingerprint of an all-reduce on the device."""
    return Fingerprint.of(f"{op} of {dtype} {shape}")


_SCALES = {"given": "by a given scale", "token": "by row", "group": "by 128"}


def of_norm(of: tuple[int, ...], shape: NormShape, where: str = "") -> Fingerprint:
    """The fingerprint of an all-reduce with RMSNorm of an array of shape ``of``. Records have room for 80 bytes."""
    text = f"sum and norm of {shape.dtype} {of}{where}, eps {np.float32(shape.eps)!s}"
    if shape.weight_bias:
        text += f", bias {np.float32(shape.weight_bias)!s}"
    if shape.residual:
        text += ", residual"
    if shape.scales:
        text += f", e4m3 {_SCALES[shape.scales]}{' in columns' * shape.column_major}{', no out' * (not shape.keeps_y)}"
    return Fingerprint.of(text)
