"""All-reduce of device arrays: prepares the launches of a call once, orders them behind each other, runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import surroundings
from ..cuda import compiler, driver, graph, streams
from ..errors import ArgumentError, CudaError
from . import plan
from .control import ABORT_OFFSET, HEAD_BYTES, REFUSED, Page, missing_offset
from .mappings import Mappings
from .order import CallOrder
from .release import attempt, forget, give_back_after
from .signature import Signature, signature
from .watchdog import Watchdog
from .workspace import Workspace

# Words of struct Args (exchange.cuh)
_IN, _OUT, _BYTES, _PEERS, _HALF = 0, 1, 2, 3, 11
_EPOCHS, _ABORT, _MISSING, _TIMEOUT, _TRIGGER = 12, 13, 14, 15, 16
_OUTS = 17
_ARG_WORDS = 25
_MAX_PREPARED = 4096

_registered_for_good: list[Page] = []  # still mapped: no later page may get addresses that cannot be registered


@dataclass(frozen=True)
class Prepared:
    """A call's launches, in order: each with its arguments and its offset in the message."""

    what: Signature
    dtype: str
    op: str
    launches: tuple[tuple[driver.Launch, memoryview, plan.Step], ...]
    nbytes: int


Recorder = Callable[[Prepared, plan.Step, int, int], None]  # of a launch: its call, step, source and target


