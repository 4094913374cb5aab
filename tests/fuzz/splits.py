"""Steps with an all-gather, a reduce-scatter or a broadcast."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

import ipcreduce
from tests.fuzz.bodies import Values, Wrong, dtype_of
from tests.fuzz.programs import Step
from tests.shared import reference

if TYPE_CHECKING:
    from tests.fuzz.rank import Player

Shape = tuple[int, ...]


class Member:
    """One array of a call: every rank's values, and what the call has to give.

    :ivar places: by rank, of its part in a whole array.
    """

    def __init__(self, step: Step, index: int, ranks: int) -> None:
        name, length, others = step["members"][index]
        self.collective, self.op, self.dtype = step["collective"], step["op"], dtype_of(name)
        self.root = step["root"] % ranks
        sizes = (step["sizes"] or [length] * ranks)[:ranks]
        axis = step["axis"] % (len(others) + 1)
        begins = accumulate(sizes, initial=0)
        self.places = [(*(slice(None),) * axis, slice(at, at + size)) for at, size in zip(begins, sizes, strict=False)]
        self.whole: Shape = (*others[:axis], sum(sizes), *others[axis:])
        self.seed, self.special, self.ranks = step["seed"] + index, step["special"], ranks

    @property
    def moves(self) -> bool:
        """True if bytes are moved, and False if they are reduced."""
        return self.collective != "reduce_scatter"

    def values(self, turn: int) -> Values:
        """Whole arrays by rank; in an all-gather a rank passes its part of one."""
        return [self._random(np.random.default_rng([self.seed, turn, rank])) for rank in range(self.ranks)]

    def _random(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        if not self.moves:
            return reference.random_array(rng, self.whole, self.dtype, reference.is_float(self.dtype) and self.special)
        raw = rng.integers(0, 256, (int(np.prod(self.whole)), self.dtype.itemsize), np.uint8)
        raw[rng.random(len(raw)) < 0.2] = 0xFF  # the pattern that an empty slot has
        raw = raw & 1 if self.dtype == bool else raw
        return raw.reshape(-1).view(self.dtype).reshape(self.whole)

    def expected(self, values: Values, rank: int) -> np.ndarray[Any, Any]:
        """This rank's result."""
        if self.collective == "broadcast":
            return values[self.root]
        if self.collective == "reduce_scatter":
            return reference.wrapping(values, self.op)[self.places[rank]]
        result = values[0].copy()
        for one, place in zip(values, self.places, strict=True):
            result[place] = one[place]
        return result


class Arrays:
    """A member's arrays on this rank. :ivar given: what is passed. :ivar out: None for a new one."""

    def __init__(self, member: Member, step: Step, rank: int) -> None:
        place, gathers = member.places[rank], member.collective == "allgather"
        part = np.empty(member.whole, bool)[place].shape
        self.given = _empty(part if gathers else member.whole, member.dtype, step["layout"], step["host"])
        self.out = self.whole = None
        if member.collective == "broadcast" or step["out"] == "new":
            return
        form, layout = member.whole if gathers else part, "plain" if step["out"] == "array" else "strided"
        if step["out"] != "in place":
            self.out = _empty(form, member.dtype, layout, step["host"])
        elif gathers:
            self.out = _empty(form, member.dtype, step["layout"], step["host"])
            self.given = self.out[place]
        else:
            self.whole, self.out = self.given, self.given[place]


def _empty(shape: Shape, dtype: np.dtype[Any], layout: str, on_host: bool) -> Any:
    """An array that lies so in zeros."""
    zeros, count = (np if on_host else cupy).zeros, int(np.prod(shape))
    if layout == "offset":
        return zeros(count + 3, dtype)[3:].reshape(shape)
    if layout == "strided":
        return zeros((*shape, 2), dtype)[..., 0]
    if layout == "turned":
        return zeros(shape[::-1], dtype).T
    return zeros(shape, dtype)


def split(player: Player, comm: Any, step: Step) -> None:
    """One call, and the same again on the same arrays with other values: it is known then."""
    members = [Member(step, index, player.size) for index in range(len(step["members"]))]
    stream = player.streams[step["stream"]]
    with stream:
        arrays = [Arrays(member, step, player.rank) for member in members]
    for turn in range(step["calls"]):
        values = [member.values(turn) for member in members]
        with stream:
            for one, member, by_rank in zip(arrays, members, values, strict=True):
                mine = by_rank[player.rank]
                mine = mine[member.places[player.rank]] if member.collective == "allgather" else mine
                one.given[...] = mine if step["host"] else cupy.asarray(mine)
            if step["by"] != "stream":
                results = _call(player, comm, step, arrays)
        if step["by"] == "stream":
            results = _call(player, comm, step, arrays, stream=stream)
        with stream:
            for result, one, member, by_rank in zip(results, arrays, members, values, strict=True):
                _expect(player, stream, result, member.expected(by_rank, player.rank), member.moves)
                if one.whole is not None:  # nothing beside the part is written
                    whole = by_rank[player.rank].copy()
                    whole[member.places[player.rank]] = member.expected(by_rank, player.rank)
                    _expect(player, stream, one.whole, whole, member.moves)


def _call(player: Player, comm: Any, step: Step, arrays: list[Arrays], **stream: Any) -> list[Any]:
    """The results, as a list."""
    collective, is_list = step["collective"], step["is_list"]
    given, out = [one.given for one in arrays], [one.out for one in arrays]
    options: dict[str, Any] = {"sms": step["sms"], **stream}
    if collective == "broadcast":
        options |= {"root": step["root"] % player.size}
    else:
        options |= {"axis": step["axis"], "sizes": step["sizes"] and step["sizes"][: player.size]}
        options |= {"op": step["op"]} if collective == "reduce_scatter" else {}
        options |= {} if step["out"] == "new" else {"out": out if is_list else out[0]}
    call = getattr(comm, collective)
    if step["by"] == "function":
        call, options = getattr(ipcreduce, collective), options | {"comm": comm}
    passed = given if is_list else given[0]
    returned = call(passed, **options)
    due = passed if collective == "broadcast" else options.get("out")
    if due is not None and returned is not due:
        raise Wrong(f"{player.text}: another array was returned than was to be written")
    return returned if is_list else [returned]


def _expect(player: Player, stream: Any, result: Any, due: np.ndarray[Any, Any], moved: bool) -> None:
    """Look at a result later: as bits, if it was moved."""
    player.later(result.copy(), due.view(f"V{due.dtype.itemsize}") if moved else due, stream)
