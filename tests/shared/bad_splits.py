"""Wrong all-gathers, reduce-scatters and broadcasts, for the table of bad_call_table.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ipcreduce import RankMismatchError
from ipcreduce.texts import shown
from tests.shared.bad_call_table import (
    UNREADABLE,
    OddIndex,
    OddList,
    OnDevice,
    Row,
    mine,
    ours,
    read_only,
    strided,
)
from tests.shared.world import WORLD

Call = Callable[[Any, Any], Any]
N = WORLD.size
ODD_NUMBERS = UNREADABLE | {"an odd number": (OddIndex, "no number today")}


def gather(module: Any, comm: Any, shape: Any = 6, **how: Any) -> Any:
    return comm.allgather(mine(module, comm, shape), **how)


def scatter(module: Any, comm: Any, *args: Any, shape: Any = 6 * N, **how: Any) -> Any:
    return comm.reduce_scatter(mine(module, comm, shape), *args, **how)


def broadcast(module: Any, comm: Any, shape: Any = 6, root: Any = 0, dtype: Any = np.float32) -> Any:
    return comm.broadcast(mine(module, comm, shape, dtype), root)


HUGE = 10**5000  # of more digits than Python prints
CALLS: dict[str, Any] = {"all-gather": gather, "reduce-scatter": scatter, "broadcast": broadcast}


def bad_axes() -> Iterator[Row]:
    for name in ("all-gather", "reduce-scatter"):
        make = CALLS[name]
        for axis in (True, np.True_, 0.0, "0", None, (0,), HUGE):
            call = lambda m, c, make=make, axis=axis: make(m, c, axis=axis)  # noqa: E731
            yield Row(f"{name}: axis {shown(axis)}", call, ("axis is ", ". Pass an int"))
        for kind, (odd, text) in ODD_NUMBERS.items():
            call = lambda m, c, make=make, odd=odd: make(m, c, axis=odd())  # noqa: E731
            yield Row(f"{name}: axis {kind}", call, ("axis is a", "which cannot be read (", text))
        for axis in (2, -3):
            call = lambda m, c, make=make, axis=axis: make(m, c, shape=(6, 2), axis=axis)  # noqa: E731
            words = (f"axis is {axis}, and array has 2 dimensions. Pass an axis from -2 to 1",)
            yield Row(f"{name}: axis {axis}", call, words)
    yield Row(
        "reduce-scatter: no axis", lambda m, c: scatter(m, c, shape=()), ("array has 0 dimensions. Pass an array with",)
    )
    yield Row("all-gather: axis 1 of none", lambda m, c: gather(m, c, (), axis=1), ("axis is 1", "from -1 to 0"))


def bad_sizes() -> Iterator[Row]:
    for name in ("all-gather", "reduce-scatter"):
        for sizes, found in (
            ([6] * (N + 1), f"Pass {N} ints, the length of each rank's part along axis"),
            ([6] * (N - 1), f"Pass {N} ints"), ("6" * N, f"Pass {N} ints"), (6, f"Pass {N} ints"),
            (dict.fromkeys(range(N), 6), f"Pass {N} ints"),
            ([*[6] * (N - 1), -6], "Pass lengths of 0 or more"), ([6.0] * N, "a member of sizes is 6.0. Pass an int"),
            ([True] * N, "a member of sizes is True. Pass an int"), ([None] * N, "a member of sizes is None"),
            ([6] * (N - 1) + [1 << 62], f"a member of sizes is {1 << 62}. Pass"), (HUGE, "sizes is int. Pass"),
        ):  # fmt: skip
            call = lambda m, c, make=CALLS[name], sizes=sizes: make(m, c, sizes=sizes)  # noqa: E731
            yield Row(f"{name}: sizes {shown(sizes) if sizes is HUGE else sizes}", call, ("sizes", found))
        odd_lists = UNREADABLE | {"an odd list": (lambda: OddList([6] * N), "no member today")}
        for kind, (odd, text) in odd_lists.items():
            call = lambda m, c, make=CALLS[name], odd=odd: make(m, c, sizes=odd())  # noqa: E731
            yield Row(f"{name}: sizes {kind}", call, ("sizes is a", "which cannot be read (", text))
        for kind, (odd, text) in ODD_NUMBERS.items():
            call = lambda m, c, make=CALLS[name], odd=odd: make(m, c, sizes=[odd()] * N)  # noqa: E731
            yield Row(f"{name}: sizes of {kind}", call, ("a member of sizes is a", text))
    words = ("array has length 6 along axis 0, but sizes=[5", "says 5 for rank", "Pass the length of each rank's array")
    yield Row("all-gather: another length", lambda m, c: gather(m, c, sizes=[5] * N), words)
    words = (f"array has length {6 * N} along axis 0, but sizes=[5", f"makes {5 * N}. Pass lengths that make up")
    yield Row("reduce-scatter: another sum", lambda m, c: scatter(m, c, sizes=[5] * N), words)
    if N > 1:
        words = (f"array has length {N + 1} along axis 1, which {N} ranks do not divide. Pass sizes=, the length",)
        yield Row("reduce-scatter: no equal parts", lambda m, c: scatter(m, c, shape=(N, N + 1), axis=1), words)
        huge, shape = [1 << 46 if rank == (WORLD.rank + 1) % N else 6 for rank in range(N)], (6, 0, 1 << 20)
        words = (f"the whole array would have shape {(sum(huge), *shape[1:])}, which no memory holds. Pass shorter",)
        yield Row("all-gather: sizes beyond memory", lambda m, c: gather(m, c, shape, sizes=huge), words)
    words = (f"member 1 of the list: array has length 5 along axis 0, but sizes={[6] * N}",)
    yield Row(
        "all-gather: a member of another length",
        lambda m, c: c.allgather([mine(m, c), mine(m, c, 5)], sizes=[6] * N), words,
    )  # fmt: skip


def bad_outputs() -> Iterator[Row]:
    def outs(name: str, make: Any, *words: str, on: str = "any") -> Iterator[Row]:
        """``make``: of the module and the length of the result."""
        for collective, length in (("all-gather", 6 * N), ("reduce-scatter", 6)):
            call = lambda m, c, of=CALLS[collective], length=length: of(m, c, out=make(m, length))  # noqa: E731
            yield Row(f"{collective}: out {name}", call, ("out", *words), on=on)

    advice = "Pass an out of that form, or leave out= away"
    yield from outs("longer", lambda m, length: ours(m, [0] * (length + 1)), "out has shape (", "has shape (", advice)
    yield from outs("of 2 axes", lambda m, length: ours(m, [[0] * length]), "out has shape (1, ", advice)
    yield from outs("of int32", lambda m, length: ours(m, [0] * length, np.int32), "and dtype int32", advice)
    yield from outs("a number", lambda m, length: 0.0, "float")
    yield from outs("a list", lambda m, length: [0.0] * length, "list")
    frozen = lambda m, length: np.frombuffer(bytes(4 * length), "f4")  # noqa: E731
    yield from outs("read-only", frozen, "cannot be written", on="host")
    frozen = lambda m, length: read_only(ours(m, [0] * length))  # noqa: E731
    yield from outs("read-only", frozen, "cannot be written", on="device")
    yield from outs("on the GPU", lambda m, length: OnDevice(), "lies on the host, but out is a OnDevice", on="host")
    yield from outs(
        "on the host", lambda m, length: np.zeros(length, "f4"), "array lies on the GPU, but out is an ndarray",
        on="device",
    )  # fmt: skip
    words = ("elements of out share memory",)
    yield Row("reduce-scatter: out with stride 0", lambda m, c: scatter(m, c, out=strided(m, 0)), words)
    yield from bad_lists()


def bad_lists() -> Iterator[Row]:
    words = ("array is a list of 2 arrays, but out is a list of 1. Pass an output for each",)
    yield Row(
        "all-gather: a shorter out", lambda m, c: c.allgather([mine(m, c), mine(m, c)], out=[mine(m, c, 6 * N)]), words
    )
    for name, call in (
        ("all-gather", lambda m, c: c.allgather([mine(m, c)] * 2, out=[mine(m, c, 6 * N)] * 2)),
        ("reduce-scatter", lambda m, c: c.reduce_scatter([mine(m, c, 6 * N)] * 2, out=[mine(m, c)] * 2)),
        ("broadcast", lambda m, c: c.broadcast([mine(m, c)] * 2)),
    ):
        if name == "broadcast":
            call = lambda m, c: c.broadcast([array := mine(m, c), array])  # noqa: E731
        else:
            call = lambda m, c, call=call: call(m, c)  # noqa: E731
        yield Row(f"{name}: one output twice", call, ("of the list shares memory with the",))
    words = ("member 1 of the list", "it is a float, and no array")
    for name in ("allgather", "reduce_scatter", "broadcast"):
        yield Row(f"{name}: a list with a number", lambda m, c, n=name: getattr(c, n)([mine(m, c, N), 1.0]), words)


def overlapping() -> Iterator[Row]:
    """Nothing is written before it is refused."""

    def kept(module: Any, buffer: Any, call: Callable[[], Any]) -> Any:
        before = module.read(buffer).copy()
        try:
            return call()
        finally:
            assert (module.read(buffer) == before).all(), "written by a call that was refused"

    def shifted_gather(module: Any, comm: Any) -> Any:
        buffer = mine(module, comm, 6 * N + 1)
        at = 6 * comm.rank
        return kept(module, buffer, lambda: comm.allgather(buffer[at : at + 6], out=buffer[1:]))

    def shifted_scatter(module: Any, comm: Any) -> Any:
        buffer = mine(module, comm, 6 * N + 1)
        at = 6 * comm.rank
        return kept(module, buffer, lambda: comm.reduce_scatter(buffer[1:], out=buffer[at : at + 6]))

    def turned_gather(module: Any, comm: Any) -> Any:
        """The right place, but other elements of it."""
        buffer = ours(module, np.arange(9 * N).reshape(3 * N, 3))
        place = buffer[3 * comm.rank : 3 * comm.rank + 3]
        return kept(module, buffer, lambda: comm.allgather(place.T, out=buffer))

    def turned_scatter(module: Any, comm: Any) -> Any:
        buffer = ours(module, np.arange(9 * N).reshape(3 * N, 3))
        place = buffer[3 * comm.rank : 3 * comm.rank + 3]
        return kept(module, buffer, lambda: comm.reduce_scatter(buffer, out=place.T))

    def other_members(module: Any, comm: Any) -> Any:
        """Each member's part lies in another member's output."""
        outs = [mine(module, comm, 6 * N), mine(module, comm, 6 * N)]
        place = slice(6 * comm.rank, 6 * comm.rank + 6)
        return comm.allgather([outs[1][place], outs[0][place]], out=outs)

    words = ("out shares memory with array. Pass an out that shares none, or make array this rank's part of out",)
    yield Row("all-gather: shifted", shifted_gather, words)
    yield Row("all-gather: transposed", turned_gather, words)
    words = ("out shares memory with array. Pass an out that shares none, or make out this rank's part of array",)
    yield Row("reduce-scatter: shifted", shifted_scatter, words)
    yield Row("reduce-scatter: transposed", turned_scatter, words)
    yield Row("all-gather: crossed", other_members, ("the output of member ", " of the list shares memory with the "))


def bad_arrays() -> Iterator[Row]:
    for name, make in (("all-gather", "allgather"), ("reduce-scatter", "reduce_scatter"), ("broadcast", "broadcast")):
        call = lambda m, c, make=make: getattr(c, make)(None)  # noqa: E731
        yield Row(f"{name}: None", call, ("array is a ", "has neither __dlpack__"))
        for number in (1.0, 1, True, 1j, np.float32(1)) if make != "allgather" else ():
            call = lambda m, c, make=make, number=number: getattr(c, make)(number)  # noqa: E731
            words = (f"array is a number, and {name} takes arrays. Pass numpy.asarray(it)",)
            yield Row(f"{name}: {number!r}", call, words)
        call = lambda m, c, make=make: getattr(c, make)(mine(m, c, N), sms=0)  # noqa: E731
        yield Row(f"{name}: sms", call, ("sms is 0. Pass how many blocks",))
        call = lambda m, c, make=make: getattr(c, make)(mine(m, c, N), stream="0")  # noqa: E731
        yield Row(f"{name}: stream", call, ("stream is a str, which is no stream",))
        call = lambda m, c, make=make: getattr(c, make)(np.array([[]] * N, object))  # noqa: E731
        yield Row(f"{name}: objects", call, ("dtype object is of Python objects",), on="host")
    yield Row("reduce-scatter: op", lambda m, c: scatter(m, c, "mode"), ("there is no op 'mode'",))
    for op, dtype, word in (
        ("prod", "F", "complex64 has no"),
        ("sum", "?", "bool has no"),
        ("any", "f4", "takes bool"),
    ):
        call = lambda m, c, op=op, dtype=dtype: c.reduce_scatter(mine(m, c, 6 * N, dtype), op)  # noqa: E731
        yield Row(f"reduce-scatter: {op} of {dtype}", call, (word,))
    for root in (-1, N):
        call = lambda m, c, root=root: broadcast(m, c, root=root)  # noqa: E731
        yield Row(f"broadcast: root {root}", call, (f"root is {root}. Pass a rank from 0 to {N - 1}",))
    for kind, (odd, text) in ODD_NUMBERS.items():
        call = lambda m, c, odd=odd: broadcast(m, c, root=odd())  # noqa: E731
        yield Row(f"broadcast: root {kind}", call, ("root is a", "which cannot be read (", text))
    for root in (True, 0.0, "0", None, HUGE):
        call = lambda m, c, root=root: broadcast(m, c, root=root)  # noqa: E731
        yield Row(f"broadcast: root {shown(root)}", call, ("root is ", "Pass an int"))
    elsewhere = lambda c: (c.rank + 1) % N  # noqa: E731
    words = ("array cannot be written: this ", "such as a copy in NumPy or CuPy, on every rank but the root")
    frozen = lambda m, c: c.broadcast(np.frombuffer(bytes(24), "f4"), elsewhere(c))  # noqa: E731
    yield Row("broadcast: read-only", frozen, words, who=("one",), on="host")
    frozen = lambda m, c: c.broadcast(read_only(mine(m, c)), elsewhere(c))  # noqa: E731
    yield Row("broadcast: read-only", frozen, words, who=("one",), on="device")
    frozen = lambda m, c: c.broadcast(strided(m, 0), elsewhere(c))  # noqa: E731
    yield Row("broadcast: stride 0", frozen, ("elements of array share memory", "array.copy()"), who=("one",))


def differences() -> Iterator[Row]:
    def differs(right: Call, call: Call, *words: str) -> Row:
        error = RankMismatchError
        return Row(f"split call of {words[-1]} on one rank", call, words, error, error, ("one",), right)

    theirs, advice = "all-gather of float32 (6,), axis 0, no sizes=", "if the parts differ in length, pass sizes="
    yield differs(gather, lambda m, c: gather(m, c, 7), theirs, advice, "(7,), axis 0, no sizes=")
    yield differs(gather, lambda m, c: gather(m, c, (6, 1)), theirs, "(6, 1), axis 0")
    sizes = [6] * N
    yield differs(gather, lambda m, c: gather(m, c, sizes=sizes), theirs, f"({6 * N},), axis 0, sizes={sizes}")
    yield differs(
        lambda m, c: gather(m, c, (6, 6)), lambda m, c: gather(m, c, (6, 6), axis=-1),
        "(6, 6), axis 0", "(6, 6), axis 1",
    )  # fmt: skip
    yield differs(gather, lambda m, c: c.allgather(mine(m, c, 6, np.int32)), theirs, "all-gather of int32 (")
    yield differs(gather, lambda m, c: c.allgather([mine(m, c)]), theirs, "all-gather of 1 arrays, axis 0")
    yield differs(gather, scatter, theirs, "reduce-scatter by sum of float32")
    theirs = f"reduce-scatter by sum of float32 ({6 * N},), axis 0, no sizes="
    yield differs(scatter, lambda m, c: scatter(m, c, "max"), theirs, "reduce-scatter by max of float32")
    yield differs(scatter, lambda m, c: scatter(m, c, shape=7 * N), theirs, f"({7 * N},), axis 0")
    other = [6 * N, *[0] * (N - 1)]
    yield differs(scatter, lambda m, c: scatter(m, c, sizes=other), theirs, f", axis 0, sizes={other}")
    yield differs(
        lambda m, c: scatter(m, c, shape=(2 * N, 2 * N)), lambda m, c: scatter(m, c, shape=(2 * N, 2 * N), axis=1),
        f"({2 * N}, {2 * N}), axis 0", f"({2 * N}, {2 * N}), axis 1",
    )  # fmt: skip
    yield differs(scatter, lambda m, c: c.allreduce(mine(m, c, 6 * N)), theirs, f"sum of float32 ({6 * N},)")
    theirs = "broadcast of float32 (6,) from rank 0"
    yield differs(broadcast, lambda m, c: broadcast(m, c, root=N - 1), theirs, f"(6,) from rank {N - 1}")
    yield differs(broadcast, lambda m, c: broadcast(m, c, (2, 3)), theirs, "broadcast of float32 (2, 3)")
    yield differs(broadcast, lambda m, c: broadcast(m, c, dtype=np.int32), theirs, "broadcast of int32 (6,)")


def rows() -> Iterator[Row]:
    """The table. Some calls are made by all ranks and the others by one, as a call of each kind takes its time."""
    groups = (bad_axes, bad_sizes, bad_outputs, overlapping, bad_arrays, differences)
    for index, row in enumerate(row for group in groups for row in group()):
        yield replace(row, who=row.who[index % len(row.who) :][:1]) if N > 1 else row
