"""The data of a program, and what recordings do with them, on the device and in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ipcreduce import eager_break
from tests.fuzz.programs import SPLITTING, Step
from tests.shared import reference

if TYPE_CHECKING:
    from tests.fuzz.rank import Player

Values = list["np.ndarray[Any, Any]"]  # by rank


class Wrong(Exception):
    """The library did not do as it has to."""


def expect_error(text: str, kinds: Sequence[type[BaseException]], words: str, call: Callable[[], object]) -> None:
    """:raises Wrong: if ``call`` raises none of these errors, or one without these words. ``text`` is said then."""
    try:
        call()
    except tuple(kinds) as error:
        if words not in str(error):
            raise Wrong(f"{text}: {error!r}, expected the words {words!r}") from error
    else:
        raise Wrong(f"{text}: no error, expected one of {kinds}")


def dtype_of(name: str) -> np.dtype[Any]:
    return reference.BFLOAT16 if name == "bfloat16" else np.dtype(name)


def draws(step: Step, size: int, dtype: np.dtype[Any], special: bool) -> Values:
    """Every rank's data."""
    return [
        reference.random_array(np.random.default_rng([step["seed"], rank]), (step["count"],), dtype, special)
        for rank in range(size)
    ]


def on_device(data: np.ndarray[Any, Any], layout: str) -> Any:
    """A device array of these values."""
    flat = cupy.asarray(data)
    if layout == "plain" or not data.size:
        return flat
    if layout == "rows":
        return flat.reshape(1, data.size)[0]
    wide = cupy.zeros(data.size + 3 if layout == "offset" else 2 * data.size, data.dtype)
    view = wide[3:] if layout == "offset" else wide[::2]
    view[...] = flat
    return view


def output(source: Any, how: str, comm: Any) -> tuple[Any, Any]:
    """(out=, the array that then has the result); the latter None for the one that is returned."""
    if how == "same":
        return source, None
    if how == "array":
        return cupy.zeros(source.shape, source.dtype), None
    if how == "empty" and source.size:
        return comm.empty(source.shape, source.dtype), None
    if how == "strided" and source.size:
        return cupy.zeros(2 * source.size, source.dtype)[::2], None
    return None, None


@eager_break
def bump(array: Any, by: int) -> None:
    """A break that changes an array in place."""
    array += by


@eager_break
def reduce_in_place(comm: Any, array: Any, op: str) -> None:
    """A break with an all-reduce."""
    comm.allreduce(array, op, out=array)


@eager_break
def broadcast_in_place(comm: Any, array: Any, root: int) -> None:
    """A break with a broadcast."""
    comm.broadcast(array, root)


class Recorded:
    """A graph with its input, its output, and what it computes."""

    def __init__(self, graph: Any, step: Step, player: Player) -> None:
        self.graph, self.body, self.rank, self.size = graph, step["body"], player.rank, player.size
        self.stream = cupy.cuda.get_current_stream()  # of the arrays' memory
        self._count, self._dtype = step["count"], np.dtype(step["dtype"])
        self.source = cupy.zeros(step["count"], self._dtype)
        self.output: Any = None
        self._seed = 0
        self._held: list[Any] = []

    def fill(self, seed: int) -> None:
        """New input: small numbers, so that float32 has sums of them exactly."""
        self._seed = seed
        self.source[...] = cupy.asarray(self._inputs()[self.rank])

    def _inputs(self) -> Values:
        return [
            np.random.default_rng([seed, rank]).integers(-4, 5, self._count).astype(self._dtype)
            for rank, seed in enumerate([self._seed] * self.size)
        ]

    def _split(self, comm: Any, kind: str, detail: Any, value: Any) -> tuple[Any, Any]:
        """Two calls that split arrays: what is between them, and the result."""
        if kind == "gather":
            between = comm.allgather(value)
            return between, comm.reduce_scatter(between, detail)
        if kind == "columns":
            between = comm.allgather(value.reshape(-1, 1), axis=1)
            return between, comm.reduce_scatter(between, detail, axis=-1).reshape(-1)
        if kind == "split lists":
            between = comm.allgather([value, value * 2])
            first, second = comm.reduce_scatter(between, detail)
            return between, first + second
        if kind == "in place":
            between = cupy.zeros(self.size * self._count, self._dtype)
            own = between[self.rank * self._count : (self.rank + 1) * self._count]
            own[...] = value
            comm.allgather(own, out=between)
            comm.reduce_scatter(between, detail, out=own)
            return between, own * 1
        sizes = [self._count * (rank == detail % self.size) for rank in range(self.size)]  # one rank has it all
        between = comm.reduce_scatter(value, sizes=sizes)
        return between, comm.allgather(between, sizes=sizes)

    def trace(self, comm: Any, *, breaks: bool, into: Any = None) -> None:
        """Do on the device what :meth:`_expected` does.

        :param into: the output of a capture by others, whose program has to hold what its graph uses.
        """
        hold: Callable[[Any], None] = (lambda _: None) if into is None else self._held.append
        value = self.source * 1
        for kind, detail in self.body:
            hold(value)
            if kind == "reduce":
                value = comm.allreduce(value, detail)
            elif kind == "into":
                comm.allreduce(value, detail, out=value)
            elif kind == "list":
                value, other = comm.allreduce([value, value * 2], detail)
                hold(other)
                value = value + other
            elif kind in (*SPLITTING, "uneven"):
                between, value = self._split(comm, kind, detail, value)
                hold(between)
            elif kind == "broadcast":
                comm.broadcast(value, detail % self.size)
            elif kind == "broadcasting break":
                broadcast_in_place(comm, value, detail % self.size)
            elif kind == "scale":
                value = value * detail
            elif kind == "add":
                value = value + (self.rank + detail)
            elif kind == "temporary":
                other = value * detail
                hold(other)
                value = other + value
                del other
            elif kind == "break":
                bump(value, detail)
            elif kind == "reducing break":
                reduce_in_place(comm, value, detail)
        if into is None:
            self.output = value
        else:
            self._held.append(value)
            into[...] = value

    def _expected(self) -> np.ndarray[Any, Any]:
        values = self._inputs()
        for kind, detail in self.body:
            if kind in ("reduce", "into", "reducing break"):
                values = [reference.wrapping(values, detail)] * self.size
            elif kind in SPLITTING:
                wide = [[value * value.dtype.type(by) for value in values] for by in (1, 2)]
                first, second = ([reference.wrapping([one] * self.size, detail) for one in ofs] for ofs in wide)
                pairs = zip(first, second, strict=True)
                values = [one + other for one, other in pairs] if kind == "split lists" else first
            elif kind == "uneven":
                values = [reference.wrapping(values, "sum")] * self.size
            elif kind in ("broadcast", "broadcasting break"):
                values = [values[detail % self.size]] * self.size
            elif kind == "list":
                both = [reference.wrapping([value * value.dtype.type(by) for value in values], detail) for by in (1, 2)]
                values = [both[0] + both[1]] * self.size
            elif kind == "scale":
                values = [value * value.dtype.type(detail) for value in values]
            elif kind == "add":
                values = [value + value.dtype.type(rank + detail) for rank, value in enumerate(values)]
            elif kind == "temporary":
                values = [value * value.dtype.type(detail) + value for value in values]
            elif kind == "break":
                values = [value + value.dtype.type(detail) for value in values]
        return values[self.rank]

    def expect(self, player: Player, stream: Any) -> None:
        """Keep a copy of the output, to be looked at later."""
        with stream:
            player.later(self.output.copy(), self._expected(), stream)
        player.used(stream)
