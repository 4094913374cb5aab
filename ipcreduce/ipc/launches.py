"""The kernel launches of calls. They are planned, compiled and filled in once, except for the arrays' addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..calls.addresses import Places, pairs_of
from ..calls.request import NormShape, Request, Rows
from ..cuda import cupy_runtime, driver
from ..cuda.expressions import Expression
from ..device import arguments
from ..device.arguments import BYTES, OUT, TIMEOUT, Words
from ..device.epilogues import SCALES
from ..device.kernels import Kernel, Kernels
from ..device.prepared import KernelStep, OwnStep, Prepared, Step
from ..dtypes import KINDS, OPS, reduced_as
from ..page.layout import ABORT_OFFSET, missing_offset
from ..types import DEFAULT_STREAM, Stream
from . import bulk, lists, norm_plan, parts, plan
from .workspace import Workspace

_VERIFY, _LIMIT = Kernel("verify", "int32"), Kernel("limit", "int32")


class Launches:
    """The launches of one communicator. Not thread-safe.

    :param control: address of the control page for this GPU.
    :param before_loading: see :class:`Kernels`.
    """

    def __init__(
        self, context: int, workspace: Workspace, control: int, *, capability: tuple[int, int], timeout: float,
        algorithm: str | None, before_loading: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.algorithm = algorithm
        self._forced_norm = None if algorithm == plan.BULK else algorithm  # bulk.cu has no kernel with a norm
        self.table: plan.Table = ()  # until the ranks have agreed on one
        self.norm_table: norm_plan.NormTable = ()  # so is this
        self.further_kernels: set[tuple[str, int]] = set()  # (algorithm, depth), to be loaded beside the planned ones
        self.most_parts = lists.SHORT  # of a list in one launch, until they have compared their drivers
        self.fuses = True  # bench also times pairs of kernels
        self.kernels = Kernels(context, capability, before_loading, workspace.n, workspace.rank)
        self._workspace, self._control, self._timeout = workspace, control, timeout
        self.gpus = plan.Gpus(  # of one rank each, until they have compared them
            workspace.n, workspace.half_bytes, area=workspace.area_bytes, clusters=self.kernels.programmatic
        )  # fmt: skip

    def prepare(self, request: Request) -> Prepared | None:
        """The launches of a call, compiled if need be; None if the exchange and the epilogue cannot be one kernel.

        :raises IpcReduceError: see :meth:`Kernels.load`.
        """
        if isinstance(request.epilogue, NormShape):
            return self.fused(request) if self.fuses else None
        if self._workspace.n == 1:
            return None if request.epilogue else _alone(request)
        if request.split is not None:
            return self._spread(request) or self._of_parts(request)
        if request.is_list:
            return self._of_list(request)
        ((_, kind),) = request.members
        steps = self._planned(request.nbytes, request.sms)
        self._load_all(kind, steps, expression=request.epilogue, op=request.op)
        return self.by_steps(steps, request)

    def by_steps(self, steps: Iterable[plan.LaunchPlan], request: Request) -> Prepared:
        """The launches of a call on one array, by these steps."""
        steps = [*steps]
        return _prepared(request, [self._step(step, request) for step in steps], [step.algorithm for step in steps])

    def _step(self, step: plan.LaunchPlan, request: Request) -> Step:
        ((shape, kind),) = request.members
        expression, itemsize = request.epilogue, KINDS[kind].itemsize
        table = None if expression is None else arguments.operand_table(shape, step.offset // itemsize, expression)
        if step.algorithm == plan.BULK:
            return self._bulk_step(step, request, table)
        launch = self.launch(step, kind, request.op, table=table, expression=expression)
        return KernelStep(launch, _setter(launch, step, request), step)

    def _bulk_step(self, step: plan.LaunchPlan, request: Request, table: Words | None) -> bulk.BulkStep:
        ((_, kind),) = request.members
        expression, workspace = request.epilogue, self._workspace
        inward = self._copy(step, _copy_kernel(kind))
        outward = self._copy(step, _copy_kernel(kind, expression=expression), table)
        setters = [arguments.plain_setter(inward.args.data, step.offset), _setter(outward, step, request)]
        own = bulk.own_chunk(step.nbytes, workspace.n, workspace.rank)
        exchange = self._exchange(step, kind, request.op)
        return bulk.BulkStep(inward, exchange, outward, setters, own, maps=expression is not None)

    def _exchange(self, step: plan.LaunchPlan, kind: str, op: str) -> driver.Launch:
        args = bulk.in_area(self._arguments(plan.code_offset(kind, op), step.nbytes), self._workspace)
        return self.kernels.launch(Kernel(plan.BULK, reduced_as(kind), op), step.grid, step.block, args)

    def _copy(self, step: plan.LaunchPlan, kernel: Kernel, table: Words | None = None) -> driver.Launch:
        return self.kernels.launch(kernel, *bulk.copy_grid(step.nbytes), self._arguments(0, step.nbytes, table))

    def launch(
        self, step: plan.LaunchPlan, dtype: str, op: str, *, table: Words | None = None, parts: int = 0,
        expression: Expression | None = None,
    ) -> driver.Launch:  # fmt: skip
        """Make one launch, in whose arguments the addresses are still to be set."""
        args = self._arguments(plan.code_offset(dtype, op), step.nbytes, table)
        kernel = Kernel(step.algorithm, _compiled_as(dtype, expression), op, step.depth, parts, expression)
        return self.kernels.launch(kernel, step.grid, step.block, args)

    def _of_list(self, request: Request) -> Prepared:
        launches: list[Step] = []
        names: list[str] = []
        for kind in dict.fromkeys(one.kind for one in request.members):
            sizes = [one.nbytes if one.kind == kind else 0 for one in request.members]
            planned = lists.make_plan(sizes, self.most_parts, partial(self._planned, sms=request.sms))
            for most in {one.parts for one in planned}:
                self._load_all(kind, [one.step for one in planned if one.parts == most], most)
            for one in planned:
                launches.append(self._list_step(one, kind, request.op, len(request.members)))
                names.append(one.step.algorithm)
        return _prepared(request, launches, names)

    def _list_step(self, one: lists.ListPlan, kind: str, op: str, length: int) -> Step:
        table, parts = lists.table(one), one.parts
        if one.step.algorithm != plan.BULK:
            return lists.step(one, self.launch(one.step, kind, op, table=table, parts=parts), length)
        inward, outward = (self._copy(one.step, _copy_kernel(kind, parts), table) for _ in range(2))
        return bulk.BulkListStep(one, inward, self._exchange(one.step, kind, op), outward, length)

    def _of_parts(self, request: Request) -> Prepared:
        """All-gather, broadcast or reduce-scatter: a launch for all arrays that are moved or reduced as one dtype."""
        assert request.split is not None
        n, collective = self._workspace.n, request.split.collective.name
        op, length = request.op or "sum", len(request.members) if request.is_list else None
        most = min(plan.packets_of_rows(n - 1, self._workspace.half_bytes), plan.LAUNCH_PACKETS)
        steps: list[Step] = []
        names: list[str] = []
        for dtype, kind, rows in parts.together(request, n):
            base = self._arguments(plan.code_offset(kind, f"{collective} {request.op}".strip()))
            tiles = self._tiles(rows, request)
            name = parts.KERNELS[collective][bool(tiles)]
            if tiles:
                base[OUT], base[arguments.OUTS : arguments.OUTS + n] = tiles.round_tiles, self._workspace.areas
            planned = parts.make_plan(
                rows, self._workspace.rank, plan.LAUNCH_PACKETS if tiles else most, parts.most_pieces(self.most_parts)
            )
            for members in {parts.places(one) for one in planned}:
                self.kernels.load(Kernel(name, dtype, each, members=members) for each in (OPS if request.op else (op,)))
            for one in planned:
                args = np.concatenate([base, parts.table(one)])
                args[BYTES] = one.longest * plan.PACKET_BYTES
                shape = tiles[:2] if tiles else plan.parts_shape(one.longest, self.gpus, request.sms)
                launch = self.kernels.launch(Kernel(name, dtype, op, members=parts.places(one)), *shape, args)
                steps.append(parts.step(one, launch, gathers=request.split.collective.gathers, length=length))
                names.append(name)
        return _prepared(request, steps, names)

    def _spread(self, request: Request) -> Prepared | None:
        """A broadcast of one array in two hops; None if it goes in one."""
        split, workspace = request.split, self._workspace
        assert split is not None
        if not split.collective.rooted or request.is_list or request.sms is not None:
            return None
        steps = []
        ((dtype, kind, _),) = parts.together(request, workspace.n)
        for one in plan.spread_plan(request.nbytes, self.gpus, self.algorithm):
            args = self._arguments(plan.code_offset(kind, one.algorithm), one.nbytes)
            args[arguments.OUTS] = split.root
            launch = self.kernels.launch(Kernel(one.algorithm, dtype), one.grid, one.block, args)
            steps.append(KernelStep(launch, arguments.plain_setter(launch.args.data, one.offset)))
        return _prepared(request, steps, ["spread"] * len(steps)) if steps else None

    def _tiles(self, every: Mapping[int, Rows], request: Request) -> plan.Tiles | None:
        """The shape of a launch with few blocks; None if other kernels take these arrays."""
        sms = request.sms
        if [one.rows for one in every.values()] != [1] or self.algorithm not in (None, plan.BULK):
            return None
        longest = max(max(one.widths) for one in every.values())
        if self.algorithm is None:
            if sms is None or longest < plan.BULK_BYTES:
                return None
            if plan.parts_shape(-(-longest // plan.PACKET_BYTES), self.gpus, None)[0] <= sms:
                return None
        return plan.tiles(self.gpus, plan.EPOCH_SLOTS if sms is None else sms, reduces=bool(request.op))

    def _planned(self, nbytes: int, sms: int | None) -> tuple[plan.LaunchPlan, ...]:
        most = plan.EPOCH_SLOTS if sms is None else min(sms, plan.EPOCH_SLOTS)
        return plan.make_plan(nbytes, self.gpus, self.algorithm, self.table, most)

    def _arguments(self, offset: int, nbytes: int = 0, table: Words | None = None) -> Words:
        """:param offset: of the slots. :param table: what comes after the arguments of all kernels."""
        args, workspace, control = arguments.empty(nbytes), self._workspace, self._control
        args[arguments.PEERS : arguments.PEERS + workspace.n] = [peer + offset for peer in workspace.peers]
        args[arguments.HALF], args[arguments.EPOCHS] = workspace.half_bytes, workspace.address
        args[arguments.ABORT] = control + ABORT_OFFSET
        args[arguments.MISSING] = control + missing_offset(workspace.rank)
        args[TIMEOUT] = int(self._timeout * 1e9)
        return args if table is None else np.concatenate([args, table])

    def _load_all(
        self, kind: str, steps: Sequence[plan.LaunchPlan], parts: int = 0, expression: Expression | None = None,
        op: str = "",
    ) -> None:  # fmt: skip
        """Load the kernels for every size, and for every op, but for those with an expression.

        :param steps: of a call. If bulk.cu makes them, it is what is loaded, with copy.cu.
        :param parts: the most parts of a list; 0 for single arrays.
        """
        kernels = plan.kernels(self._workspace.n, self.algorithm, self.table)
        if not parts and expression is None:
            kernels |= self.further_kernels
        dtype, ops = _compiled_as(kind, expression), OPS if expression is None else (op,)
        if any(step.algorithm == plan.BULK for step in steps):
            copies = {_copy_kernel(kind, parts, one) for one in (None, expression)}
            self.kernels.load([*copies, *(Kernel(plan.BULK, reduced_as(kind), one) for one in ops)])
            return
        self.kernels.load(Kernel(name, dtype, one, depth, parts, expression) for name, depth in kernels for one in ops)

    # ---- with a norm
    def fused(self, request: Request, planned: norm_plan.NormPlan | None = None) -> Prepared | None:
        """An all-reduce with RMSNorm of aligned rows as one kernel; None if it needs a pair of them.

        :param planned: another plan than :meth:`norm_plan` gives.
        """
        shape: NormShape = request.epilogue
        planned = planned or self.norm_plan(shape)
        if planned is None:
            return None

        def kernel(name: str, cluster: int, depth: int) -> Kernel:
            return Kernel(name, shape.dtype, depth=depth, scale=SCALES.index(shape.scales), cluster=cluster)

        wanted = kernel(planned.kernel, planned.cluster, planned.depth)
        # All that rows of this length need are loaded at once, because loading waits for all work on the device.
        variants = norm_plan.variants(shape, self.gpus, self._forced_norm, self.norm_table)
        self.kernels.load([wanted, *(kernel(*variant) for variant in sorted(variants))])
        args = self._arguments(plan.code_offset(shape.dtype, "norm"), table=arguments.norm_table(shape))
        launch = self.kernels.launch(wanted, planned.grid, planned.block, args)
        step = KernelStep(launch, arguments.norm_setter(args.data, arguments.ARG_WORDS, shape))
        return _prepared(request, [step], [planned.kernel], plan.PACKET_BYTES)

    def norm_plan(self, shape: NormShape) -> norm_plan.NormPlan | None:
        """:func:`norm_plan.make_plan` for this communicator."""
        return norm_plan.make_plan(shape, self.gpus, self._forced_norm, self.norm_table)

    # ---- tests and measurements of the links
    def load_verify(self) -> None:
        """Compile and load the kernel of :meth:`verify`."""
        if self._workspace.n > 1:
            self.kernels.load([_VERIFY])

    def verify(self, rounds: int, seconds: float) -> np.ndarray[Any, Any]:
        """Exchange data with each rank ``rounds`` times.

        :returns: the verdicts of verify.cu by rank, uint32 of shape ``(8,)``.
        """
        verdict = np.zeros(plan.MAX_RANKS, np.uint32)
        if self._workspace.n > 1:
            args = self._arguments(0, rounds)
            args[OUT], args[TIMEOUT] = self._workspace.address, int(seconds * 1e9)  # there it is not in use yet
            driver.Launch(self.kernels.function(_VERIFY), self._workspace.n - 1, 32, args).run(DEFAULT_STREAM)
            driver.synchronize()
            driver.copy_to_host(verdict, self._workspace.address)
        return verdict

    def limit(self, nbytes: int, grid: int, block: int) -> driver.Launch:
        """A launch of limit.cu for bench: ``nbytes`` bytes to each peer, for which the workspace must have room."""
        return self.kernels.launch(_LIMIT, grid, block, self._arguments(0, nbytes))


def _setter(launch: driver.Launch, step: plan.LaunchPlan, request: Request) -> arguments.Setter:
    """A function that sets the addresses of a call on one array, in a launch that writes its result."""
    ((_, kind),) = request.members
    if request.epilogue is None:
        return arguments.plain_setter(launch.args.data, step.offset)
    itemsize = KINDS[kind].itemsize
    return arguments.map_setter(launch.args.data, step.offset, itemsize, request.epilogue, behind=False)


def _copy_kernel(kind: str, parts: int = 0, expression: Expression | None = None) -> Kernel:
    return Kernel("copy", _compiled_as(kind, expression), parts=parts, expression=expression, alone=True)


def _compiled_as(kind: str, expression: Expression | None) -> str:
    return reduced_as(kind) if expression is None else kind


def _prepared(request: Request, steps: Sequence[Step], kernels: Sequence[str] = (), alignment: int = 0) -> Prepared:
    """``kernels``: that of each step that exchanges packets."""
    return Prepared(
        request=request, fingerprint=request.fingerprint.made_by(len(kernels)),
        kernels=", ".join(dict.fromkeys(kernels)) or "nothing", nbytes=request.nbytes, steps=tuple(steps),
        wire_dtypes=(None,) * len(request.members), alignment=alignment,
    )  # fmt: skip


# ---- a world of one rank
def _alone(request: Request) -> Prepared:
    copy = partial(_copy_list, [one.nbytes for one in request.members]) if request.is_list else None
    return _prepared(request, [OwnStep(copy or partial(_copy, request.nbytes))])


def _copy(nbytes: int, addresses: Sequence[int], stream: Stream) -> None:
    source, target = addresses
    if target != source and nbytes:
        cupy_runtime.copy(target, source, nbytes, stream)


def _copy_list(nbytes: Sequence[int], places: Places, stream: Stream) -> None:
    for one, pair in zip(nbytes, pairs_of(places), strict=True):
        _copy(one, pair, stream)
