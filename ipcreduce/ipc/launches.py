"""The kernel launches of calls. They are planned, compiled and filled in once, except for the two addresses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..calls.fingerprint import of_allreduce, of_list, of_map
from ..calls.norm_shape import NormShape
from ..cuda import compiler, driver
from ..cuda.contexts import using_relaxed
from ..cuda.expressions import Expression
from ..device import maps, modules
from ..device.known_calls import Prepared, keep
from ..device.norm_kernels import NormKernels, NormLaunch
from ..dtypes import OPS, kind_name, list_kinds, op_name, reduced_as
from ..page.layout import ABORT_OFFSET, missing_offset
from ..types import DEFAULT_STREAM, Stream
from . import lists, norm_plan, norms, plan
from .workspace import Workspace

# Words of struct Args (packets.cuh)
IN, OUT, _BYTES, _PEERS, _HALF = 0, 1, 2, 3, 11
_EPOCHS, _ABORT, _MISSING, _TIMEOUT = 12, 13, 14, 15
_ARG_WORDS = 24
_VERIFY = "verify", "int32", "sum"
_MOST_LISTS = 256  # prepared, each with up to 32 KB of arguments for each launch
_MOST_MAPS = 1024
_Kernel = tuple[Any, ...]  # name, dtype, op, depth; the most parts of a list, or 0; an expression, if there is one


@dataclass(frozen=True, kw_only=True)
class PreparedCall(Prepared):
    """A call's launches, in order: each with its arguments and its offset in the message."""

    dtype: str
    op: str
    launches: tuple[tuple[driver.Launch, memoryview, plan.LaunchPlan], ...]

    def run(self, source: int, target: int, stream: Stream) -> None:
        """Launch them for arrays at these addresses on ``stream``."""
        for launch, words, part in self.launches:
            words[IN], words[OUT] = source + part.offset, target + part.offset
            launch.run(stream)


