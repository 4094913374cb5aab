"""The kernels of an all-reduce with RMSNorm: compiled and loaded as calls need them, and their arguments.

Here is the second half of the unfused pair (kernels/rmsnorm.cu), which every backend has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..calls.norm_shape import GROUP, NormAddresses, NormShape
from ..cuda import compiler, driver
from ..cuda.contexts import using_relaxed
from . import background, modules

SCALES = ("", "given", "token", "group")  # a kind's index is its code in rmsnorm.cuh
UNIT = 8  # elements of a unit there
_MOST_THREADS, _MOST_DEPTH = 1024, 2  # of rmsnorm.cu, for rows that its threads hold
_MOST_BLOCKS = 1 << 16
# Words of struct Args of every kernel, and of struct NormArgs behind it (rmsnorm.cuh)
IN, OUT = 0, 1
_RESIDUAL, _RESIDUAL_OUT, _WEIGHT, _QUANTISED, _SCALES = 0, 1, 2, 3, 4
_ROWS, _HIDDEN, _STRIDES, _NUMBERS, _RECIPROCAL = 5, 6, 7, 8, 9
WORDS = 10
_PAIR_WORDS = 2  # of struct Args in rmsnorm.cu before that

Words = np.ndarray[Any, np.dtype[np.uint64]]
Kernel = tuple[str, tuple[tuple[str, str], ...]]  # the name, and the macros in order


class NormLaunch(NamedTuple):
    """A launch, its arguments, and the function that sets the addresses in these. ``name``: the kernel's."""

    name: str
    launch: driver.Launch
    args: Words
    set: Callable[[NormAddresses], None]


class NormKernels:
    """The loaded kernels of one backend. Not thread-safe.

    :param before_loading: waits for the calls in flight, because loading waits for all work on the device.
    :param sharing: the ranks of the host, which compile at the same time.
    """

    def __init__(
        self, context: int, capability: tuple[int, int], before_loading: Callable[[], object], sharing: int = 1
    ) -> None:  # fmt: skip
        self._context, self._capability, self._before_loading = context, capability, before_loading
        self._workers = max(1, (os.cpu_count() or 1) // sharing)
        self._functions: dict[Kernel, int] = {}
        self.programmatic = capability >= (9, 0)

    def pair_launch(self, shape: NormShape) -> NormLaunch:
        """The second half of the pair, from the reduced values at ``source`` to all results.

        :raises IpcReduceError: if the kernel does not compile. :raises CudaError: if it does not load.
        """
        depth, grid, block = pair_grid(shape)
        kernel = "rmsnorm", macros_of(shape, depth)
        self.load([kernel])
        args = np.concatenate([np.zeros(_PAIR_WORDS, np.uint64), words_of(shape)])
        launch = driver.Launch(self.function(kernel), grid, block, args, programmatic=self.programmatic)
        return NormLaunch("rmsnorm", launch, args, partial(set_addresses, args.data, _PAIR_WORDS))

    def function(self, kernel: Kernel) -> int:
        """A kernel that is loaded."""
        return self._functions[kernel]

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compile and load the kernels that are not loaded yet: see :meth:`ipcreduce.ipc.launches.Launches._load`."""
        missing = [kernel for kernel in kernels if kernel not in self._functions and not self._take(kernel)]
        if not missing:
            return
        cubins = background.each(self._compile, missing, self._workers)
        self._before_loading()
        with using_relaxed(self._context):
            for kernel, cubin in zip(missing, cubins, strict=True):
                self._take(kernel, cubin)

    def _compile(self, kernel: Kernel) -> bytes:
        name, macros = kernel
        return compiler.compile_kernel(name, dict(macros), self._capability)

    def _take(self, kernel: Kernel, cubin: bytes | None = None) -> bool:
        function = modules.take(self._shared_key(kernel), cubin)
        if function is not None:
            self._functions[kernel] = function
        return function is not None

    def _shared_key(self, kernel: Kernel) -> modules.Key:
        name, macros = kernel
        return self._context, macros, name

    def release_actions(self) -> list[Callable[[], None]]:
        """Actions that release the kernels, which other communicators may still use."""
        kernels, self._functions = list(self._functions), {}
        return [partial(modules.release, self._shared_key(kernel)) for kernel in reversed(kernels)]


def pair_grid(shape: NormShape) -> tuple[int, int, int]:
    """Depth, grid and block of rmsnorm.cu: a row a block. The depth is 0 for rows that no block can hold."""
    units = -(-shape.hidden // UNIT)
    depth = -(-units // _MOST_THREADS)
    grid = min(shape.rows, _MOST_BLOCKS)
    if depth > _MOST_DEPTH:
        return 0, grid, _MOST_THREADS
    return depth, grid, 32 * -(-units // (32 * depth))


def macros_of(
    shape: NormShape, depth: int, cluster: int = 1, exchange: Mapping[str, str] | None = None
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    """The macros that a kernel's source requires.

    :param exchange: those about the ranks; None for a kernel without an exchange.
    """
    macros = exchange or {"IPCREDUCE_RANKS": "1", "IPCREDUCE_RANK": "0", "IPCREDUCE_WHOLE_PACKETS": "1"}
    return (
        *macros.items(),
        ("IPCREDUCE_DTYPE", shape.dtype),
        ("IPCREDUCE_OP", "sum"),
        ("IPCREDUCE_DEPTH", str(depth)),
        ("IPCREDUCE_SCALE", str(SCALES.index(shape.scales))),
        ("IPCREDUCE_CLUSTER", str(cluster)),
    )


def words_of(shape: NormShape) -> Words:
    """The words of struct NormArgs, in which the addresses are still to be set."""
    words = np.zeros(WORDS, np.uint64)
    strides, floats = words[_STRIDES:].view(np.uint32), words[_NUMBERS:].view(np.float32)
    words[_ROWS], words[_HIDDEN] = shape.rows, shape.hidden
    if shape.scales == "group":
        strides[:2] = (1, shape.scales_stride) if shape.column_major else (shape.hidden // GROUP, 1)
    else:
        strides[:2] = 1, 0
    floats[:2] = shape.eps, shape.weight_bias
    floats[2] = 1 / shape.hidden
    return words


def set_addresses(words: memoryview, norm: int, addresses: NormAddresses) -> None:
    """Set the addresses in a kernel's arguments, in which struct NormArgs begins at word ``norm``."""
    words[IN], words[OUT] = addresses.source, addresses.out
    words[norm + _RESIDUAL], words[norm + _RESIDUAL_OUT] = addresses.residual, addresses.residual_out
    words[norm + _WEIGHT] = addresses.weight
    words[norm + _QUANTISED], words[norm + _SCALES] = addresses.quantised, addresses.scales
