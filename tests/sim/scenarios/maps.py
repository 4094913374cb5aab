"""Calls with an expression: recordings, captures, faults, and what is refused.

The results of random calls are those of tests/gpu/sweep.py, which runs here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import cupy
import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import Communicator, Graph, Map, errors
from tests.shared import clock
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    SIZE,
    TOTAL,
    delay,
    mine,
    others_wait,
    raises,
    told,
    works,
)
from tests.sim.scenarios.lists import failed, over_backends
from tests.simulated import compiler
from tests.simulated import pytorch as torch
from tests.simulated.pytorch import Tensor

SUM = "v * s + a"  # of which the kernels are built once


def holds(array: Any, value: Any) -> None:
    """Each element of an array, or of a tensor, is ``value``."""
    found = cupy.asnumpy(getattr(array, "array", array))
    assert (found == np.asarray(value)).all(), f"rank {RANK}: {found.reshape(-1)[:6]}, not {value}"


def floats(value: float, count: int = 1000) -> Any:
    return cupy.full((count,), value, np.float32)


def forms_of_expressions() -> None:
    """New results, the caller's, in place; numbers of each kind; operands that are the input or the output."""

    def check(comm: Any) -> None:
        x, a = mine(), floats(5 + RANK)  # operands may differ between the ranks
        for s in (2, 2.0, np.float32(2), np.float16(2)):
            holds(comm.allreduce(x, then=Map(SUM, s=s, a=a)), TOTAL * 2 + 5 + RANK)
        out = floats(0)
        for op in ("max", MPI.MAX, np.str_("max")):
            assert comm.allreduce(x, op, out=out, then=Map(SUM, s=3, a=a)) is out
            holds(out, SIZE * 3 + 5 + RANK)
        assert comm.allreduce(x, out=out, then=Map(SUM, s=1, a=out)) is out
        holds(out, TOTAL + SIZE * 3 + 5 + RANK)  # the operand is the output itself, read before it is written
        assert comm.allreduce(x, out=x, then=Map(SUM, s=2, a=x)) is x
        holds(x, TOTAL * 2 + RANK + 1)
        wide = mine(2000).reshape(1000, 2)[:, 0]
        assert comm.allreduce(wide, out=wide, then=Map(SUM, s=2, a=wide)) is wide
        holds(wide, TOTAL * 2 + RANK + 1)
        holds(comm.allreduce(mine(), then=Map("v", unused=7)), TOTAL)
        empty = comm.allreduce(floats(0, 0), then=Map(SUM, s=1, a=floats(0, 0)))
        assert empty.shape == (0,)
        narrow = cupy.asarray(np.full(40, 30_000, np.int16))  # which NCCL reduces as int32
        holds(comm.allreduce(narrow, then=Map("v / 2")), np.full(40, 30_000 * SIZE).astype(np.int16) // 2)
        with torch.imported():
            tensors = Tensor(mine()), Tensor(floats(4))
            result = comm.allreduce(tensors[0], then=Map(SUM, s=2, a=tensors[1]))
            assert type(result) is Tensor
            comm.synchronize()
            holds(result, TOTAL * 2 + 4)

    over_backends(check)
    ipcreduce.get_communicator().close()
    holds(ipcreduce.allreduce(mine(), then=Map(SUM, s=2, a=floats(1))), TOTAL * 2 + 1)
    ipcreduce.get_communicator().close()


def rounded_once() -> None:
    """v is what a plain call gives, and the value is rounded once: not added to the sum before that is rounded."""

    def check(comm: Any) -> None:
        for dtype in (np.float16, np.dtype(ml_dtypes.bfloat16)):
            step = 2.0**-10 if dtype == np.float16 else 2.0**-7
            given = cupy.asarray(np.full(40, 1 if RANK == 0 else step / 2 / max(1, LAST), dtype))
            plain = cupy.asnumpy(comm.allreduce(given)).astype(np.float32)
            found = comm.allreduce(given, then=Map("v + h", h=np.float32(step * 0.75)))
            holds(found, (plain + np.float32(step * 0.75)).astype(dtype))
        x = cupy.full(
            (40,), 1 + 2.0**-12, np.float32
        )  # a product that a compiler could contract with the sum behind it
        product = np.float32(1)
        for _ in range(SIZE):
            product = np.float32(product * np.float32(1 + 2.0**-12))
        holds(comm.allreduce(x, "prod", then=Map("v - 1.0f")), product - np.float32(1))

    over_backends(check)


def compiled_once() -> None:
    """Another value of a number compiles nothing. Another dtype or kind of an operand does, once."""
    with Communicator() as comm:
        x = mine()
        then = Map(SUM, s=1, a=floats(0))
        comm.allreduce(x, then=then)
        with mock.patch.object(compiler, "compile_kernel", side_effect=AssertionError("compiled anew")):
            for s in (2, 3.5, -1):
                holds(comm.allreduce(x, then=Map(SUM, s=s, a=floats(1))), TOTAL * s + 1)
                holds(comm.allreduce(mine(77), then=Map(SUM, s=s, a=floats(1, 77))), TOTAL * s + 1)
            with raises(AssertionError, "compiled anew"):
                comm.allreduce(x, then=Map("v + 1"))
        works(comm)


def recorded_expressions() -> None:
    """A recording keeps numbers, and reads arrays at each replay. It holds those that the program drops."""
    for arguments in ({}, {"backend": "nccl"}, {"algorithm": "direct"}):
        with Communicator(**arguments) as comm:
            x, a, dropped = mine(), floats(1), floats(7)
            out = floats(0)
            with Graph(comm) as graph:
                with graph.record():
                    inside = x * 1
                    new = comm.allreduce(inside, then=Map(SUM, s=2, a=a))
                    comm.allreduce(x, out=out, then=Map(SUM, s=3, a=dropped))
                    comm.allreduce(new, "max", out=new)
                del dropped
                for factor in (1, 2, 3):
                    x.fill((RANK + 1) * factor)
                    a.fill(factor)
                    poison = [floats(-1) for _ in range(4)]
                    graph.replay()
                    holds(new, TOTAL * factor * 2 + factor)
                    holds(out, TOTAL * factor * 3 + 7)
                    del poison
                x.fill(RANK + 1)
            works(comm)


@contextlib.contextmanager
def usual_calls(comm: Any) -> Iterator[Any]:
    """A count of the calls that take the slow path."""
    calls = mock.Mock(wraps=comm._state.device.call)
    with mock.patch.object(comm._state.device, "call", calls):
        yield calls


def cached_expressions() -> None:
    """Only the first call of a kind takes the slow path: others may have other arrays, other numbers, another Map."""

    def check(comm: Any) -> None:
        with usual_calls(comm) as calls:
            x, out, a = mine(), floats(0), floats(5)
            then = Map(SUM, s=2.0, a=a)
            for turn in range(5):
                a.fill(turn)
                assert comm.allreduce(x, out=out, then=then) is out
                holds(out, TOTAL * 2 + turn)
                holds(comm.allreduce(x, then=then), TOTAL * 2 + turn)
                holds(comm.allreduce(x, out=out, then=Map(SUM, s=float(turn), a=a)), TOTAL * turn + turn)
                holds(comm.allreduce(mine(), then=Map(SUM, s=0.5, a=floats(turn))), TOTAL * 0.5 + turn)
            assert calls.call_count == 1
            for turn in range(4):  # in place; over NCCL, an operand that is the output has a copy
                comm.allreduce(x, out=x, then=then)
                holds(x, TOTAL * 2 + 4)
                x.fill(RANK + 1)
                out.fill(turn)
                holds(comm.allreduce(x, out=out, then=Map(SUM, s=2.0, a=out)), TOTAL * 2 + turn)
            assert calls.call_count == (5 if comm.backend == "nccl" else 1)
            calls.reset_mock()
            both = floats(3, 2000)
            for other in (both[:1000], both[500:1500], both[1000:]):
                for _ in range(3):
                    comm.allreduce(x, out=out, then=Map(SUM, s=2.0, a=other))
                    holds(out, TOTAL * 2 + 3)
            assert not calls.called
            whole = both.view(np.int32)[:1000]  # the address of a cached operand, with another dtype
            whole.fill(9)
            for _ in range(3):
                holds(comm.allreduce(x, out=out, then=Map(SUM, s=2.0, a=whole)), TOTAL * 2 + 9)
            assert calls.call_count == 1
            for text, wanted in (("v * s - a", -4), ("v + s * a", 8 - TOTAL)):
                for _ in range(3):
                    holds(comm.allreduce(x, out=out, then=Map(text, s=2.0, a=a)), TOTAL * 2 + wanted)
            for op, wanted in (("max", SIZE), ("min", 1), ("sum", TOTAL)):
                for _ in range(3):
                    holds(comm.allreduce(x, op, out=out, then=then), wanted * 2 + 4)

    over_backends(check)


def cached_expressions_around() -> None:
    """What a cached call must not miss: shapes, memory that is shared, streams, recordings, peers that differ."""

    def check(comm: Any) -> None:
        x, out, a = mine(), floats(7), floats(5)
        then, both = Map(SUM, s=2.0, a=a), floats(0, 2000)
        for _ in range(4):
            holds(comm.allreduce(x, out=out, then=then), TOTAL * 2 + 5)
            comm.allreduce(x, out=both[:1000], then=then)
        out.fill(7)
        a.shape = (10, 100)
        with raises(errors.ArgumentError, "operand a has shape (10, 100)"):
            comm.allreduce(x, out=out, then=then)
        a.shape = (1000,)
        for _ in range(3):  # the operand is out itself, by another view of its one row
            both.fill(3)
            row = both.reshape(2, 1000)[:1, :8]
            holds(
                comm.allreduce(x[:8].reshape(1, 8), out=row, then=Map(SUM, s=2.0, a=both[:8].reshape(1, 8))),
                TOTAL * 2 + 3,
            )
        for target in (both[8:1008], both[:1000]):
            with raises(errors.ArgumentError, "operand a shares memory with out"):
                comm.allreduce(x, out=target, then=Map(SUM, s=2.0, a=both[4:1004]))
            works(comm)
        with raises(errors.ArgumentError, "stream is a str"):
            comm.allreduce(x, out=out, then=then, stream="fast")
        works(comm)
        holds(out, 7)
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        cupy.cuda.Device().synchronize()
        for turn in range(4):
            stream = streams[turn % 2]
            with stream:
                delay(stream.ptr)
                a.fill(turn)
            comm.allreduce(x, out=out, then=then, stream=stream)
            stream.synchronize()
            holds(out, TOTAL * 2 + turn)
        with Graph(comm) as graph:
            with graph.record():
                comm.allreduce(x, out=out, then=then)
            a.fill(1)
            holds(comm.allreduce(x, out=both[:1000], then=Map(SUM, s=3.0, a=a)), TOTAL * 3 + 1)
            graph.replay()
            holds(out, TOTAL * 2 + 1)
        kind = then if RANK == LAST else Map("v", s=2.0, a=a)
        comm.allreduce(x, out=out, then=Map("v", s=2.0, a=a))
        comm.synchronize()
        assert isinstance(failed(mock.Mock(
            allreduce=lambda given, op: comm.allreduce(given, op, out=out, then=kind), synchronize=comm.synchronize
        ), x), errors.RankMismatchError)  # fmt: skip
        works(comm)
        with torch.imported():
            tensors = [Tensor(one) for one in (x, out, a)]
            with usual_calls(comm) as calls:
                of_tensors = Map(SUM, s=2.0, a=tensors[2])
                for turn in range(8):
                    tensors[turn % 3].array = tensors[turn % 3].array.copy()  # as set_() does
                    tensors[2].array.fill(turn)
                    for _ in range(3):
                        comm.allreduce(tensors[0], out=tensors[1], then=of_tensors)
                        comm.synchronize()
                        holds(tensors[1], TOTAL * 2 + turn)
                assert calls.call_count == 1
            tensors[2].requires_grad = True
            with raises(errors.UnsupportedError, "no gradient"):
                comm.allreduce(tensors[0], out=tensors[1], then=of_tensors)
        works(comm)

    over_backends(check)


# ---- faults
def expressions_that_do_not_compile() -> None:
    """Every rank names the line of the expression, nothing is launched, and all go on."""

    def check(comm: Any) -> None:
        works(comm)
        out = floats(7)
        for text, words in (
            ("v + b", ("line 1", "b")), ("v\n + missing(v)", ("line 2", "missing")), ("v +", ("line 1",)),
            ("v) + (v; ", ("line 1",)),
        ):  # fmt: skip
            for _ in range(2):
                with raises(
                    errors.ArgumentError, f"rank {RANK}, call", "the expression of then= does not compile", *words
                ):
                    comm.allreduce(mine(), out=out, then=Map(text, s=2))
            holds(out, 7)
            works(comm)
        if RANK == LAST:  # a rank alone
            with raises(errors.ArgumentError, "line 1"):
                comm.allreduce(mine(), out=out, then=Map("v + b"))
        else:
            error = failed_then(comm, "v + 1")
            assert isinstance(error, (errors.PeerFailedError, errors.RankMismatchError)), error
            assert f"rank {LAST}" in str(error), error
        works(comm)

    over_backends(check)


def failed_then(comm: Any, text: str, array: Any = None, **operands: Any) -> errors.IpcReduceError | None:
    """The fault of a call with an expression."""
    then = Map(text, **operands)
    call = mock.Mock(allreduce=lambda given, op: comm.allreduce(given, op, then=then), synchronize=comm.synchronize)
    return failed(call, mine() if array is None else array)


def expressions_that_differ() -> None:
    """Each difference is named by both sides: text, names, dtypes and kinds of operands. Values may differ."""

    def check(comm: Any) -> None:
        works(comm)
        x = mine().reshape(10, 100)
        row, full = floats(0, 100), floats(0).reshape(10, 100)
        calls: tuple[tuple[str, dict[str, Any]], ...] = (
            ("v + a", {"a": row}), ("v +  a", {"a": row}), ("v + b", {"b": row}), ("v + a", {"a": full}),
            ("v + a", {"a": row.astype(np.float16)}), ("v + a", {"a": 1.0}), ("v + a", {"a": np.int8(1)}),
        )  # fmt: skip
        (text, operands), *others = calls
        for other, given in others:
            mismatched = failed_then(comm, *((other, x) if RANK == LAST else (text, x)), **(
                given if RANK == LAST else operands
            ))  # fmt: skip
            assert isinstance(mismatched, errors.RankMismatchError), mismatched
            assert f"on rank {LAST}" in str(mismatched), mismatched
            assert "then v + a with a: float32 row" in str(mismatched), mismatched
            works(comm)
        error = failed(comm, x) if RANK == LAST else failed_then(comm, text, x, **operands)
        assert isinstance(error, errors.RankMismatchError), error
        works(comm)
        found = comm.allreduce(x, then=Map("v * s + a", s=RANK, a=floats(RANK, 100)))
        comm.synchronize()
        holds(found, TOTAL * RANK + RANK)

    over_backends(check)


def late_for_an_expression() -> None:
    """A rank that does not come: the others time out, and the output is 0xFF, to which nothing is added."""
    for algorithm in ("one_shot", "two_shot"):
        with Communicator(algorithm=algorithm) as comm:
            then, out = Map(SUM, s=2, a=floats(1)), floats(0)
            comm.allreduce(mine(), out=out, then=then)
            comm.synchronize()
            if RANK == LAST:
                told(comm)
                with raises(errors.PeerTimeoutError, f"rank {LAST} did not call"):
                    comm.allreduce(mine(), out=out, then=then)
            else:
                with (
                    clock.passing(121.0, others_wait(comm)),
                    raises(errors.PeerTimeoutError, f"rank {LAST} did not call"),
                ):
                    comm.allreduce(mine(), out=out, then=then)
                    comm.synchronize()
                assert (cupy.asnumpy(out).view(np.uint8) == 0xFF).all()
            works(comm)
            comm.allreduce(mine(), out=out, then=then)
            comm.synchronize()
            holds(out, TOTAL * 2 + 1)


def refused_expressions() -> None:
    """What a call with an expression does not take: every rank raises it, and all go on."""

    def check(comm: Any) -> None:
        works(comm)
        x, out = mine().reshape(10, 100), floats(7).reshape(10, 100)
        argument, unsupported = errors.ArgumentError, errors.UnsupportedError
        beside = floats(0, 1010)
        cases: tuple[tuple[type[Exception], tuple[str, ...], Callable[[], Any]], ...] = (
            (argument, ("ipcreduce.Map",), lambda: comm.allreduce(x, then="v + 1")),
            (unsupported, ("a list of arrays",), lambda: comm.allreduce([x], then=Map("v"))),
            (argument, ("operand a has shape (10,)", "(10, 100) or (100,)"),
             lambda: comm.allreduce(x, out=out, then=Map("v + a", a=floats(0, 10)))),
            (argument, ("operand a has shape (1, 100)",),
             lambda: comm.allreduce(x, out=out, then=Map("v + a", a=floats(0, 100).reshape(1, 100)))),
            (argument, ("operand a lies on the host",),
             lambda: comm.allreduce(x, out=out, then=Map("v + a", a=np.zeros(100, np.float32)))),
            (argument, ("the operand a is a builtins.str",),
             lambda: comm.allreduce(x, out=out, then=Map("v + a", a="1"))),
            (argument, ("operand a has dtype complex64",),
             lambda: comm.allreduce(x, out=out, then=Map("v + a", a=np.complex64(1)))),
            (argument, ("dtype is bool", 'Pass array.view("uint8")', 'with op "max" for "any"'),
             lambda: comm.allreduce(cupy.asarray(np.ones(3, bool)), "any", then=Map("v"))),
            (argument, ("dtype is complex64", 'Pass array.view("float32")'),
             lambda: comm.allreduce(cupy.asarray(np.ones(3, np.complex64)), then=Map("v"))),
            (argument, ("operand a shares memory with out",),
             lambda: comm.allreduce(mine(), out=beside[:1000], then=Map("v + a", a=beside[10:]))),
            (argument, ("operand a shares memory with out",),
             lambda: comm.allreduce(x, out=x, then=Map("v + a", a=x[0]))),
            (argument, ("operand s does not fit",),
             lambda: comm.allreduce(cupy.full((3,), 1, np.int32), then=Map("s", s=1 << 70))),
            (unsupported, ("host=lambda",), lambda: comm.allreduce(np.ones(3), then=Map("v"))),
        )  # fmt: skip
        for kind, words, call in cases:
            with raises(kind, f"rank {RANK}, call", *words):
                call()
            holds(out, 7)
            works(comm)
        with torch.imported():
            weight = Tensor(mine(), requires_grad=True)
            for given in (
                lambda: comm.allreduce(weight, then=Map("v")),
                lambda: comm.allreduce(Tensor(mine()), then=Map("v + a", a=weight)),
            ):
                with raises(unsupported, "no gradient"):
                    given()
                works(comm)
            with torch.no_grad():
                result = comm.allreduce(weight, then=Map(SUM, s=2, a=Tensor(floats(1))))
                comm.synchronize()
                holds(result, TOTAL * 2 + 1)

    over_backends(check)


def wide_sum(v: Any, a: Any) -> Any:
    """The sum of what the function of an expression gets."""
    assert (v.dtype, a.dtype) == (np.float32, np.float32)
    return v + a


def host_expressions() -> None:
    """NumPy arrays take the function of the program, in float32 for half types, and round its value once."""
    with Communicator() as comm:
        then = Map("v * s + a", host=lambda v, s, a: v * s + a, s=2, a=np.arange(5, dtype=np.float32))
        x = np.full((3, 5), RANK + 1, np.float32)
        found = comm.allreduce(x, then=then)
        assert (found == TOTAL * 2 + np.arange(5)).all()
        assert comm.allreduce(x, out=x, then=Map("v + a", host=lambda v, a: v + a, a=x)) is x
        assert (x == TOTAL + RANK + 1).all()
        for dtype in (np.float16, np.dtype(ml_dtypes.bfloat16)):
            given = np.full(4, RANK + 1, dtype)
            found = comm.allreduce(given, then=Map("v", host=wide_sum, a=given))
            assert found.dtype == dtype
            assert (found.astype(float) == TOTAL + RANK + 1).all()
        error = None
        try:
            text = "v + 2" if RANK == LAST else "v + 1"
            comm.allreduce(np.ones(3), then=Map(text, host=lambda v: v))
        except errors.IpcReduceError as found_error:
            error = found_error
        assert isinstance(error, errors.RankMismatchError), error
        assert "then v + 1" in str(error)
        works(comm)


SCENARIOS = [
    forms_of_expressions, rounded_once, compiled_once, cached_expressions, cached_expressions_around,
    recorded_expressions,
    expressions_that_do_not_compile, expressions_that_differ, late_for_an_expression, refused_expressions,
    host_expressions,
]  # fmt: skip
