"""The kinds of calls that split arrays among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ipcreduce.ipc import plan
from tests.matrix.kind import Kind, Values, whole
from tests.shared import reference


@dataclass(frozen=True)
class _Split(Kind):
    """A call that splits arrays: one of shape ``whole``, or a list of that one and of others.

    :ivar uneven: with ``sizes=``, of which all but those of the first and the last rank are 0.
    """

    whole: tuple[int, ...] = (12, 120)
    dtype: Any = np.float32
    axis: int = 0
    uneven: bool = False
    further: tuple[tuple[tuple[int, ...], Any], ...] | None = None
    sms: int | None = None

    @property
    def sizes(self) -> list[int] | None:
        """As it is passed."""
        length = self.whole[self.axis]
        return [length - 1, *[0] * (self.size - 2), 1][-self.size :] if self.uneven and self.size > 1 else None

    @property
    def arrays(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes of whole arrays, and dtypes."""
        return [(self.whole, self.dtype), *(self.further or ())]

    def place(self, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
        """A rank's part of an array."""
        sizes = self.sizes or [shape[self.axis] // self.size] * self.size
        begin = sum(sizes[:rank])
        return (*(slice(None),) * (self.axis % len(shape)), slice(begin, begin + sizes[rank]))

    def wholes(self, turn: int, rank: int) -> list[np.ndarray]:
        """Whole arrays of a rank's values."""
        return [whole(turn + index, rank, *one) for index, one in enumerate(self.arrays)]

    def parts(self, arrays: list[Any], rank: int) -> list[Any]:
        """A rank's parts of them."""
        return [array[self.place(array.shape, rank)] for array in arrays]

    def given(self, arrays: list[Any]) -> Any:
        """An argument or a result: the list, or the one array."""
        return arrays[0] if self.further is None else arrays

    def listed(self, given: Any) -> list[Any]:
        """The opposite of :meth:`given`."""
        return [given] if self.further is None else given

    def make(self, call: Any, given: Values, stream: Any, **how: Any) -> Values:
        how |= {"axis": self.axis, "sizes": self.sizes, "sms": self.sms, "stream": stream}
        return {"out": call(**how | given)}

    def wrong(self, given: Values) -> tuple[Values, str]:
        return {"axis": 2}, "axis is 2, and array has 2 dimensions"


_LONG = 6 * (plan.BULK_BYTES // 12000 + 1), 1000  # a part of it is long for two ranks
_FURTHER = ((12, 7), np.uint8), ((12, 3, 2), np.float16)


@dataclass(frozen=True)
class AllGather(_Split):
    """An all-gather of one array. Errors show the shape of a part, whose length depends on the number of ranks."""

    name = "all-gather"
    words = ", 120), axis 0, no sizes="
    variants: ClassVar = (
        ({"axis": 1}, "all-gather of float32 (12, "),
        ({"uneven": True}, "all-gather of float32 (12, 120), axis 0, sizes=["),
        ({"dtype": np.int32}, "all-gather of int32 ("), ({"dtype": np.bool_}, "all-gather of bool ("),
        ({"whole": (24, 60)}, ", 60), axis 0, no sizes="), ({"sms": 3}, " by 3 blocks"),
        ({"further": _FURTHER}, "all-gather of 3 arrays, axis 0, no sizes="),
    )  # fmt: skip

    def inputs(self, turn: int, rank: int) -> Values:
        return {"array": self.given(self.parts(self.wholes(turn, rank), rank))}

    def results(self, turn: int) -> Values:
        ranks = [self.parts(self.wholes(turn, rank), rank) for rank in range(self.size)]
        return {"out": self.given([np.concatenate(parts, self.axis) for parts in zip(*ranks, strict=True)])}

    def overlap(self, inputs: Values, outs: Values, rank: int) -> None:
        inputs["array"] = self.given(self.parts(self.listed(outs["out"]), rank))

    def from_others(self, result: np.ndarray, rank: int) -> np.ndarray:
        return np.delete(result, self.place(result.shape, rank)[self.axis], self.axis)

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        return self.make(comm.allgather, given, stream)


@dataclass(frozen=True)
class AllGatherByFewBlocks(AllGather):
    """A long all-gather with a limit of blocks."""

    name = "all-gather by few blocks"
    words = ", 1000), axis 0, no sizes= by 3 blocks"
    variants: ClassVar = (
        ({"sms": 4}, " by 4 blocks"), ({"sms": None}, ", 1000), axis 0, no sizes= on "),
        ({"uneven": True}, " by 3 blocks"),
    )  # fmt: skip
    whole: tuple[int, ...] = _LONG
    sms: int | None = 3


@dataclass(frozen=True)
class ReduceScatter(_Split):
    """A reduce-scatter of one array."""

    name = "reduce-scatter"
    words = "reduce-scatter by sum of float32 (12, 120), axis 0, no sizes="
    variants: ClassVar = (
        ({"axis": 1}, "reduce-scatter by sum of float32 (12, 120), axis 1, no sizes="),
        ({"uneven": True}, "reduce-scatter by sum of float32 (12, 120), axis 0, sizes=["),
        ({"dtype": np.int32}, "reduce-scatter by sum of int32 (12, 120)"),
        ({"op": "max"}, "reduce-scatter by max of float32 (12, 120)"), ({"sms": 3}, " by 3 blocks"),
        ({"further": _FURTHER}, "reduce-scatter by sum of 3 arrays, axis 0, no sizes="),
    )  # fmt: skip
    op: str = "sum"

    def inputs(self, turn: int, rank: int) -> Values:
        return {"array": self.given(self.wholes(turn, rank))}

    def results_of(self, turn: int, rank: int) -> Values:
        every = zip(*(self.wholes(turn, one) for one in range(self.size)), strict=True)
        return {"out": self.given(self.parts([reference.reduce(list(ofs), self.op) for ofs in every], rank))}

    def overlap(self, inputs: Values, outs: Values, rank: int) -> None:
        outs["out"] = self.given(self.parts(self.listed(inputs["array"]), rank))

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        return self.make(comm.reduce_scatter, given, stream, op=self.op)


@dataclass(frozen=True)
class ReduceScatterByFewBlocks(ReduceScatter):
    """A long reduce-scatter with a limit of blocks."""

    name = "reduce-scatter by few blocks"
    words = f"reduce-scatter by sum of float32 {_LONG}, axis 0, no sizes= by 3 blocks"
    variants: ClassVar = (
        ({"sms": 4}, " by 4 blocks"), ({"sms": None}, f"reduce-scatter by sum of float32 {_LONG}, axis 0, no sizes="),
        ({"op": "max"}, f"reduce-scatter by max of float32 {_LONG}"),
    )  # fmt: skip
    whole: tuple[int, ...] = _LONG
    sms: int | None = 3


@dataclass(frozen=True)
class Broadcast(_Split):
    """A broadcast of one array from the last rank."""

    name = "broadcast"
    has_outs = False
    words = "broadcast of float32 (12, 120) from rank "
    variants: ClassVar = (
        ({"first": True}, "broadcast of float32 (12, 120) from rank 0"), ({"sms": 3}, " by 3 blocks"),
        ({"dtype": np.int32}, "broadcast of int32 (12, 120)"), ({"dtype": np.bool_}, "broadcast of bool (12, 120)"),
        ({"whole": (24, 60)}, "broadcast of float32 (24, 60)"), ({"further": _FURTHER}, "broadcast of 3 arrays"),
    )  # fmt: skip
    first: bool = False  # from the first rank

    def inputs(self, turn: int, rank: int) -> Values:
        return {"array": self.given(self.wholes(turn, rank))}

    def results(self, turn: int) -> Values:
        return {"out": self.inputs(turn, 0 if self.first else self.size - 1)["array"]}

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        how = {"root": 0 if self.first else self.size - 1, "sms": self.sms, "stream": stream} | given
        result = comm.broadcast(**how)
        assert result is how["array"], "a broadcast returns what was passed"
        return {"out": result}

    def wrong(self, given: Values) -> tuple[Values, str]:
        return {"root": self.size}, f"root is {self.size}. Pass a rank from 0 to {self.size - 1}"


@dataclass(frozen=True)
class AllGathers(AllGather):
    """An all-gather of a list."""

    name = "all-gather of a list"
    words = "all-gather of 3 arrays, axis 0, no sizes="
    variants: ClassVar = (
        ({"axis": 1}, "all-gather of 3 arrays, axis 1"), ({"uneven": True}, "all-gather of 3 arrays, axis 0, sizes=["),
        ({"further": _FURTHER[:1]}, "all-gather of 2 arrays"), ({"further": _FURTHER[::-1]}, "all-gather of 3 arrays"),
        ({"further": None}, "all-gather of float32 ("), ({"sms": 3}, " by 3 blocks"),
    )  # fmt: skip
    further: tuple[tuple[tuple[int, ...], Any], ...] | None = _FURTHER


@dataclass(frozen=True)
class ReduceScatters(ReduceScatter):
    """A reduce-scatter of a list."""

    name = "reduce-scatter of a list"
    words = "reduce-scatter by sum of 3 arrays, axis 0, no sizes="
    variants: ClassVar = (
        ({"op": "max"}, "reduce-scatter by max of 3 arrays"), ({"further": _FURTHER[:1]}, "by sum of 2 arrays"),
        ({"uneven": True}, "by sum of 3 arrays, axis 0, sizes=["), ({"further": _FURTHER[::-1]}, "by sum of 3 arrays"),
        ({"further": None}, "reduce-scatter by sum of float32 (12, 120)"), ({"sms": 3}, " by 3 blocks"),
    )  # fmt: skip
    further: tuple[tuple[tuple[int, ...], Any], ...] | None = _FURTHER


@dataclass(frozen=True)
class Broadcasts(Broadcast):
    """A broadcast of a list from the last rank."""

    name = "broadcast of a list"
    words = "broadcast of 3 arrays from rank "
    variants: ClassVar = (
        ({"first": True}, "broadcast of 3 arrays from rank 0"), ({"sms": 3}, " by 3 blocks"),
        ({"further": _FURTHER[:1]}, "broadcast of 2 arrays"), ({"further": _FURTHER[::-1]}, "broadcast of 3 arrays"),
        ({"further": None}, "broadcast of float32 (12, 120)"),
    )  # fmt: skip
    further: tuple[tuple[tuple[int, ...], Any], ...] | None = _FURTHER


SPLITS: tuple[type[Kind], ...] = (
    AllGather, AllGatherByFewBlocks, ReduceScatter, ReduceScatterByFewBlocks, Broadcast, AllGathers, ReduceScatters,
    Broadcasts,
)  # fmt: skip
