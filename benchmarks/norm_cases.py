"""One all-reduce with RMSNorm for benchmarks/fused.py: its arrays, checks, launches, and products around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.arrays import rmsnorm
from ipcreduce.bench import timing
from ipcreduce.bench.limit import our_backend
from ipcreduce.calls.addresses import NormAddresses
from ipcreduce.calls.request import NormShape, Request, with_norm
from ipcreduce.cuda import cupy_runtime
from ipcreduce.device.epilogues import SCALES
from ipcreduce.device.kernels import Kernel
from ipcreduce.ipc import norm_plan, plan

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EPS, SCALE = float(np.float32(1e-6)), np.float32(0.05)
CHECKS, INNER = 3, 256  # INNER: of the matrix products, which are to be short
POISON, LATE_SECONDS = 0xA5, 2e-3
KINDS = {"": None, "given": "scale", "token": "token", "group": 128}
Call = Callable[[], Any]


class WrongError(Exception):
    """Results on some rank differ from NumPy's."""


class Case:
    """The arrays of one shape, what is to come out, and the calls that give it."""

    def __init__(self, comms: tuple[Any, Any], rows: int, hidden: int, scales: str = "") -> None:
        self.comm, self._pairs = comms  # the second one has no fused kernels
        self.backend = our_backend(self.comm, "this benchmark")
        self.shape = NormShape(rows, hidden, "bfloat16", EPS, 0.0, True, scales, keeps_y=not scales)
        self._turn, self._late = 0, np.random.default_rng([rows, hidden])  # the same on all ranks
        size = rows, hidden
        self.x, self.residual, self.total, self.out, self.residual_out = (self._empty(size) for _ in range(5))
        self.weight, self.quantised = self._empty((hidden,)), cp.empty(size, np.uint8)
        groups = {"token": 1, "group": hidden // 128}.get(scales, 1)
        self.scales = cp.empty((rows, groups) if scales != "given" else (1,), np.float32)
        self.draw()

    @staticmethod
    def _empty(size: tuple[int, ...]) -> Any:
        return cp.zeros(size, np.uint16).view(BFLOAT16)

    def draw(self) -> None:
        """Other data, the same on all ranks but for x. All outputs are poisoned."""
        self._turn += 1
        shape, size = self.shape, (self.shape.rows, self.shape.hidden)
        rng = np.random.default_rng([self._turn, *size])
        values = [rng.standard_normal(size, np.float32).astype(BFLOAT16) for _ in range(WORLD.size)]
        residual = rng.standard_normal(size, np.float32).astype(BFLOAT16)
        weight = rng.standard_normal(shape.hidden, np.float32).astype(BFLOAT16)
        for array, data in ((self.x, values[WORLD.rank]), (self.residual, residual), (self.weight, weight)):
            array.view(np.uint16).set(data.view(np.uint16))
        total = values[0].astype(np.float32)
        for one in values[1:]:
            total += one.astype(np.float32)
        self._reduced = total.astype(BFLOAT16)
        given = np.array([SCALE]) if shape.scales == "given" else None
        self._expected = rmsnorm.normalise(shape, self._reduced, weight, residual, given)
        self.poison()

    def poison(self) -> None:
        """Fill all outputs with a value that no result has."""
        for array in (self.total, self.out, self.residual_out):
            array.view(np.uint16).fill(POISON << 8 | POISON)
        self.quantised.fill(POISON)
        self.scales.fill(SCALE if self.shape.scales == "given" else np.nan)

    # calls
    def plain(self) -> None:
        """The all-reduce alone."""
        self.comm.allreduce(self.x, out=self.total)

    def fused(self) -> None:
        """The call that programs make."""
        self._call(self.comm)

    def _call(self, comm: ipcreduce.Communicator) -> None:
        kind = KINDS[self.shape.scales]
        options: dict[str, Any] = {"out": self.out}
        if kind is not None:
            how = ipcreduce.FP8(scale=self.scales) if kind == "scale" else ipcreduce.FP8(per=kind)
            options = {"quantize": how, "quant_out": self.quantised}
            if kind != "scale":
                options["scales_out"] = self.scales
        comm.allreduce_rmsnorm(
            self.x, self.weight, EPS, residual=self.residual, residual_out=self.residual_out, **options
        )

    @property
    def by(self) -> str:
        """The kernel that runs :meth:`fused`, and its launch."""
        prepared = self.backend.prepare(self._request)
        planned = self.backend.launches.norm_plan(self.shape)
        return prepared.kernels if planned is None or prepared.hands_on else name_of(planned)

    @property
    def _request(self) -> Request:
        return with_norm(self.x.shape, self.shape)

    def pair(self) -> None:
        """The same call of the communicator without fused kernels."""
        self._call(self._pairs)

    def by_plan(self, planned: norm_plan.NormPlan) -> Call:
        """A call that launches a fused kernel in this shape."""
        prepared = self.backend.launches.fused(self._request, planned)
        assert prepared is not None
        quantises = bool(self.shape.scales)
        addresses = NormAddresses(
            source=self.x.data.ptr, weight=self.weight.data.ptr, residual=self.residual.data.ptr,
            out=0 if quantises else self.out.data.ptr, residual_out=self.residual_out.data.ptr,
            quantised=self.quantised.data.ptr if quantises else 0, scales=self.scales.data.ptr if quantises else 0,
        )  # fmt: skip
        stream, owner = cupy_runtime.stream_of()
        return partial(self.backend.run, partial(prepared.start, addresses), stream, owner)

    # checks
    def check(self, name: str, call: Call, plain: bool = False, bits: bool = True) -> None:
        """Compare all results with NumPy's, with one rank late.

        :param bits: they have the same bits. Else they are near, as another library may round otherwise.
        :raises WrongError: on all ranks, if one differs.
        """
        wrong = ""
        for _ in range(CHECKS):
            self.draw()
            cp.cuda.get_current_stream().synchronize()
            WORLD.Barrier()
            late, seconds = self._late.integers(WORLD.size), self._late.random() * LATE_SECONDS
            if late == WORLD.rank:
                time.sleep(seconds)
            call()
            cp.cuda.get_current_stream().synchronize()
            wrong = wrong or self._wrong(plain, bits)
        found = next((one for one in WORLD.allgather(wrong) if one), "")
        if found:
            raise WrongError(f"{name}: {found} is wrong, {self.shape}")

    def _wrong(self, plain: bool, bits: bool) -> str:
        found, expected = self._expected, {"total": (self.total, self._reduced)}
        if not plain:
            expected = {"residual_out": (self.residual_out, found.residual_out)}
            if self.shape.keeps_y:
                expected["y"] = self.out, found.y
            if found.quantised is not None:
                expected["quantised"] = self.quantised, found.quantised
            if found.scales is not None:
                expected["scales"] = self.scales, found.scales
        for name, (array, values) in expected.items():
            words = np.dtype(f"u{values.itemsize}")
            found_values = array.view(words).get()
            if not bits and _near(found_values.view(values.dtype), values):
                continue
            if not np.array_equal(found_values, values.view(words)):
                return name
        return ""


def _near(found: Any, expected: Any) -> bool:
    """True within four steps of bfloat16."""
    wide, right = found.astype(np.float32), expected.astype(np.float32)
    return bool(np.allclose(wide, right, rtol=2**-6, atol=2**-6))


def name_of(planned: norm_plan.NormPlan) -> str:
    """Kernel, blocks a row, units a thread, and grid: "one c4 d1 64x128"."""
    kernel = planned.kernel.removeprefix("fused_").removesuffix("_shot")
    return f"{kernel} c{planned.cluster} d{planned.depth} {planned.grid}x{planned.block}"


def plans(case: Case) -> Iterator[norm_plan.NormPlan]:
    """Every launch that the kernels allow: blocks a row, units a thread, and, with one block a row, fewer blocks."""
    shape, n, gpus = case.shape, WORLD.size, case.backend.launches.gpus
    room = case.backend.workspace.half_bytes - norm_plan._CODES_END
    units, most = shape.hidden // norm_plan.UNIT, gpus.most_blocks
    clusters = (1, 2, 4, 8) if gpus.clusters else (1,)
    for kernel in (row.fused for row in plan.ALGORITHMS.values()):
        two = kernel == "fused_two_shot"
        blocks = min(most, gpus.resident) if two else most
        for cluster, depth in ((one, d) for one in clusters for d in ((1,) if two else (1, 2, 4))):
            share = norm_plan._SHARE * -(-units // (norm_plan._SHARE * cluster * depth * (n if two else 1)))
            block = 32 * -(-share // 32)
            most_threads = norm_plan.most_threads(kernel, gpus, cluster, depth)
            if block > most_threads or share * cluster * depth >= 2 * units:
                continue
            grids = {min(blocks, shape.rows * cluster)}
            if cluster > 1 and shape.rows * cluster > blocks:
                continue
            if cluster == 1 and shape.rows > gpus.resident // 2:
                grids |= {min(blocks, gpus.resident // 2, shape.rows), min(blocks, gpus.resident, shape.rows)}
            for grid in sorted(grids):
                slots = block * grid * depth * -(-shape.rows * cluster // grid)
                staging = (n - 1) * (2 if two else 1) * plan.row_bytes(slots)
                if staging <= room:
                    yield norm_plan.NormPlan(kernel, cluster, depth, grid, block, staging)


def load(case: Case, planned: list[norm_plan.NormPlan]) -> None:
    """Compile the kernels of all these launches together."""
    dtype, scale = case.shape.dtype, SCALES.index(case.shape.scales)
    case.backend.kernels.load(
        Kernel(one.kernel, dtype, depth=one.depth, scale=scale, cluster=one.cluster) for one in planned
    )


def _torch() -> Any:
    """PyTorch, if it is there and has a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


class Products:
    """Two matrix products, of which the first writes x, and the second reads a result; copies without PyTorch."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.torch = torch = _torch()
        if torch is None:
            self._spare = Case._empty(case.x.shape).view(np.uint16)
            return
        torch.cuda.set_device(cp.cuda.Device().id)
        rows, hidden = case.x.shape
        self._stream = torch.cuda.ExternalStream(cp.cuda.get_current_stream().ptr)
        with torch.cuda.stream(self._stream):
            self._x, self._out, self._total = (self.tensor(one) for one in (case.x, case.out, case.total))
            kind = {"dtype": torch.bfloat16, "device": "cuda"}
            self._left, self._right = torch.ones(rows, INNER, **kind), torch.ones(INNER, hidden, **kind) / 64
            self._behind, self._last = torch.ones(hidden, INNER, **kind), torch.empty(rows, INNER, **kind)

    def tensor(self, array: Any) -> Any:
        """PyTorch's tensor over an array of bfloat16."""
        return self.torch.from_dlpack(array.view(np.int16)).view(self.torch.bfloat16)

    def on_stream(self, call: Call) -> None:
        """Make a call of PyTorch on CuPy's current stream."""
        with self.torch.cuda.stream(self._stream):
            call()

    def around(self, call: Call, plain: bool = False) -> Call:
        """The chain with a call in the middle."""
        if self.torch is None:
            result = (self._case.total if plain else self._case.out).view(np.uint16)
            x = self._case.x.view(np.uint16)

            def copies() -> None:
                x[...] = self._spare
                call()
                self._spare[...] = result

            return copies
        product, result = self.torch.matmul, self._total if plain else self._out

        def products() -> None:
            product(self._left, self._right, out=self._x)
            call()
            product(result, self._behind, out=self._last)

        return products

    def captured(self, chain: Call, calls: int) -> Call:
        """Capture a graph of ``calls`` chains, and return a function that launches it."""
        if self.torch is None:
            chain()
            return timing.captured(chain, calls)
        torch, stream, graph = self.torch, self._stream, self.torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            chain()  # cuBLAS allocates its memory
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                chain()

        def launch() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return launch
