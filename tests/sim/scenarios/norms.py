"""All-reduce and RMSNorm in one call: bits, outputs, recordings, faults, streams, and PyTorch's tensors."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import cupy
import numpy as np

import ipcreduce
from ipcreduce import FP8, Communicator, Graph, GraphRunner, Map, eager_break, errors, forward_context
from ipcreduce.bench import norms as bench_norms
from ipcreduce.bench import tune_norms
from ipcreduce.cuda import cupy_runtime
from ipcreduce.device import epilogues
from ipcreduce.dtypes import FLOAT8
from ipcreduce.ipc import norm_plan, tuning
from tests.shared import clock, norms, reference
from tests.shared.bounds import no_hang
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    SIZE,
    WORLD,
    delay,
    others_wait,
    raises,
    told,
    works,
)
from tests.simulated import pytorch as torch
from tests.simulated.pytorch import Tensor

EPS, GIVEN = 1e-5, 0.0625
SCALES = "", "given", "token", "group"


class Case:
    """The arrays of a call on every rank, and its results. The residual is the same on all ranks.

    The sums are exact in every order, as NCCL has one of its own. ``special``: on rank 0 there are any bits.
    """

    def __init__(
        self, form: tuple[int, ...], dtype: str = "bfloat16", scales: str = "", *, residual: bool = True,
        seed: int = 0, weight_bias: float = 0.0, column_major: bool = False, special: bool = False,
    ) -> None:  # fmt: skip
        kind, rng = norms.DTYPES[dtype], np.random.default_rng((seed, *form))
        every = [(rng.integers(-16, 17, form) / 4).astype(kind) for _ in range(SIZE)]
        if special:
            every[0] = reference.random_array(rng, form, kind, True)
        rows = (-1, form[-1])
        weight, added = (
            reference.random_array(rng, form[-1:], kind, False),
            reference.random_array(rng, form, kind, False),
        )
        with np.errstate(all="ignore"):
            reduced = reference.reduce(every, "sum").reshape(rows)
        self.expected = norms.results(
            reduced, added.reshape(rows) if residual else None, weight, eps=EPS, weight_bias=weight_bias,
            scales=scales, given=GIVEN,
        )  # fmt: skip
        self.form, self.scales, self.kind = form, scales, kind
        self.x, self.weight = cupy.asarray(every[RANK]), cupy.asarray(weight)
        self.residual = cupy.asarray(added) if residual else None
        self.scale = cupy.full((1,), GIVEN, np.float32)
        quantize = None
        if scales:
            quantize = FP8(scale=self.scale) if scales == "given" else FP8(
                per="token" if scales == "token" else 128, column_major=column_major
            )  # fmt: skip
        self.options: dict[str, Any] = {"weight_bias": weight_bias, "quantize": quantize}

    def call(self, comm: Any, **change: Any) -> Any:
        arguments = {"x": self.x, "weight": self.weight, "eps": EPS, "residual": self.residual, **self.options}
        return comm.allreduce_rmsnorm(**arguments | change)

    def check(self, found: Any, out: Any = None) -> None:
        """The tuple of a call, and y if it is not in it."""
        *first, total = found
        self.check_one("residual_out", total, self.expected.residual_out)
        if not self.scales:
            out = first[0]
        if out is not None:
            self.check_one("y", out, self.expected.y)
        if self.scales:
            self.check_one("quantised", first[0], self.expected.quantised)
            if self.scales == "given":
                assert first[1] is self.options["quantize"].scale
            else:
                self.check_one("scales", first[1], self.expected.scales)

    def check_one(self, name: str, found: Any, expected: Any) -> None:
        values = cupy.asnumpy(getattr(found, "array", found))
        assert values.shape[:-1] == self.form[:-1], (name, values.shape)
        values = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        wrong = np.flatnonzero(values != np.ascontiguousarray(expected).view(np.uint8).reshape(-1))
        assert not wrong.size, f"rank {RANK}: {name} of {self.form} {self.kind} differs at bytes {wrong[:8]}"


def over_backends(scenario: Callable[[Any], None]) -> None:
    for backend in ("ipc", "nccl"):
        with Communicator(backend=backend) as comm:
            scenario(comm)
            works(comm)


def same_case(one: Case, **change: Any) -> Case:
    """Another case like this one, whose values differ."""
    return Case(one.form, one.kind.name, one.scales, residual=one.residual is not None, **{"seed": 7} | change)


# ---- results
def forms_of_norms() -> None:
    """Dtypes, row lengths, residual or none, kinds of scales; new results and in place; repeated."""

    def check(comm: Any) -> None:
        forms = (3, 256), (2, 2, 640), (128,), (1, 8192)
        for turn, (form, dtype, scales) in enumerate(itertools.product(forms, ("bfloat16", "float16"), SCALES)):
            case = Case(form, dtype, scales, residual=turn % 3 > 0, seed=turn, weight_bias=float(turn % 2))
            for again in range(3 if turn < 8 else 1):
                out = cupy.full(form, 7, case.kind) if scales and again == 1 else None
                case.check(case.call(comm, out=out) if again < 2 else case.call(comm), out)
        for form, dtype in (((3, 7), "float16"), ((2, 1000), "float32"), ((5, 9), "bfloat16"), ((1, 8200), "float32")):
            case = Case(form, dtype, seed=3, special=comm.backend == "ipc")
            case.check(case.call(comm))

    over_backends(check)


def in_place_norms() -> None:
    """out=x and residual_out=residual, the same arrays again and again, whose calls are cached by then."""

    def check(comm: Any) -> None:
        for dtype, hidden, scales in itertools.product(("bfloat16", "float32"), (256, 40), ("", "token")):
            case = Case((4, hidden), dtype, scales)
            x, residual = case.x.copy(), case.residual.copy()
            for _ in range(5):
                x[...], residual[...] = case.x, case.residual
                found = case.call(comm, x=x, residual=residual, out=x, residual_out=residual)
                assert found[-1] is residual
                case.check(found, x)
            x[...], residual[...] = case.x, case.residual
            for _ in range(3 if scales else 0):  # y is not wanted: what the pair hands on has no place of its own
                residual[...] = case.residual
                found = case.call(comm, x=x, residual=residual, residual_out=residual)
                case.check(found)
                assert (cupy.asnumpy(x) == cupy.asnumpy(case.x)).all(), "x is not written"
            other = same_case(case)
            x[...], residual[...] = other.x, other.residual
            other.check(other.call(comm, x=x, residual=residual, out=x, residual_out=residual), x)

    over_backends(check)


def cached_norms() -> None:
    """Calls into the program's own arrays are ready from the third time on, as long as these stay as they are."""

    def check(comm: Any) -> None:
        calls = mock.Mock(wraps=comm._state.device.call)
        with mock.patch.object(comm._state.device, "call", calls):
            for dtype, scales in (("bfloat16", ""), ("bfloat16", "token"), ("float32", "group"), ("float16", "given")):
                case = Case((4, 256), dtype, scales)
                x, residual = case.x.copy(), case.residual.copy()
                own = {"x": x, "residual": residual, "out": x, "residual_out": residual}
                if scales:
                    own |= {"quant_out": cupy.zeros((4, 256), np.uint8)}
                if scales in ("token", "group"):
                    own |= {"scales_out": cupy.zeros((4, 1 if scales == "token" else 2), np.float32)}
                calls.reset_mock()
                for _ in range(5):
                    x[...], residual[...] = case.x, case.residual
                    case.check(case.call(comm, **own), x)
                    assert calls.call_count == 1, "cached"
                side = cupy.cuda.Stream(non_blocking=True)
                cupy.cuda.Device().synchronize()
                for current in (side, cupy.cuda.Stream(null=True)):  # the call's stream, and another one
                    x[...], residual[...] = case.x, case.residual
                    cupy.cuda.Device().synchronize()
                    with current:
                        delay(side.ptr)
                        found = case.call(comm, **own, stream=side)
                    side.synchronize()
                    case.check(found, x)
                with torch.imported():  # CuPy's arrays on CuPy's stream, whatever PyTorch's is
                    torch.make_current(torch.Stream())
                    x[...], residual[...] = case.x, case.residual
                    case.check(case.call(comm, **own), x)
                    torch.make_current(None)
                x[...], residual[...] = case.x, case.residual
                refused: tuple[tuple[dict[str, Any], str], ...] = (
                    ({"eps": float("nan")}, "eps is nan"), ({"stream": "fast"}, "stream is a str"),
                )  # fmt: skip
                if not scales:
                    refused += (({"quant_out": cupy.zeros((4, 256), np.uint8)}, "quant_out is given, but quantize"),)
                for wrong, words in refused:
                    with raises(errors.ArgumentError, f"rank {RANK}, call", words):
                        case.call(comm, **own, **wrong)
                    works(comm)
                calls.reset_mock()
                case.check(case.call(comm, **own), x)
                assert not calls.called
                table = comm._state.backend.launch_cache.objects
                found = len(table)
                del own, x, residual
                calls.reset_mock()
                gc.collect()  # the error above holds them
                assert len(table) == found - 1, "an array has died"

    over_backends(check)
    with Communicator() as comm, torch.imported():
        case, places = Case((4, 256)), [cupy.zeros((4, 256), norms.DTYPES["bfloat16"]) for _ in range(2)]
        calls = mock.Mock(wraps=comm._state.device.call)
        weight, residual, x = Tensor(case.weight), Tensor(case.residual.copy()), Tensor(places[0])
        with mock.patch.object(comm._state.device, "call", calls):
            for turn in range(8):
                x.array = places[turn // 4]  # as set_() does
                x.array[...], residual.array[...] = case.x, case.residual
                own = (
                    (x, residual) if turn % 2 else (Tensor(x.array), Tensor(residual.array))
                )  # others at the same place
                found = case.call(comm, x=own[0], weight=weight, residual=own[1], out=own[0], residual_out=own[1])
                assert found[0] is own[0]
                case.check(found)
                assert calls.call_count == 1, turn
            x.array, weight.requires_grad = places[0], True
            with raises(errors.ArgumentError, "weight is a tensor that requires grad"):
                case.call(comm, x=x, weight=weight, residual=residual, out=x, residual_out=residual)
        works(comm)


def cached_norms_of_another_shape() -> None:
    """A call is found by its arrays, whose shapes the program may change."""
    with Communicator() as comm:
        case = Case((4, 256))
        x, residual = case.x.copy(), case.residual.copy()
        others = case.x.copy(), case.residual.copy()
        for form, wrong in (((4, 256), (8, 128)), ((2, 2, 256), (2, 4, 128)), ((4, 256), (8, 128))):
            if len(form) > 2:
                (x, residual), others = others, (x, residual)  # which are known by no other shape
            x.shape = residual.shape = form
            for _ in range(4):
                x[...], residual[...] = case.x.reshape(form), case.residual.reshape(form)
                found = case.call(comm, x=x, residual=residual, out=x, residual_out=residual)
                assert found[0].shape == form
                assert (cupy.asnumpy(found[0]).reshape(4, 256) == case.expected.y).all()
            x.shape = residual.shape = wrong
            with raises(errors.ArgumentError, "weight has shape (256,)"):
                case.call(comm, x=x, residual=residual, out=x, residual_out=residual)
            works(comm)
        short = Case((8, 128))
        for _ in range(4):
            x[...], residual[...] = short.x, short.residual
            short.check(short.call(comm, x=x, residual=residual, out=x, residual_out=residual))
        for change in ({"eps": 1e-3}, {"weight_bias": 1.0}, {"residual": None}, {}):
            x[...], residual[...] = short.x, short.residual
            short.call(comm, **{"x": x, "residual": residual, "out": x, "residual_out": residual} | change)
            assert (cupy.asnumpy(x) == short.expected.y).all() == (not change), "another call than before"


@contextlib.contextmanager
def usual_calls(comm: Any) -> Any:
    """A count of the calls that take the slow path."""
    calls = mock.Mock(wraps=comm._state.device.call)
    with mock.patch.object(comm._state.device, "call", calls):
        yield calls


def new_results_of_norms() -> None:
    """Calls with new results are ready from the second time on, whatever their arrays are; between others in place."""

    def check(comm: Any) -> None:
        with usual_calls(comm) as calls:
            for dtype, scales in itertools.product(("bfloat16", "float32"), SCALES):
                case, other = Case((4, 256), dtype, scales), Case((4, 256), dtype, scales, seed=7)
                x, residual = case.x.copy(), case.residual.copy()
                kept, numbers = [], {"quant_out": cupy.zeros((4, 256), np.uint8)} if scales else {}
                forms = {}, {"residual_out": residual}, {"out": x}, {"out": x, **numbers}
                for form in forms[: 4 if scales else 3]:
                    calls.reset_mock()
                    for turn in range(5):
                        one = other if turn % 2 else case
                        x[...], residual[...] = one.x, one.residual
                        mine = one.call(comm, x=x, residual=residual, **form, weight=one.weight.copy())
                        one.check(mine, form.get("out"))
                        assert (mine[-1] is residual) == ("residual_out" in form)
                        if not form:
                            kept.append((one, mine))
                            mine = one.call(comm, x=one.x.copy(), residual=one.residual.copy())  # others than before
                            one.check(mine)
                    assert calls.call_count == 1, (dtype, scales, form)
                calls.reset_mock()
                for _ in range(3):
                    x[...], residual[...] = case.x, case.residual
                    case.check(case.call(comm))
                    case.check(case.call(comm, x=x, residual=residual, out=x, residual_out=residual), x)
                for one, mine in kept:
                    one.check(mine)
                places = {array.data.ptr for _, mine in kept for array in (mine[0], mine[-1])}
                assert len(places) == 10, "new results share memory"

    over_backends(check)


def cached_kinds_of_norms() -> None:
    """What makes another call than before is seen: shapes, numbers, memory that is shared, misaligned arrays."""

    def check(comm: Any) -> None:
        case, place = Case((4, 256)), cupy.zeros(4 * 256 + 1, norms.DTYPES["bfloat16"])
        x = place[:-1].reshape(4, 256)
        with usual_calls(comm) as calls:
            for form in ((4, 256), (2, 2, 256), (4, 256)):
                x.shape = form  # at the same address
                for _ in range(3):
                    x[...] = case.x.reshape(form)
                    y, total = case.call(comm, x=x, residual=case.residual.reshape(form))
                    assert y.shape == total.shape == form
                    case.check((y.reshape(4, 256), total.reshape(4, 256)))
            assert calls.call_count == 2
            case.call(comm, eps=1e-3), case.call(comm, weight_bias=1.0), case.call(comm, residual=None)
            assert calls.call_count == 5
            aside = place[1:].reshape(4, 256)
            aside[...] = case.x
            case.check(case.call(comm, x=aside))
            assert calls.call_count == (6 if comm.backend == "ipc" else 5), "fused kernels take no misaligned arrays"
            calls.reset_mock()
            for turn in range(4):  # arrays die, and others get their ids
                one = Case((4 + turn % 2, 256), seed=turn)
                one.check(one.call(comm))
                del one
            assert calls.call_count == 1
        for out, words in ((case.residual, "shares memory with residual"), (aside, "shares a part of the memory of x")):
            first = cupy.zeros((4, 256), case.kind)
            case.call(comm, x=x, out=first)
            with raises(errors.ArgumentError, "out " + words):
                case.call(comm, x=x, out=out)
            works(comm)
        with raises(errors.ArgumentError, "weight has shape (128,)"):
            case.call(comm, weight=case.weight[:128])
        works(comm)
        with raises(errors.ArgumentError, "stream is a str"):
            case.call(comm, stream="fast")

    over_backends(check)


def new_results_on_streams() -> None:
    """Cached calls with new results, on other streams, in a recording and in a capture."""

    def check(comm: Any) -> None:
        for scales in ("", "token"):
            case, other = Case((4, 256), scales=scales), Case((4, 256), scales=scales, seed=5)
            x, residual = case.x.copy(), case.residual.copy()
            for _ in range(3):
                case.check(case.call(comm, x=x, residual=residual))
            side = cupy.cuda.Stream(non_blocking=True)
            for turn in range(6):
                one = other if turn % 2 else case
                cupy.cuda.Device().synchronize()
                with side if turn < 4 else contextlib.nullcontext():
                    delay(side.ptr)
                    with side:
                        x[...], residual[...], weight = one.x, one.residual, one.weight.copy()
                    found = case.call(comm, x=x, residual=residual, weight=weight, stream=side if turn > 2 else None)
                side.synchronize()
                one.check(found)
            cupy.cuda.Device().synchronize()
            with side, Graph(comm) as graph:
                with graph.record():
                    recorded = case.call(comm, x=x, residual=residual)
                side.begin_capture()
                captured = case.call(comm, x=x, residual=residual)
                theirs = side.end_capture()
                assert len(graph.segments[0].calls) == 1
                for one in (case, other, case):
                    x[...], residual[...], case.weight[...] = one.x, one.residual, one.weight.copy()
                    poison = [cupy.full((4, 256), -1, case.kind) for _ in range(6)]
                    graph.replay()
                    theirs.launch(side)
                    side.synchronize()
                    one.check(recorded)
                    one.check(captured)
                    del poison
                    case.weight[...] = Case((4, 256), scales=scales).weight
            works(comm)

    over_backends(check)


def new_tensors_of_norms() -> None:
    """Cached calls with new tensors: on PyTorch's stream alone, and not of what requires grad."""
    with Communicator() as comm, torch.imported(), usual_calls(comm) as calls:
        for scales in SCALES:
            case = Case((3, 256), "bfloat16", scales)
            if scales == "given":
                case.options["quantize"] = FP8(scale=Tensor(case.scale))
            calls.reset_mock()
            for turn in range(6):
                x, weight, residual = (Tensor(one.copy()) for one in (case.x, case.weight, case.residual))
                inside = {"residual_out": residual} if turn % 2 else {}
                found = case.call(comm, x=x, weight=weight, residual=residual, **inside)
                assert [type(one) for one in found] == [Tensor] * (3 if scales else 2)
                assert not scales or repr(found[0].dtype) == "torch.float8_e4m3fn"
                case.check(found)
            assert calls.call_count == 2, "one of each kind"
        case = Case((3, 256), "bfloat16")
        plain = {"x": Tensor(case.x), "weight": Tensor(case.weight), "residual": Tensor(case.residual)}
        for name in plain:
            with raises(errors.ArgumentError, f"{name} is a tensor that requires grad"):
                case.call(comm, **plain | {name: Tensor(plain[name].array, requires_grad=True)})
            works(comm)
        side, kept = torch.Stream(), case.x.copy()
        for current in (side, cupy.cuda.Stream(non_blocking=True)):
            case.x.fill(0)
            cupy.cuda.Device().synchronize()
            with torch.stream(side):
                delay(side.cuda_stream)
                with side.of_cupy:
                    case.x[...] = kept  # which a call on another stream does not see
                with current.of_cupy if current is side else current:
                    calls.reset_mock()
                    found = case.call(comm, **plain, stream=side)
                    assert calls.call_count == (current is side), "the first call on another stream than before"
                    side.of_cupy.synchronize()
                    case.check(found)
        cupy.cuda.Device().synchronize()
        works(comm)


def laid_out_norms() -> None:
    """Strided and misaligned arrays, with the bits of plain ones; column-major scales."""

    def check(comm: Any) -> None:
        for dtype, scales in itertools.product(("bfloat16", "float32"), SCALES):
            case = Case((3, 256), dtype, scales, column_major=scales == "group")
            size = case.kind.itemsize
            room = {name: cupy.zeros(3 * 512 + 8, case.kind) for name in ("x", "residual", "out", "residual_out")}
            bytes_of = cupy.zeros(3 * 512 + 8, np.uint8)
            for offset, step in ((0, 2), (1, 1), (3, 2), (8, 1)):
                arrays = {
                    name: array[offset : offset + 768 * step : step].reshape(3, 256)
                    if step == 1
                    else array[offset : offset + 1536].reshape(3, 512)[:, ::2]
                    for name, array in room.items()
                }
                weight = cupy.zeros(256 + offset, case.kind)[offset:]
                weight[...] = case.weight
                for name in ("x", "residual"):
                    arrays[name][...] = getattr(case, name)
                if scales:
                    arrays["quant_out"] = bytes_of[offset : offset + 768].reshape(3, 256)
                if scales in ("token", "group"):
                    columns = 1 if scales == "token" else 2
                    arrays["scales_out"] = cupy.zeros((3, 2 * columns), np.float32)[:, ::2]
                assert arrays["x"].data.ptr % 16 == offset * size % 16
                found = case.call(comm, weight=weight, **arrays)
                assert found[-1] is arrays["residual_out"]
                case.check(found, arrays["out"])
                change = {"out": arrays["x"], "residual_out": arrays["residual"]}
                case.check(case.call(comm, weight=weight, **arrays | change), arrays["x"])
        for rows in (1, 3, 4, 6):
            case = Case((rows, 384), "float16", "group", column_major=True)
            numbers, scales, _ = found = case.call(comm)
            case.check(found)
            assert rows == 1 or scales.strides == (4, 4 * (-(-rows // 4) * 4))
            assert numbers.dtype.itemsize == 1
            batch = Case((rows, 1, 384), "float16", "group", column_major=True)
            batch.check(batch.call(comm, scales_out=scales.reshape(rows, 1, 3) if rows == 1 else None))
            own = cupy.zeros((3, -(-rows // 4) * 4), np.float32)[:, :rows].T
            case.check(case.call(comm, scales_out=own))

    over_backends(check)


def norms_without_rows() -> None:
    """No rows are a call with a number, and are compared."""

    def check(comm: Any) -> None:
        number = comm._state.calls.number
        for how in (None, FP8(per="token"), FP8(per=128, column_major=True)):
            found = comm.allreduce_rmsnorm(cupy.zeros((0, 256), np.float16), cupy.ones(256, np.float16), quantize=how)
            assert found[0].shape == found[-1].shape == (0, 256)
        assert comm._state.calls.number == number + 3

    over_backends(check)
    y, total = ipcreduce.allreduce_rmsnorm(cupy.full((2, 64), 2, np.float32), cupy.ones(64, np.float32), 0.0)
    assert (cupy.asnumpy(total) == 2 * SIZE).all()
    assert (cupy.asnumpy(y) == 1).all()
    ipcreduce.get_communicator().close()


def norms_of_tensors() -> None:
    """Tensors give tensors, on PyTorch's current stream; what requires grad is refused."""
    with Communicator() as comm, torch.imported():
        works(comm)
        side = torch.Stream()
        for scales, column_major in (("", False), ("token", False), ("group", True), ("given", False)):
            case = Case((3, 256), "bfloat16", scales, column_major=column_major)
            x, weight, residual = (Tensor(one.copy()) for one in (case.x, case.weight, case.residual))
            if scales == "given":
                case.options["quantize"] = FP8(scale=Tensor(case.scale))
            cupy.cuda.Device().synchronize()
            for turn in range(3):
                with torch.stream(side):
                    delay(side.cuda_stream)
                    with side.of_cupy:
                        x.array[...], residual.array[...] = case.x, case.residual
                    found = case.call(comm, x=x, weight=weight, residual=residual)
                    assert [type(one) for one in found] == [Tensor] * (3 if scales else 2)
                    if scales:
                        assert repr(found[0].dtype) == "torch.float8_e4m3fn"
                    case.check(found)
                    numbers = Tensor(cupy.zeros((3, 256), np.uint8)) if scales else None
                    if turn and scales:
                        numbers = numbers.view(torch.float8_e4m3fn)
                    found = case.call(
                        comm, x=x, weight=weight, residual=residual, out=x, residual_out=residual, quant_out=numbers
                    )
                    assert found[-1] is residual
                    assert not scales or found[0] is numbers
                    case.check(found, x)
        plain = {"x": x, "weight": weight, "residual": residual}
        for name in plain:
            with raises(errors.ArgumentError, f"{name} is a tensor that requires grad"):
                case.call(comm, **plain | {name: Tensor(plain[name].array, requires_grad=True)})
            works(comm)
        with torch.no_grad():
            x.array[...], residual.array[...] = case.x, case.residual
            case.check(case.call(comm, x=x, weight=Tensor(weight.array, requires_grad=True), residual=residual))
        torch.make_current(side)
        with raises(errors.ArgumentError, "the arguments are tensors of PyTorch and other arrays", "stream="):
            case.call(comm, x=x, weight=case.weight, residual=residual)
        torch.make_current(None)
        with Graph(comm) as graph:
            case = Case((3, 256), "bfloat16", "group", column_major=True)
            with graph.record():
                found = case.call(comm, x=x, weight=weight, residual=residual)
            x.array[...], residual.array[...], weight.array[...] = case.x, case.residual, case.weight
            graph.replay()
            assert [type(one) for one in found] == [Tensor] * 3
            case.check(found)
        works(comm)


# ---- graphs
@eager_break
def between(comm: Any, case: Case, x: Any, residual: Any, out: Any, residual_out: Any) -> None:
    """A break that makes a call."""
    case.call(comm, x=x, residual=residual, out=out, residual_out=residual_out)


def recorded_norms() -> None:
    """In recordings, with a break, in other memory than the program's, and with direct graphs."""
    for arguments in ({}, {"backend": "nccl"}, {"algorithm": "direct"}):
        with Communicator(**arguments) as comm:
            for dtype, scales in (("bfloat16", ""), ("bfloat16", "token"), ("float32", "group")):
                case, other = Case((4, 256), dtype, scales), Case((4, 256), dtype, scales, seed=5)
                x, residual = case.x.copy(), case.residual.copy()
                own, added, out, total = (case.x * 0 for _ in range(4))
                with Graph(comm) as graph:
                    with graph.record():
                        found = case.call(comm, x=x * 1, residual=residual)  # of which the graph alone has the memory
                        between(comm, case, x, residual, out, total)
                        own[...], added[...] = x, residual
                        kept = case.call(comm, x=own, residual=added, out=own, residual_out=added)
                        comm.allreduce(x)
                    assert len(graph.segments) == 2
                    by = str(graph.segments[0].calls[0]).rpartition(" by ")[2]
                    fused = comm.backend == "ipc" and SIZE > 1 and dtype == "bfloat16"
                    assert by.startswith("fused_") if fused else by.endswith("rmsnorm"), by
                    for one in (Case((4, 256), dtype, scales), other):
                        x[...], residual[...] = one.x, one.residual
                        case.weight[...] = one.weight
                        poison = [one.x * 0 - 1 for _ in range(4)]
                        graph.replay()
                        one.check(found)
                        one.check(kept, own)
                        one.check_one("y of the break", out, one.expected.y)
                        one.check_one("the break's sum", total, one.expected.residual_out)
                        del poison
            kept, dropped = cupy.zeros((4, 256), case.kind), Case((4, 256), dtype, "token")
            expected = dropped.expected
            with Graph(comm) as graph:
                with graph.record():
                    _, scales_of, _ = dropped.call(comm, out=kept)
                del dropped
                later = [cupy.full((4, 256), -1, case.kind) for _ in range(4)]  # in the memory that is free by now
                graph.replay()
                assert norms.same(cupy.asnumpy(kept), expected.y)
                assert norms.same(cupy.asnumpy(scales_of), expected.scales)
                del later
            works(comm)


def laid_out_norms_in_graphs() -> None:
    """Strided and misaligned arrays, which are copied, in recordings and in captures of the program's own."""

    def check(comm: Any) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        for dtype, scales in (("bfloat16", "group"), ("float32", "token")):
            cases = [Case((3, 256), dtype, scales, seed=seed, column_major=scales == "group") for seed in (0, 4)]
            first, kind = cases[0], cases[0].kind
            x, out = (cupy.zeros((3, 512), kind)[:, ::2] for _ in range(2))
            residual = cupy.zeros(3 * 256 + 1, kind)[1:].reshape(3, 256)
            numbers = cupy.zeros((3, 512), np.uint8)[:, 1::2]
            own = {"x": x, "residual": residual, "residual_out": residual, "out": out, "quant_out": numbers}
            first.call(comm, **own)  # compiled before
            comm.synchronize()
            with Graph(comm) as graph:
                with graph.record():
                    found = first.call(comm, **own)
                stream.begin_capture()
                with stream:
                    captured = first.call(comm, **own)
                theirs = stream.end_capture()
                for one, (launch, results) in itertools.product(
                    cases, ((graph.replay, found), (partial(theirs.launch, stream), captured))
                ):  # fmt: skip
                    x[...], residual[...], first.weight[...] = one.x, one.residual, one.weight
                    out[...], numbers[...] = 0, 0
                    poison = [cupy.full((3, 512), -1, kind) for _ in range(4)]
                    cupy.cuda.Device().synchronize()
                    launch()
                    stream.synchronize()
                    one.check(results, out)
                    del poison
                first.weight[...] = Case((3, 256), dtype, scales).weight
            works(comm)

    over_backends(check)


def checked_and_run_norms() -> None:
    """The address check sees an argument that moved, and a runner replays calls."""
    with Communicator() as comm:
        case, other = Case((4, 256)), Case((4, 256), seed=3)
        inputs = {"x": case.x, "residual": case.residual, "weight": case.weight}
        with Graph(comm, check="always") as graph:
            with graph.record(inputs):
                found = case.call(comm)
            graph.replay(inputs)
            case.check(found)
            for name in inputs:
                with raises(errors.AddressChangedError, f'inputs["{name}"]'):
                    graph.replay(inputs | {name: inputs[name].copy()})
        with GraphRunner(
            lambda x, residual, weight: case.call(comm, x=x, residual=residual, weight=weight), comm
        ) as run:
            for one in (case, other, case):
                case.x[...], case.residual[...], case.weight[...] = one.x.copy(), one.residual.copy(), one.weight.copy()
                expected = Case((4, 256)) if one is case else other
                case.x[...], case.residual[...], case.weight[...] = expected.x, expected.residual, expected.weight
                with forward_context("batch"):
                    expected.check(run(case.x, case.residual, case.weight))
            assert list(run.recordings) == ["batch"]
        works(comm)


# ---- faults
def failed(comm: Any, call: Callable[[], Any]) -> errors.IpcReduceError | None:
    """The fault of a call, from it or from what comes behind it."""
    try:
        call()
        comm.synchronize()
        comm.allreduce(cupy.zeros(3, np.float32))
        comm.synchronize()
    except errors.IpcReduceError as error:
        return error
    return None


def refused_norms() -> None:
    """A rank's wrong argument: the others hear of it, and nothing is written on that rank."""
    with Communicator() as comm:
        case = Case((4, 256))
        for fill in (True, False):
            out = cupy.full((4, 256), 7, case.kind)
            cupy.cuda.Device().synchronize()
            if RANK == LAST:
                with raises(errors.ArgumentError, "residual has shape (2, 256)"):
                    case.call(comm, residual=case.residual[:2], out=out)
                assert (cupy.asnumpy(out).astype(np.float32) == 7).all(), "written"
            else:
                with raises(errors.PeerFailedError, f"rank {LAST} raised an error", "residual has shape"):
                    case.call(comm, out=out)
                    comm.synchronize()
            works(comm)
            case.check(case.call(comm, out=out if fill else None))
        with raises(errors.ArgumentError, "x lies on the GPU, but weight on the host"):
            case.call(comm, weight=cupy.asnumpy(case.weight))
        works(comm)
        with raises(errors.ArgumentError, "out shares memory with residual"):
            case.call(comm, out=case.residual)
        works(comm)
        many = Case((4, 256), "float32")
        with (
            mock.patch.object(epilogues, "_MAX_ROWS", 3),
            raises(errors.ArgumentError, f"rank {RANK}, call", "x has 4 rows of 256 elements. On a GPU a call takes"),
        ):
            many.call(comm)
        works(comm)
        many.check(many.call(comm))
        with Graph(comm) as graph:
            kind = errors.ArgumentError if RANK == LAST else errors.PeerFailedError
            with raises(kind, "quantize is 'e4m3'"), graph.record():
                case.call(comm, quantize="e4m3" if RANK == LAST else None)
            assert graph.state == "failed"
        works(comm)


def late_for_a_norm() -> None:
    """A rank that does not come: every output of the others is NaN, and synchronize() names the rank."""
    for algorithm, dtype in itertools.product(("one_shot", "two_shot"), ("bfloat16", "float32")):
        with Communicator(algorithm=algorithm) as comm:
            works(comm)
            case = Case((4, 256), dtype, "token")
            out, total = cupy.full((4, 256), 7, case.kind), cupy.full((4, 256), 7, case.kind)
            numbers, scales = cupy.full((4, 256), 7, np.uint8), cupy.full((4, 1), 7, np.float32)
            outputs = {"out": out, "residual_out": total, "quant_out": numbers, "scales_out": scales}
            for _ in range(2):
                case.call(comm, **outputs)
            comm.synchronize()
            for one in outputs.values():
                one.fill(7)
            cupy.cuda.Device().synchronize()
            WORLD.Barrier()
            if RANK == LAST:
                told(comm)
                with raises(errors.PeerTimeoutError, f"rank {LAST} did not call within"):
                    case.call(comm, **outputs)
                    comm.synchronize()
            else:
                with (
                    clock.passing(121.0, others_wait(comm)),
                    raises(errors.PeerTimeoutError, f"rank {LAST} did not call"),
                ):
                    case.call(comm, **outputs)
                    comm.synchronize()
                if algorithm == "one_shot":
                    assert all(np.isnan(cupy.asnumpy(one).astype(np.float32)).all() for one in (out, total, scales))
                    assert (cupy.asnumpy(numbers) == 0x7F).all()
            works(comm)
            case.check(case.call(comm, **outputs), out)


def interrupted_norm() -> None:
    """Ctrl-C on one rank within a call: the others hear of it, and all go on."""

    def check(comm: Any) -> None:
        works(comm)
        case = Case((4, 256))
        if RANK == LAST:
            interrupt = mock.patch.object(comm._state.backend, "run", side_effect=KeyboardInterrupt)
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                case.call(comm)
                raise AssertionError("no KeyboardInterrupt")
        else:
            with no_hang("the interrupted call"):
                error = failed(comm, lambda: case.call(comm))
            assert isinstance(error, errors.PeerFailedError), error
            assert f"rank {LAST} raised an error (KeyboardInterrupt" in str(error), error
        works(comm)
        for _ in range(3):
            case.check(case.call(comm))

    over_backends(check)


class Interrupted:
    """A stream. ``now``: Ctrl-C comes while its handle is read."""

    def __init__(self, handle: int) -> None:
        self.handle, self.now = handle, False

    @property
    def __cuda_stream__(self) -> tuple[int, int]:
        if self.now:
            raise KeyboardInterrupt
        return 0, self.handle


def interrupted_look_ups() -> None:
    """Ctrl-C on one rank while it looks a cached call of any kind up: the others hear of it, and all go on."""

    def check(comm: Any) -> None:
        case, then = Case((4, 256)), Map("v + 1")
        array, x, residual = cupy.full(8, 1, np.float32), case.x.copy(), case.residual.copy()
        stream = Interrupted(cupy.cuda.get_current_stream().ptr)
        own = {"x": x, "residual": residual, "out": x, "residual_out": residual}
        for name, call in {
            "an array": lambda: comm.allreduce(array),
            "a list": lambda: comm.allreduce([array]),
            "an expression": lambda: comm.allreduce(array, then=then),
            "a norm": lambda: case.call(comm),
            "a norm in place": lambda: case.call(comm, **own, stream=stream),
        }.items():
            for _ in range(4):
                call()
            comm.synchronize()
            if RANK == LAST:
                stream.now = True
                with (
                    mock.patch.object(cupy_runtime, "empty_like", side_effect=KeyboardInterrupt),
                    contextlib.suppress(KeyboardInterrupt),
                ):
                    call()
                    raise AssertionError(f"no KeyboardInterrupt in {name}")
                stream.now = False
            else:
                with no_hang(f"the interrupted call on {name}"):
                    error = failed(comm, call)
                assert isinstance(error, errors.PeerFailedError), (name, error)
                assert f"rank {LAST} raised an error (KeyboardInterrupt" in str(error), (name, error)
            works(comm)

    over_backends(check)


def copied_descriptions() -> None:
    """A copy of an FP8 or a Map has arrays of its own, and its calls use these, behind cached ones of the original."""

    def check(comm: Any) -> None:
        case, array, out = Case((4, 256), scales="given"), cupy.full(8, 1, np.float32), cupy.empty(8, np.float32)
        own = {"residual_out": case.residual.copy(), "out": case.x.copy(), "quant_out": cupy.empty((4, 256), np.uint8)}
        how, then = FP8(scale=cupy.full((1,), GIVEN, np.float32)), Map("v + a", a=cupy.full(8, 1, np.float32))
        for _ in range(4):
            case.check(case.call(comm, **own, quantize=case.options["quantize"]), own["out"])
            case.call(comm, **own, quantize=how)
            assert (cupy.asnumpy(comm.allreduce(array, out=out, then=then)) == SIZE + 1).all()
        for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            another, other = copied(how), copied(then)
            another.scale[...] = 2 * GIVEN
            other.operands["a"][...] = 5
            plain = own["out"].get().astype(np.float32) / (2 * GIVEN)
            for _ in range(4):
                numbers, scale, _ = case.call(comm, **own, quantize=another)
                assert scale is another.scale
                assert (cupy.asnumpy(numbers).view(FLOAT8) == np.clip(plain, -448, 448).astype(FLOAT8)).all()
                assert (cupy.asnumpy(comm.allreduce(array, out=out, then=other)) == SIZE + 5).all()

    over_backends(check)


def tuned_norms() -> None:
    """``tune`` checks and times every kernel that it may choose, and a communicator launches the chosen one."""
    choice = norm_plan.NormChoice(64, 1, "two_shot", 1)
    chosen = mock.Mock(return_value=tuning.Tables((), (choice,)))
    with (
        mock.patch.object(tuning, "load", chosen),
        mock.patch.object(bench_norms, "ROWS", (1, 3)),
        mock.patch.object(tune_norms, "_CALLS", 3),
        Communicator(device="auto") as comm,
    ):
        assert chosen.call_count == (RANK == 0), "rank 0 tells the others"
        assert "plan: tuned for RMSNorm of hidden size 64" in comm.describe()
        case = Case((3, 64))
        case.check(case.call(comm))
        assert [one.kernels for one in comm._state.backend._prepared.values()] == ["fused_two_shot"]
        launched = mock.Mock(wraps=comm._state.backend.launches.fused)
        with mock.patch.object(comm._state.backend.launches, "fused", launched):
            table = tune_norms.measure(comm, comm._state.backend, [256], 1, WORLD)
        ways = {(given.args[1].kernel, given.args[1].cluster) for given in launched.call_args_list}
        assert ways == {(kernel, blocks) for kernel in ("fused_one_shot", "fused_two_shot") for blocks in (1, 2)}
        assert table[0] == choice
        assert [one.hidden for one in table[1:]] == [256] * (len(table) - 1)
        assert table[-1].up_to == 3
        assert len({*WORLD.allgather(table)}) == 1
        wrong = mock.Mock(return_value=RANK != LAST)
        with (
            mock.patch.object(bench_norms.Message, "is_right", wrong),
            raises(errors.IpcReduceError, "the RMSNorm of 1 rows by", "is wrong"),
        ):
            tune_norms.measure(comm, comm._state.backend, [256], 1, WORLD)
        works(comm)


SCENARIOS = [
    forms_of_norms, in_place_norms, cached_norms, cached_norms_of_another_shape, new_results_of_norms,
    cached_kinds_of_norms, new_results_on_streams, new_tensors_of_norms, laid_out_norms, norms_without_rows,
    norms_of_tensors, recorded_norms, laid_out_norms_in_graphs,
    checked_and_run_norms, refused_norms, late_for_a_norm, interrupted_norm, interrupted_look_ups, copied_descriptions,
    tuned_norms,
]  # fmt: skip
