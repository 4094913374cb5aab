"""Every input of the arithmetic of fused kernels whose bits a GPU's instructions have to give, on one GPU.

    python tests/gpu/arithmetic.py

The sums of all pairs of halves by ``add_two()`` are compared with those by float32, and ``reciprocal_of_normal()`` of
all float32 numbers in its range with ``__frcp_rn()``. This takes a second.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import cupy as cp
from cuda.core import Program, ProgramOptions

from ipcreduce.cuda import compiler

SOURCE = """
#include <rmsnorm.cuh>
extern "C" __global__ void sums(u32* wrong) {
  const u32 a = blockIdx.x;
  for (u32 b = threadIdx.x; b < 1 << 16; b += blockDim.x) {
    const float x = Dtype::load((u16)a), y = Dtype::load((u16)b), twice = x + x;
    if (Dtype::add_two(a << 16 | a, a << 16 | b) != Dtype::store_two(x + y, twice)) atomicAdd(wrong, 1);
    if (Dtype::add_two(a << 16 | a, b << 16 | a) != Dtype::store_two(twice, x + y)) atomicAdd(wrong, 1);
  }
}
extern "C" __global__ void reciprocals(u32* wrong) {
  const u32 first = blockIdx.x << 16;
  for (u32 i = threadIdx.x; i < 1 << 16; i += blockDim.x) {
    const float x = bits_to_float(first | i), size = absolute(x);
    if (!(size >= 0x1p-125f && size <= 0x1p125f) && x == x) continue;
    const float found = reciprocal_of_normal(x);
    if (x == x ? to_bits(found) != to_bits(__frcp_rn(x)) : found == found) atomicAdd(wrong, 1);
  }
}
"""
MACROS = {"RANKS": "2", "RANK": "0", "WHOLE_PACKETS": "1", "OP": "sum", "DEPTH": "1", "SCALE": "2", "CLUSTER": "1"}


def module_of(dtype: str) -> Any:
    """The kernels, compiled as ipcreduce compiles its own: CuPy's compiler flushes subnormal numbers to zero."""
    macros = sorted((f"IPCREDUCE_{name}", value) for name, value in {**MACROS, "DTYPE": dtype}.items())
    options = ProgramOptions(
        std="c++17",
        arch=f"sm_{cp.cuda.Device().compute_capability}",
        include_path=[str(compiler.kernel_directory())],
        define_macro=macros,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(bytes(Program(SOURCE, "c++", options).compile("cubin").code))
        file.flush()
        module = cp.RawModule(path=file.name)
        module.compile()  # reads the file
    return module


def main() -> int:
    """Print the number of wrong results of each check. Returns 1 if there are any."""
    failed = 0
    for dtype in ("bfloat16", "float16"):
        module = module_of(dtype)
        for name in ("sums", "reciprocals"):
            wrong = cp.zeros(1, cp.uint32)
            module.get_function(name)((1 << 16,), (256,), (wrong,))
            print(f"{dtype} {name}: {int(wrong[0])} wrong", flush=True)
            failed |= bool(wrong[0])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
