"""The kernel rmsnorm.cu, compiled by g++, gives the bits of the contract in tests/shared/norms.py."""

from __future__ import annotations

import ctypes
import functools
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce.calls.addresses import NormAddresses
from ipcreduce.calls.request import NormShape, with_norm
from ipcreduce.device import arguments, epilogues
from ipcreduce.device.kernels import Kernel, Kernels
from ipcreduce.errors import ArgumentError
from tests.shared import norms
from tests.simulated import compiler

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
FILLER = 0x5C


@functools.cache
def runtime() -> ctypes.CDLL:
    """Global, since kernels take its functions from wherever they are."""
    library = ctypes.CDLL(str(compiler.build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.sim_run.argtypes = [
        *[ctypes.c_void_p] * 2, *[ctypes.c_uint32] * 2, *[ctypes.c_int] * 2, ctypes.c_bool
    ]  # fmt: skip
    library.sim_run.restype = None
    return library


@functools.cache
def kernel(compiled_for: Kernel) -> int:
    """The entry of rmsnorm.cu."""
    runtime()
    macros = compiled_for.macros() | {"IPCREDUCE_RANKS": "1", "IPCREDUCE_RANK": "0", "IPCREDUCE_WHOLE_PACKETS": "1"}
    given = {key.removeprefix("IPCREDUCE_"): value for key, value in macros.items()}
    path = compiler.build_compiled({"kernel": "rmsnorm", **given})
    entry = ctypes.cast(ctypes.CDLL(str(path)).rmsnorm, ctypes.c_void_p).value
    assert entry is not None
    return entry


class Array:
    """Room for ``shape`` with filler around it. ``offset``: bytes from an aligned address to its beginning."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, offset: int = 0, values: Any = None) -> None:
        count = int(np.prod(shape))
        self._memory = np.full(count * np.dtype(dtype).itemsize + 96, FILLER, np.uint8)
        self._begin = -self._memory.ctypes.data % 16 + 32 + offset
        self.bytes = self._memory[self._begin :][: count * np.dtype(dtype).itemsize]
        self.values = self.bytes.view(dtype).reshape(shape)
        if values is not None:
            self.values[...] = values
        self.address = int(self.bytes.ctypes.data)

    def intact(self) -> bool:
        """Nothing is written beside the array."""
        end = self._begin + self.bytes.size
        return bool((self._memory[: self._begin] == FILLER).all() and (self._memory[end:] == FILLER).all())


def inputs(shape: NormShape, seed: int) -> tuple[Any, Any, Any]:
    """Values of many sizes; in some rows there are zeros, infinities and NaNs."""
    rng, dtype = np.random.default_rng(seed), norms.DTYPES[shape.dtype]
    size = rng.choice([1e-3, 1.0, 30.0], (shape.rows, 1))
    x = rng.standard_normal((shape.rows, shape.hidden)) * size
    residual = rng.standard_normal((shape.rows, shape.hidden)) * size
    x[rng.random(shape.rows) < 0.1] = residual[rng.random(shape.rows) < 0.1] = 0
    for special in (np.nan, np.inf, -np.inf, 6e4, -0.0):
        at = rng.integers(shape.rows), rng.integers(shape.hidden)
        if rng.random() < 0.3:
            x[at] = special
    weight = rng.standard_normal(shape.hidden) * 3
    with np.errstate(over="ignore"):
        return x.astype(dtype), residual.astype(dtype), weight.astype(dtype)


def check(shape: NormShape, seed: int, offset: int = 0, in_place: bool = False) -> None:
    """Run the kernel, and compare every output with the contract."""
    x, residual, weight = inputs(shape, seed)
    size, dtype = (shape.rows, shape.hidden), x.dtype
    given = np.float32(np.random.default_rng(seed).uniform(0.01, 0.1))
    source, added = (Array(size, dtype, offset, values) for values in (x, residual))
    row = Array((shape.hidden,), dtype, offset, weight)
    out = source if in_place else Array(size, dtype, offset)
    residual_out = added if in_place and shape.residual else Array(size, dtype, offset)
    quantised = Array(size, np.uint8, offset // x.itemsize)
    groups = shape.hidden // 128 if shape.scales == "group" else 1
    scales = Array((groups, shape.scales_stride) if shape.column_major else (shape.rows, groups), np.float32)
    if shape.scales == "given":
        scales.values[0, 0] = given

    depth, grid, block = epilogues.pair_grid(shape)
    args = np.concatenate([np.zeros(2, np.uint64), arguments.norm_table(shape)])
    addresses = NormAddresses(
        source=source.address, weight=row.address, residual=added.address * shape.residual,
        out=out.address * shape.keeps_y, residual_out=residual_out.address,
        quantised=quantised.address * bool(shape.scales), scales=scales.address * bool(shape.scales),
    )  # fmt: skip
    arguments.norm_setter(args.data, 2, shape)(addresses)
    scale = epilogues.SCALES.index(shape.scales)
    entry = kernel(Kernel("rmsnorm", shape.dtype, depth=depth, scale=scale, alone=True))
    runtime().sim_run(entry, args.ctypes.data, min(grid, 3), block, 0, 1, True)

    right = norms.results(
        x, residual if shape.residual else None, weight, eps=shape.eps,
        weight_bias=shape.weight_bias, scales=shape.scales, given=float(given),
    )  # fmt: skip
    assert norms.same(residual_out.values, right.residual_out)
    if shape.keeps_y:
        assert norms.same(out.values, right.y)
    elif not in_place:
        assert (out.bytes == FILLER).all()
    if shape.scales:
        assert norms.same(quantised.values, right.quantised)
    if right.scales is not None:
        found = scales.values.T[: shape.rows] if shape.column_major else scales.values
        assert norms.same(found, right.scales)
    assert all(array.intact() for array in (source, added, row, out, residual_out, quantised, scales))


def shape_of(hidden: int, dtype: str, scales: str = "", rows: int = 7, **fields: Any) -> NormShape:
    given = {"eps": float(np.float32(1e-5)), "weight_bias": 0.0, "residual": True} | fields
    return NormShape(rows=rows, hidden=hidden, dtype=dtype, scales=scales, **given)


@pytest.mark.parametrize("dtype", norms.DTYPES)
def test_more_than_kernels_count_is_refused(dtype: str):
    """Rows, up to the next one of a block, and what is left of a row fit into 32 bits, of which one may be the sign."""
    assert epilogues._MAX_ROWS + epilogues._MAX_BLOCKS < 1 << 32
    assert epilogues._MAX_ROW_BYTES < 1 << 31
    kernels: Any = Kernels(0, (9, 0), print, 1, 0)
    kernels.launch = lambda kernel, grid, block, args: SimpleNamespace(args=args)

    def launch_of(rows: int, hidden: int) -> Any:
        request = with_norm((rows, hidden), shape_of(hidden, dtype, rows=rows))
        return epilogues.behind(None, request, kernels, 0).steps[0].launch  # type: ignore[attr-defined]

    longest = (1 << 30) // norms.DTYPES[dtype].itemsize
    for rows, hidden in ((1 << 31, 1), (1, longest)):
        assert tuple(launch_of(rows, hidden).args[7:9]) == (rows, hidden)
    for rows, hidden in (((1 << 31) + 1, 1), ((1 << 32) - 7, 8), (1 << 32, 64), ((1 << 32) + 7, 64), (1, longest + 1)):
        with pytest.raises(ArgumentError, match=f"x has {rows} rows of {hidden} elements. On a GPU .* of {dtype}"):
            launch_of(rows, hidden)


@pytest.mark.parametrize("dtype", norms.DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 8, 63, 64, 100, 1000, 4096, 8200])
def test_bits(hidden: int, dtype: str):
    for seed, offset in enumerate((0, norms.DTYPES[dtype].itemsize)):
        check(shape_of(hidden, dtype), seed, offset)
        check(shape_of(hidden, dtype, residual=False, weight_bias=1.0), seed + 10, offset, in_place=True)


@pytest.mark.parametrize("dtype", norms.DTYPES)
@pytest.mark.parametrize("scales", ["given", "token", "group"])
def test_quantised_bits(scales: str, dtype: str):
    for seed, hidden in enumerate((128, 896, 4096, 5120)):
        check(shape_of(hidden, dtype, scales, keeps_y=bool(seed % 2)), seed)
        check(shape_of(hidden, dtype, scales, column_major=scales == "group"), seed, norms.DTYPES[dtype].itemsize)


def test_a_row_of_any_length_has_one_scale():
    for hidden in (1, 9, 1001):
        check(shape_of(hidden, "float16", "token"), hidden)


@pytest.mark.parametrize("scales", ["", "given", "token", "group"])
def test_rows_that_no_block_holds(scales: str):
    check(shape_of(16_512, "bfloat16", scales), 1)
    check(shape_of(25_088, "float32", scales, rows=20), 2, 4, in_place=True)  # the order of the sum shows in float32
    if scales in ("", "token"):
        check(shape_of(20_001, "float16", scales, rows=4, residual=False), 3)


def test_several_rows_of_a_block():
    """Of lengths that leave most of a chunk empty, with sums in both tables."""
    for hidden in (64, 192, 8256):
        check(shape_of(hidden, "bfloat16", rows=9), hidden)


@pytest.mark.parametrize("dtype", norms.DTYPES)
def test_a_negative_zero_stays_one(dtype: str, monkeypatch: pytest.MonkeyPatch):
    """Without a residual every reduced number stays as it is."""
    zeros = np.full((3, 64), -0.0, norms.DTYPES[dtype])
    monkeypatch.setitem(globals(), "inputs", lambda shape, seed: (zeros.copy(), zeros.copy(), zeros[0].copy()))
    for offset in (0, zeros.itemsize):
        check(shape_of(64, dtype, rows=3, residual=False), 0, offset)


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1.0])
def test_rows_of_zeros_and_of_tiny_numbers(eps: float, monkeypatch: pytest.MonkeyPatch):
    """With eps 0 a row of zeros is NaN, and so are its scales. That holds, too, where all squares are 0."""
    shapes = [shape_of(256, "float32", scales, rows=40, eps=float(np.float32(eps))) for scales in ("token", "group")]
    for shape in shapes:
        check(shape, 5)
    usual = inputs
    monkeypatch.setitem(globals(), "inputs", lambda shape, seed: scaled(usual(shape, seed), np.float32(1e-30)))
    for shape in shapes:
        check(shape, 6)


def scaled(arrays: tuple[Any, Any, Any], factor: Any) -> tuple[Any, Any, Any]:
    """The rows multiplied by a factor, and the weight as it is."""
    x, residual, weight = arrays
    return x * factor, residual * factor, weight


@pytest.mark.parametrize("scales", ["token", "group"])
@pytest.mark.parametrize("column", [0, 9, 127, 200])
def test_a_nan_in_the_weight_is_in_its_scales(scales: str, column: int, monkeypatch: pytest.MonkeyPatch):
    usual = inputs

    def with_nan(shape: NormShape, seed: int) -> tuple[Any, Any, Any]:
        x, residual, weight = usual(shape, seed)
        weight[column] = np.nan
        return x, residual, weight

    monkeypatch.setitem(globals(), "inputs", with_nan)
    check(shape_of(256, "float16", scales), 1)
    check(shape_of(8320, "float16", scales, rows=2), 1)  # more groups than a chunk has


E4M3 = """
#include <cstdio>
#include <cstring>
#include <rmsnorm.cuh>
int main() {  // every float32 whose last 12 bits are 0, or on either side of that
  for (u64 high = 0; high < 1 << 20; ++high)
    for (int side = -1; side <= 1; ++side) std::printf("%u\\n", float_to_e4m3(bits_to_float((u32)(high << 12) + side)));
}
"""


def test_e4m3_in_software(tmp_path: Any):
    """All numbers at which the result changes are among these."""
    from tests.unit.test_kernel_layout import run_program

    lines = run_program(
        tmp_path, E4M3, IPCREDUCE_DTYPE="float32", IPCREDUCE_SCALE="1", IPCREDUCE_CLUSTER="1"
    )  # fmt: skip
    bits = (np.arange(1 << 20, dtype=np.uint32) << 12)[:, None] + np.array([-1, 0, 1]).astype(np.uint32)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(np.array(lines, np.uint8), norms.e4m3(bits.reshape(-1).view(np.float32)))
