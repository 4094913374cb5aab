"""The kinds of calls: arguments, expected results from NumPy, and what differs or is refused.

A new kind is a class, among KINDS. All values are such that sums are exact in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from ipcreduce import FP8, Map
from ipcreduce.ipc import plan
from tests.matrix.kind import Kind, Values, whole
from tests.matrix.split_kinds import SPLITS
from tests.shared import norms, reference

BFLOAT16 = reference.BFLOAT16
_LONG = plan.BULK_BYTES // 4000 + 1  # rows of 1,000 float32


@dataclass(frozen=True)
class Plain(Kind):
    """An all-reduce of one array."""

    name = "plain"
    in_place: ClassVar = {"out": "array"}
    words = "sum of float32 (10, 100)"
    variants = (
        ({"op": "max"}, "max of float32 (10, 100)"), ({"shape": (100, 10)}, "sum of float32 (100, 10)"),
        ({"shape": (999,)}, "sum of float32 (999,)"), ({"dtype": np.int32}, "sum of int32 (10, 100)"),
    )  # fmt: skip
    op: str = "sum"
    shape: tuple[int, ...] = (10, 100)
    dtype: Any = np.float32

    def inputs(self, turn: int, rank: int) -> Values:
        return {"array": whole(turn, rank, self.shape, self.dtype)}

    def results(self, turn: int) -> Values:
        return {"out": reference.reduce(self.of_all(turn, "array"), self.op)}

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        return {"out": comm.allreduce(**{"op": self.op, "stream": stream} | given)}

    def wrong(self, given: Values) -> tuple[Values, str]:
        return {"op": "mode"}, "there is no op"


@dataclass(frozen=True)
class FewBlocks(Plain):
    """A long all-reduce with a limit of blocks."""

    name = "few blocks"
    words = f"sum of float32 ({_LONG}, 1000) by 3 blocks"
    variants = (
        ({"sms": 4}, f"sum of float32 ({_LONG}, 1000) by 4 blocks"), ({"sms": None}, f"sum of float32 ({_LONG}, 1000)"),
        ({"op": "max"}, f"max of float32 ({_LONG}, 1000) by 3 blocks"),
    )  # fmt: skip
    shape: tuple[int, ...] = (_LONG, 1000)
    sms: int | None = 3

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        return {"out": comm.allreduce(**{"op": self.op, "sms": self.sms, "stream": stream} | given)}

    def wrong(self, given: Values) -> tuple[Values, str]:
        return {"sms": 0}, "sms is 0. Pass how many blocks"


@dataclass(frozen=True)
class List(Kind):
    """A list of arrays of several dtypes, one of them empty."""

    name = "list"
    in_place: ClassVar = {"out": "array"}
    words = "sum of 4 arrays"
    variants = (
        ({"op": "max"}, "max of 4 arrays"), ({"members": ((5, "f4"), (0, "f4"), (33, "i1"))}, "sum of 3 arrays"),
        ({"members": ()}, "sum of 0 arrays"), ({"members": ((100, "f4"), (33, "i1"), (0, "f4"), (5, "f4"))}, "sum"),
        ({"members": ((5, "f4"), (0, "f4"), (33, "i1"), ((2, 50), "f4"))}, "sum of 4 arrays"),
        ({"members": ((5, "f4"), (0, "f4"), (33, "i1"), (100, "i4"))}, "sum of 4 arrays"),
    )  # fmt: skip
    op: str = "sum"
    members: tuple[tuple[Any, str], ...] = ((5, "f4"), (0, "f4"), (33, "i1"), (100, "f4"))

    def inputs(self, turn: int, rank: int) -> Values:
        return {"array": [whole(turn + place, rank, *one) for place, one in enumerate(self.members)]}

    def results(self, turn: int) -> Values:
        members = zip(*self.of_all(turn, "array"), strict=True)
        return {"out": [reference.reduce(list(member), self.op) for member in members]}

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        return {"out": comm.allreduce(**{"op": self.op, "stream": stream} | given)}

    def wrong(self, given: Values) -> tuple[Values, str]:
        return {"array": [*given["array"][:-1], None]}, f"member {len(self.members) - 1} of the list: it is None"


def scaled(v: Any, s: Any, a: Any) -> Any:
    """The expression on the host."""
    return v * s + a


@dataclass(frozen=True)
class Expression(Kind):
    """An all-reduce with ``then=``, a number and an array. The number is another one for each ``number``."""

    name = "expression"
    in_place: ClassVar = {"out": "array"}
    words = "then v * s + a"
    variants = (
        ({"op": "max"}, "max of float32"), ({"text": "a + v * s"}, "then a + v * s"), ({"row": True}, "sum of float32"),
        ({"dtype": np.float64}, "sum of float64"),
    )  # fmt: skip
    op: str = "sum"
    text: str = "v * s + a"
    row: bool = False
    dtype: Any = np.float32

    def inputs(self, turn: int, rank: int) -> Values:
        array = whole(turn, rank, (10, 100), self.dtype)
        return {"array": array, "a": whole(turn + 100, 0, (100,) if self.row else (10, 100))}

    def results(self, turn: int) -> Values:
        reduced, a = reference.reduce(self.of_all(turn, "array"), self.op), self.inputs(turn, 0)["a"]
        return {"out": (reduced * (self.number + 2.0) + a).astype(self.dtype)}

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        arguments = {"op": self.op, "stream": stream} | given
        then = Map(self.text, host=scaled, s=self.number + 2.0, a=arguments.pop("a"))
        return {"out": comm.allreduce(**arguments, then=then)}

    def wrong(self, given: Values) -> tuple[Values, str]:
        return {"a": given["a"][..., 1:]}, "the operand a has shape"


@dataclass(frozen=True)
class Norm(Kind):
    """An all-reduce with RMSNorm."""

    name = "norm"
    in_place: ClassVar = {"out": "x", "residual_out": "residual"}
    words = "sum and norm of bfloat16 (4, 256)"
    variants: ClassVar = (
        ({"eps": 1e-3}, "eps 0.001"), ({"bias": 1.0}, "bias 1"), ({"shape": (2, 512)}, "(2, 512)"),
        ({"dtype": "float16"}, "float16 (4, 256)"), ({"added": False}, "(4, 256)"), ({"scales": "token"}, "by row"),
    )  # fmt: skip
    shape: tuple[int, ...] = (4, 256)
    dtype: str = "bfloat16"
    eps: float = 1e-5
    bias: float = 0.0
    added: bool = True
    scales: str = ""

    def inputs(self, turn: int, rank: int) -> Values:
        kind = norms.DTYPES[self.dtype]
        residual = {"residual": whole(turn + 100, 0, self.shape, kind)} if self.added else {}
        weight = whole(turn + 200, 0, self.shape[-1:], kind)
        return {"x": whole(turn, rank, self.shape, kind), "weight": weight} | residual

    def results(self, turn: int) -> Values:
        own = self.inputs(turn, 0)
        found = norms.results(
            reference.reduce(self.of_all(turn, "x"), "sum"), own.get("residual"), own["weight"],
            eps=self.eps, weight_bias=self.bias, scales=self.scales,
        )  # fmt: skip
        results = {"out": found.y, "residual_out": found.residual_out}
        if self.scales:
            assert found.quantised is not None
            results |= {"quant_out": found.quantised.view(ml_dtypes.float8_e4m3fn), "scales_out": found.scales}
        return results

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        how = None if not self.scales else FP8(per="token" if self.scales == "token" else 128)
        *first, total = comm.allreduce_rmsnorm(
            **{"eps": self.eps, "weight_bias": self.bias, "quantize": how, "stream": stream} | given
        )
        if how is None:
            return {"out": first[0], "residual_out": total}
        y = {"out": given["out"]} if "out" in given else {}  # else nobody has it
        return y | {"residual_out": total, "quant_out": first[0], "scales_out": first[1]}

    def wrong(self, given: Values) -> tuple[Values, str]:
        return {"weight": given["weight"][1:]}, f"weight has shape ({self.shape[-1] - 1},)"


@dataclass(frozen=True)
class QuantisedNorm(Norm):
    """An all-reduce with RMSNorm whose rows are rounded to e4m3, too."""

    name = "norm with e4m3"
    variants = (*Norm.variants[:-1], ({"scales": "group"}, "e4m3 by 128"), ({"scales": ""}, "eps 1e-05"))
    scales: str = "token"


KINDS: tuple[type[Kind], ...] = Plain, FewBlocks, List, Expression, Norm, QuantisedNorm, *SPLITS