class Launches:
    """The launches of one communicator. Not thread-safe.

    :param control: address of the control page for this GPU.
    """

    def __init__(
        self, context: int, workspace: Workspace, control: int, *, capability: tuple[int, int], timeout: float,
        algorithm: str | None,
    ) -> None:  # fmt: skip
        self.algorithm = algorithm
        self.whole_packets = True  # until the start-up check says otherwise
        self.table: plan.Table = ()  # until the ranks have agreed on one
        self.norm_table: norm_plan.NormTable = ()  # so is this
        self.further_kernels: set[tuple[str, int]] = set()  # (algorithm, depth), to be loaded beside the planned ones
        self.resident, self.sharing = plan.RESIDENT, 1  # until they have compared their GPUs
        self.before_loading: Callable[[], object] = lambda: None  # waits for the calls in flight
        self._workspace, self._control, self._capability, self._timeout = workspace, control, capability, timeout
        self._context, self._programmatic = context, capability >= (9, 0)
        self.norm_kernels = NormKernels(context, capability, lambda: self.before_loading(), workspace.n)
        self._shared: list[modules.Key] = []
        self._functions: dict[_Kernel, int] = {}
        self.prepared: dict[tuple[Any, ...], PreparedCall] = {}  # by shape, dtype and op
        self.lists: dict[tuple[Any, ...], lists.PreparedLaunches] = {}  # by op, and the members' shapes and dtypes
        self._maps: dict[tuple[Any, ...], maps.PreparedMap] = {}  # by shape, dtype, op and expression

    def for_array(self, array: Any, op: Any) -> PreparedCall:
        """The launches of an all-reduce of a device array, compiled if need be.

        :param op: as :func:`op_name` takes it. A str, such as "mean", is found in a table from the second time on.
        :raises ArgumentError: if dtype or op is unknown. See :meth:`prepare` for other errors.
        """
        shape, dtype = array.shape, array.dtype
        prepared = self.prepared.get((shape, dtype, op)) if type(op) is str else None
        if prepared is None:
            name = op_name(op, dtype)
            kind = kind_name(dtype, name)
            prepared = self.prepared.get((shape, dtype, name))
            if prepared is None:
                prepared = self.prepare(shape, dtype, kind, name, array.nbytes)
            if type(op) is str and op != name:
                keep(self.prepared, (shape, dtype, op), prepared)
        return prepared

    def prepare(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str, op: str, nbytes: int) -> PreparedCall:
        """The launches of an all-reduce of ``nbytes`` bytes of ``dtype``, of kind ``name``, compiled if need be.

        :raises IpcReduceError: if a kernel does not compile. :raises CudaError: if it does not load.
        """
        self._load_all(name)
        steps = self.planned(nbytes, self.algorithm, self.table)
        return keep(self.prepared, (shape, dtype, op), self.by_steps(steps, shape, name, op, nbytes))

    def for_list(self, arrays: Sequence[Any], op: Any) -> lists.PreparedLaunches:
        """The launches of an all-reduce of a list of device arrays, compiled if need be. See :meth:`for_array`."""
        members = tuple((array.shape, array.dtype) for array in arrays)
        name = op_name(op) if not members or type(op) is not str else op
        prepared = self.lists.get((name, members))
        if prepared is None:
            prepared = keep(self.lists, (name, members), self._prepare_list(arrays, op), _MOST_LISTS)
        return prepared

    def _prepare_list(self, arrays: Sequence[Any], op: Any) -> lists.PreparedLaunches:
        names = list_kinds([array.dtype for array in arrays], op)
        launches: list[lists.ListLaunch] = []
        for kind, name in dict.fromkeys(names):
            sizes = [array.nbytes if of == (kind, name) else 0 for array, of in zip(arrays, names, strict=True)]
            planned = lists.make_plan(sizes, lists.most_parts(), self._planned_list)
            for parts in {one.parts for one in planned}:
                self._load_all(kind, parts)
            launches += [self._launch_list(one, kind, name, len(arrays)) for one in planned]
        what = of_list([(array.shape, kind) for array, (kind, _) in zip(arrays, names, strict=True)], op_name(op))
        what = what.made_by(len(launches))
        by = ", ".join(dict.fromkeys(one.plan.step.algorithm for one in launches)) or "nothing"
        return lists.PreparedLaunches(what=what, by=by, through=(None,) * len(arrays), launches=tuple(launches))

    def _launch_list(self, planned: lists.ListPlan, dtype: str, op: str, length: int) -> lists.ListLaunch:
        step = planned.step
        args = np.concatenate([self._arguments(plan.code_offset(dtype, op)), lists.table(planned)])
        args[_BYTES] = step.nbytes
        function = self._function(step.algorithm, dtype, op, step.depth, planned.parts)
        launch = driver.Launch(function, step.grid, step.block, args, programmatic=self._programmatic)
        return lists.ListLaunch(planned, launch, args, length)

    def for_map(self, array: Any, op: Any, expression: Expression) -> maps.PreparedMap:
        """The launches of an all-reduce with an expression, compiled if need be. See :meth:`for_array`.

        :raises ArgumentError: if the expression does not compile.
        """
        name = op_name(op, array.dtype)
        key = array.shape, array.dtype, name, expression
        prepared = self._maps.get(key)
        if prepared is None:
            kind = kind_name(array.dtype, name)
            kernels = plan.kernels(self._workspace.n, self.algorithm, self.table)
            self._load((kernel, kind, name, depth, 0, expression) for kernel, depth in kernels)
            steps = self.planned(array.nbytes, self.algorithm, self.table)
            launches = tuple(self._launch_map(step, array, kind, name, expression) for step in steps)
            what = of_map(array.shape, kind, name, str(expression), expression.text).made_by(len(launches))
            by = ", ".join(dict.fromkeys(step.algorithm for step in steps)) or "nothing"
            prepared = maps.PreparedMap(what=what, by=by, nbytes=array.nbytes, first=None, launches=launches)
            keep(self._maps, key, prepared, _MOST_MAPS)
        return prepared

    def _launch_map(
        self, step: plan.LaunchPlan, array: Any, dtype: str, op: str, expression: Expression
    ) -> maps.MapLaunch:  # fmt: skip
        args = np.concatenate([
            self._arguments(plan.code_offset(dtype, op)), maps.table(array, step.offset, expression)
        ])  # fmt: skip
        args[_BYTES] = step.nbytes
        function = self._functions[step.algorithm, dtype, op, step.depth, 0, expression]
        launch = driver.Launch(function, step.grid, step.block, args, programmatic=self._programmatic)
        return maps.MapLaunch(launch, args, step.offset, array.itemsize, expression)

    def _planned_list(self, nbytes: int) -> tuple[plan.LaunchPlan, ...]:
        return self.planned(nbytes, self.algorithm, self.table)

    def planned(self, nbytes: int, forced: str | None = None, table: plan.Table = ()) -> tuple[plan.LaunchPlan, ...]:
        """:func:`plan.make_plan` for this communicator."""
        n, half_bytes = self._workspace.n, self._workspace.half_bytes
        return plan.make_plan(nbytes, n, half_bytes, forced, table, self.resident, self.sharing)

    def by_steps(
        self, steps: Iterable[plan.LaunchPlan], shape: tuple[int, ...], dtype: str, op: str, nbytes: int
    ) -> PreparedCall:
        """:meth:`prepare` by other steps than the planned ones, and not kept."""
        launches = tuple((*self.launch(step, dtype, op), step) for step in steps)
        what = of_allreduce(shape, dtype, op).made_by(len(launches))
        by = ", ".join(dict.fromkeys(part.algorithm for *_, part in launches)) or "nothing"
        return PreparedCall(what=what, by=by, nbytes=nbytes, fast=nbytes > 0, dtype=dtype, op=op, launches=launches)

    def launch(self, step: plan.LaunchPlan, dtype: str, op: str) -> tuple[driver.Launch, memoryview]:
        """One launch and the words of its arguments, in which the addresses are still to be set."""
        args = self._arguments(plan.code_offset(dtype, op))
        args[_BYTES] = step.nbytes
        function = self._function(step.algorithm, dtype, op, step.depth)
        return driver.Launch(function, step.grid, step.block, args, programmatic=self._programmatic), args.data

    def _arguments(self, offset: int) -> np.ndarray[Any, Any]:
        args, workspace, control = np.zeros(_ARG_WORDS, np.uint64), self._workspace, self._control
        args[_PEERS : _PEERS + workspace.n] = [peer + offset for peer in workspace.peers]
        args[_HALF], args[_EPOCHS] = workspace.half_bytes, workspace.address
        args[_ABORT], args[_MISSING] = control + ABORT_OFFSET, control + missing_offset(workspace.rank)
        args[_TIMEOUT] = int(self._timeout * 1e9)
        return args

    def _function(self, kernel: str, dtype: str, op: str, depth: int = 1, parts: int = 0) -> int:
        key = kernel, reduced_as(dtype), op, depth, parts
        self._load([key])
        return self._functions[key]

    def _load_all(self, dtype: str, parts: int = 0) -> None:
        """Load the kernels for every op and size. :param parts: the most parts of a list; 0 for single arrays."""
        kernels = plan.kernels(self._workspace.n, self.algorithm, self.table)
        if not parts:
            kernels |= self.further_kernels
        self._load((kernel, reduced_as(dtype), op, depth, parts) for kernel, depth in kernels for op in OPS)

    def _load(self, kernels: Iterable[_Kernel]) -> None:
        """Compile and load the kernels that are not loaded yet.

        Loading waits for all work on the device: 0.7 s behind a kernel of 0.7 s, whatever the size of the module
        and the loading mode (H200, driver 580). If that work is an all-reduce, a peer may be waiting for this process.
        So the first use of a dtype loads the kernels for every op and size, and loading waits until this communicator
        has no call in flight. Communicators share the kernels.
        """
        missing = [key for key in kernels if key not in self._functions and not self._take(key)]
        if not missing:
            return
        with ThreadPoolExecutor(max(1, min(len(missing), (os.cpu_count() or 1) // self._workspace.n))) as pool:
            cubins = list(pool.map(self._compile, missing))
        self.before_loading()
        with using_relaxed(self._context):  # a thread that makes its first call may have no context
            for key, cubin in zip(missing, cubins, strict=True):
                self._take(key, cubin)

    def _take(self, key: _Kernel, cubin: bytes | None = None) -> bool:
        """Use a kernel that is loaded, or is to be loaded from ``cubin``. False if there is none."""
        shared = self._shared_key(key)
        function = modules.take(shared, cubin)
        if function is None:
            return False
        self._functions[key] = function
        self._shared.append(shared)
        return True

    def _shared_key(self, key: _Kernel) -> modules.Key:
        kernel, *compiled_for = key
        n, rank = self._workspace.n, self._workspace.rank
        return self._context, n, rank, self.whole_packets, *compiled_for, kernel

    def _compile(self, key: _Kernel) -> bytes:
        kernel, dtype, op, depth, parts, *expressions = key
        macros = self._exchange_macros() | {
            "IPCREDUCE_DTYPE": dtype,
            "IPCREDUCE_OP": op,
            "IPCREDUCE_DEPTH": str(depth),
        }
        if parts:
            macros["IPCREDUCE_PARTS"] = str(parts)
        return compiler.compile_kernel(kernel, macros, self._capability, *expressions)

    def _exchange_macros(self) -> dict[str, str]:
        return {
            "IPCREDUCE_RANKS": str(self._workspace.n),
            "IPCREDUCE_RANK": str(self._workspace.rank),
            "IPCREDUCE_WHOLE_PACKETS": str(int(self.whole_packets)),
        }

    def fused_norm(self, shape: NormShape, planned: norm_plan.NormPlan | None = None) -> NormLaunch | None:
        """The launch of an all-reduce with RMSNorm of aligned rows, compiled if need be; None if it needs the pair.

        See :meth:`prepare` for errors. :param planned: another plan than :meth:`norm_plan` gives.
        """
        planned = planned or self.norm_plan(shape)
        if planned is None:
            return None
        variants = norm_plan.variants(shape, self._workspace.n, *self._norm_limits())
        base = self._arguments(norm_plan.code_offset(shape.dtype))
        return norms.fused_launch(planned, shape, self.norm_kernels, base, self._exchange_macros(), variants)

    def norm_plans(self, shape: NormShape) -> Iterator[tuple[str, int, norm_plan.NormPlan]]:
        """:func:`norm_plan.every_plan` for this communicator."""
        n, half_bytes = self._workspace.n, self._workspace.half_bytes
        return norm_plan.every_plan(shape, n, half_bytes, self.resident, self.sharing, self._programmatic)

    def _norm_limits(self) -> tuple[str | None, int, int, bool, norm_plan.NormTable]:
        return self.algorithm, self.resident, self.sharing, self._programmatic, self.norm_table

    def norm_plan(self, shape: NormShape) -> norm_plan.NormPlan | None:
        """:func:`norm_plan.make_plan` for this communicator."""
        return norm_plan.make_plan(shape, self._workspace.n, self._workspace.half_bytes, *self._norm_limits())

    def load_verify(self) -> None:
        """Compile and load the kernel of :meth:`verify`."""
        if self._workspace.n > 1:
            self._function(*_VERIFY)

    def verify(self, rounds: int, seconds: float) -> np.ndarray[Any, Any]:
        """Exchange data with each rank ``rounds`` times.

        :returns: the verdicts of verify.cu by rank, uint32 of shape ``(8,)``.
        """
        verdict = np.zeros(plan.MAX_RANKS, np.uint32)
        if self._workspace.n > 1:
            args = self._arguments(0)
            args[OUT] = self._workspace.address  # not in use yet
            args[_BYTES], args[_TIMEOUT] = rounds, int(seconds * 1e9)
            driver.Launch(self._function(*_VERIFY), self._workspace.n - 1, 32, args).run(DEFAULT_STREAM)
            driver.synchronize()
            driver.copy_to_host(verdict, self._workspace.address)
        return verdict

    def limit(self, nbytes: int, grid: int, block: int) -> driver.Launch:
        """A launch of limit.cu for bench: ``nbytes`` bytes to each peer, for which the workspace must have room."""
        args = self._arguments(0)
        args[_BYTES] = nbytes
        function = self._function("limit", "int32", "sum")
        return driver.Launch(function, grid, block, args, programmatic=self._programmatic)

    def release_actions(self) -> list[Callable[[], None]]:
        """Actions that release the kernels, which other communicators may still use."""
        shared, self._shared = self._shared, []
        return [*self.norm_kernels.release_actions(), *(partial(modules.release, key) for key in reversed(shared))]