class Engine:
    """What a communicator needs on one GPU. Made by :func:`ipcreduce.ipc.setup.start`.

    Not thread-safe: the communicator's lock is held around every method.
    """

    def __init__(
        self, device: driver.DeviceInfo, context: int, workspace: Workspace, page: Page, *,
        capability: tuple[int, int], timeout: float, algorithm: str | None,
    ) -> None:  # fmt: skip
        self.device, self.context, self.workspace, self.page = device, context, workspace, page
        self.rank, self.n = workspace.rank, workspace.n
        self.capability = capability
        self.whole_packets = True
        self.watchdog: Watchdog | None = None
        self.mappings = Mappings(page)
        self.algorithm = algorithm
        self._timeout = timeout
        self._control = driver.register_host(page.address, HEAD_BYTES)
        try:
            self.order = CallOrder()
        except CudaError:
            self._unregister()
            raise
        self._modules: list[int] = []
        self._functions: dict[tuple[str, str, str], int] = {}
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._recording_stream = 0

    def describe(self) -> list[str]:
        """Lines for people: GPU, workspace, packets."""
        return [
            f"GPU {self.device.ordinal}: {self.device.name}, {self.workspace.nbytes >> 20} MB of workspace",
            "packets arrive " + ("whole" if self.whole_packets else "in halves of 8 bytes"),
        ]

    # ---- preparing
    def find(self, shape: tuple[int, ...], dtype: np.dtype[Any], op: str) -> Prepared | None:
        """The launches of a call that :meth:`prepare` has seen."""
        return self._prepared.get((shape, dtype, op))

    def prepare(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str, op: str, nbytes: int) -> Prepared:
        """The launches of an all-reduce of ``nbytes`` bytes of ``dtype`` (called ``name``), compiled if need be.

        :raises IpcReduceError: if a kernel does not compile. :raises CudaError: if it does not load.
        """
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        steps = plan.make_plan(nbytes, self.n, self.workspace.half_bytes, self.algorithm)
        launches = tuple((*self._launch(step, name, op), step) for step in steps)
        prepared = Prepared(signature(shape, name, op), name, op, launches, nbytes)
        self._prepared[shape, dtype, op] = prepared
        return prepared

    def _launch(self, step: plan.Step, dtype: str, op: str) -> tuple[driver.Launch, memoryview]:
        args = self._arguments(plan.code_offset(dtype, op))
        args[_BYTES], args[_TRIGGER] = step.nbytes, step.trigger_early
        programmatic = self.capability >= (9, 0)
        function = self._function(step.algorithm, dtype, op)
        return driver.Launch(function, step.grid, step.block, args, programmatic=programmatic), args.data

    def direct(self, step: plan.Step, dtype: str, op: str, source: int, outputs: list[int]) -> driver.Launch:
        """A direct launch: from address ``source`` to ``outputs``, by rank from this one's on, as mapped here."""
        launch, words = self._launch(step, dtype, op)
        words[_IN], words[_OUT] = source, outputs[0]
        words[_OUTS : _OUTS + self.n] = memoryview(np.array(outputs, np.uint64).data)
        return launch

    def _arguments(self, offset: int) -> np.ndarray[Any, Any]:
        args = np.zeros(_ARG_WORDS, np.uint64)
        args[_PEERS : _PEERS + self.n] = [peer + offset for peer in self.workspace.peers]
        args[_HALF], args[_EPOCHS] = self.workspace.half_bytes, self.workspace.epochs
        args[_ABORT], args[_MISSING] = self._control + ABORT_OFFSET, self._control + missing_offset(self.rank)
        args[_TIMEOUT] = int(self._timeout * 1e9)
        return args

    def _function(self, kernel: str, dtype: str, op: str) -> int:
        key = (kernel, dtype, op)
        if key not in self._functions:
            macros = {
                "IPCREDUCE_RANKS": str(self.n),
                "IPCREDUCE_RANK": str(self.rank),
                "IPCREDUCE_DTYPE": dtype,
                "IPCREDUCE_OP": op,
                "IPCREDUCE_WHOLE_PACKETS": str(int(self.whole_packets)),
            }
            cubin = compiler.compile_kernel(kernel, macros, self.capability)
            module = driver.load_module(cubin)
            self._modules.append(module)
            self._functions[key] = driver.get_function(module, kernel)
        return self._functions[key]

    def verify(self, rounds: int, seconds: float) -> np.ndarray[Any, Any]:
        """What arrived from each rank in ``rounds`` exchanges: verify.cu's verdicts, shape ``(8,)``, uint32."""
        verdict = np.zeros(plan.MAX_RANKS, np.uint32)
        if self.n > 1:
            args = self._arguments(0)
            args[_OUT] = self.workspace.epochs  # not in use yet
            args[_BYTES], args[_TIMEOUT] = rounds, int(seconds * 1e9)
            function = self._function("verify", "int32", "sum")
            driver.Launch(function, self.n - 1, 32, args).run(0)
            driver.synchronize()
            driver.copy_to_host(verdict, self.workspace.epochs)
        return verdict

    # ---- running
    def repeat(self, call: int, array: Any, op: Any, out: Any) -> Any:
        """A call like an earlier one, on the stream of the last one, with contiguous CuPy arrays; its result.

        Only quicker than the way that every call can take (:meth:`Communicator.allreduce`): for that, None and nothing
        done. So the arrays' attributes are read here, and not through arrays.py.
        """
        cupy = surroundings.cupy
        if cupy is None or type(array) is not cupy.ndarray or type(op) is not str or not array._c_contiguous:
            return None
        shape, dtype, place, device = array.shape, array.dtype, array.data, self.device.ordinal
        prepared = self._prepared.get((shape, dtype, op))
        stream = cupy.cuda.get_current_stream().ptr
        if prepared is None or not prepared.launches or stream != self.order.fast or place.device_id != device:
            return None
        source = target = place.ptr
        if out is not array:
            if out is None:
                out = cupy.empty(shape, dtype)
            elif type(out) is not cupy.ndarray or out.shape != shape or out.dtype != dtype or not out._c_contiguous:
                return None
            place = out.data
            target = place.ptr
            if place.device_id != device or abs(target - source) < prepared.nbytes:
                return None
        if (source | target) % dtype.itemsize or self.page.abort_word[0]:
            return None
        if self.page.enter(call, prepared.what, stream) is not None:
            return None
        self.run(prepared, source, target, stream, None)
        return out

    def run(
        self, prepared: Prepared, source: int, target: int, stream: int, owner: Any, recorder: Recorder | None = None
    ) -> None:
        """Launches an all-reduce from address ``source`` to ``target`` (the same: in place) on ``stream``.

        :param owner: see :meth:`CallOrder.follow`.
        :param recorder: is told of every launch.
        :raises CudaError: if a launch fails.
        """
        try:
            end = self.order.follow(stream, owner) if stream != self.order.fast else 0
            for launch, words, step in prepared.launches:
                words[_IN], words[_OUT] = source + step.offset, target + step.offset
                launch.run(stream)
                if recorder is not None:
                    recorder(prepared, step, source, target)
            if end:
                streams.record_event(end, stream)
        except CudaError as error:
            with self._own_context(error):
                self.run(prepared, source, target, stream, owner, recorder)

    def launch_graph(self, executable: graph.Executable, stream: int, owner: Any) -> None:
        """Launches an executable graph on ``stream``, behind the last call. :raises CudaError: if that fails."""
        try:
            end = self.order.follow(stream, owner) if stream != self.order.fast else 0
            executable.launch(stream)
            if end:
                streams.record_event(end, stream)
        except CudaError as error:
            with self._own_context(error):
                self.launch_graph(executable, stream, owner)

    @contextmanager
    def _own_context(self, error: CudaError) -> Iterator[None]:
        """For another try, if ``error`` came because this thread has another context, or none. Else raises it."""
        current = driver.current_context()
        if error.code not in driver.INVALID_CONTEXT or current == self.context:
            raise error
        driver.set_context(self.context)
        try:
            yield
        finally:
            with suppress(CudaError):  # the work is launched
                driver.set_context(current)

    def is_capturing(self, stream: int) -> bool:
        """Whether ``stream`` is part of a capture: its work does not run yet."""
        return streams.capture_id(stream) != 0

    def use_context(self) -> None:
        """Makes our context current in a thread that has none. :raises ArgumentError: if it has another one."""
        if not driver.current_context():
            driver.set_context(self.context)
        elif driver.current_context() != self.context:
            raise ArgumentError(f"record() needs the communicator's GPU {self.device.ordinal} to be the current one")

    def recording_stream(self) -> int:
        """The one stream of all recordings: CuPy's pools keep their memory apart by stream."""
        if not self._recording_stream:
            self._recording_stream = streams.create_stream()
        return self._recording_stream

    # ---- ends
    def quiesce(self) -> None:
        """Waits until no kernel of ours runs, on whatever stream. The abort word is up, so it takes 0.1 s at most."""
        driver.set_context(self.context)
        driver.synchronize()
        self.order.forget()

    def reset(self) -> None:
        """After every rank's :meth:`quiesce`: empty slots, fresh epochs, no fault."""
        with driver.relaxed():
            self.workspace.reset()
        self.page.clear()

    def close(self, wait: float) -> None:
        """Unmaps the peers, waits up to ``wait`` seconds until they have unmapped us, and frees everything.

        Memory that a live peer still maps is freed later: see release.py.
        """
        deadline = time.monotonic() + wait
        attempt(self.context, lambda: self._stop(deadline))
        forget(self.order)
        attempt(self.context, self.workspace.unmap_peers, self.mappings.unmap_all)
        self.page.leave()
        while not self._unmapped() and time.monotonic() < deadline:
            time.sleep(1e-3)
        self.release()
        leave = partial(driver.release_context, self.device.ordinal)
        give_back_after(self._unmapped, self.context, self.mappings.release_all, self.workspace.free, leave)

    def _unmapped(self) -> bool:
        """Whether no other process can reach our memory any more."""
        return all(self.page.has_unmapped(rank) for rank in range(self.n) if rank != self.rank)

    def _stop(self, deadline: float) -> None:
        """Waits for our kernels; those that wait for a peer beyond the deadline are ended."""
        if not self.order.ends_by(deadline):
            self.page.post(REFUSED, self.page.call_of(self.rank), "it closed the communicator")
        self.quiesce()

    def release(self) -> None:
        """Gives back what only this process uses."""
        if self.watchdog is not None:
            self.watchdog.stop()
        steps: list[Callable[[], None]] = [self._unregister, self.order.release]
        if self._recording_stream:
            steps.append(partial(streams.destroy_stream, self._recording_stream))
        attempt(self.context, *steps, *(partial(driver.unload_module, module) for module in self._modules))
        self._modules.clear()

    def _unregister(self) -> None:
        try:
            driver.unregister_host(self.page.address)
        except CudaError:
            _registered_for_good.append(self.page)
            raise
