"""The kernels of a backend: compiled and loaded as calls need them. The communicators of a process share them.

Loading a kernel waits for all work on the device. A communicator that uses a loaded kernel does not have to wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..cuda import compiler, driver
from ..cuda.contexts import using_relaxed
from ..cuda.expressions import Expression
from ..interrupts import uninterrupted
from ..originals import RLock
from . import background


class Kernel(NamedTuple):
    """A kernel as it is to be compiled: its file, and the values of its macros.

    :ivar name: of its file in kernels/, and of its function.
    :ivar op: one of ``dtypes.OPS``. :ivar depth: packets, or units of a row, that a thread takes at a time.
    :ivar parts: the most parts of a list; 0 for one array.
    :ivar scale: for a norm, the code of its scales; -1 for no norm. :ivar cluster: for a norm, the blocks of a row.
    :ivar alone: it exchanges no data. :ivar members: the most arrays of a launch that splits them.
    """

    name: str
    dtype: str
    op: str = "sum"
    depth: int = 1
    parts: int = 0
    expression: Expression | None = None
    scale: int = -1
    cluster: int = 1
    alone: bool = False
    members: int = 0

    def macros(self) -> dict[str, str]:
        """The macros that its source requires, but for those about the ranks."""
        found = {"DTYPE": self.dtype, "OP": self.op, "DEPTH": self.depth}
        if self.parts:
            found["PARTS"] = self.parts
        if self.members:
            found["MEMBERS"] = self.members
        if self.scale >= 0:
            found |= {"SCALE": self.scale, "CLUSTER": self.cluster}
        return {f"IPCREDUCE_{name}": str(value) for name, value in found.items()}


@dataclass
class _Loaded:
    module: int
    function: int
    users: int = 0


LARGE_SHARED_BYTES = 193 << 10  # of a block of these, beyond what others have: kLargeSharedBytes of sync.cuh
_LARGE = "bulk", "bulk_gather", "bulk_scatter"
_Key = tuple[Any, ...]  # the context, the macros about the ranks, and the kernel
_loaded: dict[_Key, _Loaded] = {}
_lock = RLock()  # re-entrant, because a finaliser may run while this thread holds it


def take(key: _Key, name: str, cubin: bytes | None = None) -> int | None:
    """Add a user to a kernel, and return its function; None if the kernel is not loaded.

    :param name: the function's. :param cubin: the kernel is loaded from it if need be.
    :raises CudaError: if that fails.
    """
    with _lock:
        if key not in _loaded and cubin is not None:
            module = driver.load_module(cubin)
            try:
                _loaded[key] = _Loaded(module, driver.get_function(module, name))
            except BaseException:
                driver.close_module(module)
                raise
        found = _loaded.get(key)
        if found is None:
            return None
        found.users += 1
        return found.function


def release(key: _Key) -> None:
    """Remove a user from a kernel, and unload the kernel after its last user. :raises CudaError: if that fails."""
    with _lock:
        found = _loaded[key]
        found.users -= 1
        if not found.users:
            del _loaded[key]
            driver.close_module(found.module)


class Kernels:
    """The loaded kernels of one backend. Not thread-safe.

    :param before_loading: waits for the calls in flight, because loading waits for all work on the device.
    :param ranks: the number of ranks, all of one host, which compile at the same time. :param rank: this one's number.
    :ivar whole_packets: packets arrive whole. The start-up check may say otherwise, before any kernel is loaded.
    """

    def __init__(
        self, context: int, capability: tuple[int, int], before_loading: Callable[[], object], ranks: int, rank: int
    ) -> None:  # fmt: skip
        self.capability, self.programmatic = capability, capability >= (9, 0)
        self.before_loading, self.whole_packets = before_loading, True
        self._context, self._ranks, self._rank = context, ranks, rank
        self._functions: dict[Kernel, int] = {}
        self._taken: list[_Key] = []

    def launch(self, kernel: Kernel, grid: int, block: int, args: Any) -> driver.Launch:
        """A launch of a kernel with these arguments. :meth:`load` says what it raises."""
        function, shared = self.function(kernel), LARGE_SHARED_BYTES * (kernel.name in _LARGE)
        return driver.Launch(function, grid, block, args, programmatic=self.programmatic, shared=shared)

    def function(self, kernel: Kernel) -> int:
        """A kernel's function, loaded if need be."""
        if kernel not in self._functions:
            self.load([kernel])
        return self._functions[kernel]

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compile and load the kernels that are not loaded yet.

        Loading waits for all work on the device: 0.7 s behind a kernel of 0.7 s, whatever the size of the module
        and the loading mode (H200, driver 580). If that work is an all-reduce, a peer may be waiting for this process.
        So the first use of a dtype loads the kernels for every op and size, and loading waits until this communicator
        has no call in flight.

        :raises IpcReduceError: if a kernel does not compile; ArgumentError for a wrong expression.
        :raises CudaError: if it does not load.
        """
        missing = [one for one in dict.fromkeys(kernels) if one not in self._functions and not self._take(one)]
        if not missing:
            return
        cubins = background.each(self._compile, missing, (os.cpu_count() or 1) // self._ranks)
        self.before_loading()
        with using_relaxed(self._context):  # a thread that makes its first call may have no context
            for kernel, cubin in zip(missing, cubins, strict=True):
                self._take(kernel, cubin)

    def _compile(self, kernel: Kernel) -> bytes:
        macros = dict(self._about_ranks(kernel)) | kernel.macros()
        return compiler.compile_kernel(kernel.name, macros, self.capability, kernel.expression)

    def _about_ranks(self, kernel: Kernel) -> tuple[tuple[str, str], ...]:
        ranks, rank, whole = (1, 0, True) if kernel.alone else (self._ranks, self._rank, self.whole_packets)
        return (
            ("IPCREDUCE_RANKS", str(ranks)),
            ("IPCREDUCE_RANK", str(rank)),
            ("IPCREDUCE_WHOLE_PACKETS", str(int(whole))),
        )

    def _take(self, kernel: Kernel, cubin: bytes | None = None) -> bool:
        """Use a kernel that is loaded, or is to be loaded from ``cubin``. False if there is none."""
        key = self._context, self._about_ranks(kernel), kernel
        with uninterrupted():
            function = take(key, kernel.name, cubin)
            if function is None:
                return False
            self._functions[kernel] = function
            self._taken.append(key)
        return True

    def release_actions(self) -> list[Callable[[], None]]:
        """Actions that release the kernels, which other communicators may still use."""
        taken, self._taken, self._functions = self._taken, [], {}
        return [partial(release, key) for key in reversed(taken)]
