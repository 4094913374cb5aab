"""The fast path: repeated eager calls and replays, which have only to be compared with the peers' and launched.

Whatever takes more (another stream, a fault to settle, arrays of another kind) takes the usual path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from sys import modules
from typing import Any

from ..arrays.lists import ListCall
from ..arrays.maps import MapCall
from ..arrays.norms import NormCall
from ..arrays.plain import PlainCall
from ..arrays.splits import SplitCall
from ..calls import call_lock
from ..calls.sequence import CallSequence
from ..cuda import cupy_runtime, driver, torch_runtime
from ..cuda.contexts import using
from ..errors import CaptureError, CudaError, IpcReduceError
from ..page.control_page import Page
from ..page.flight_recorder import RING
from ..types import Stream
from .hits.lists import ListHits
from .hits.maps import MapHits
from .hits.norms import NormHits
from .hits.plain import PlainHits
from .hits.splits import SplitHits
from .last_call import ON_STREAM, RESTING
from .launch_cache import Found, LaunchCache
from .prepared import BoundLaunch
from .stream_order import IN_A_CAPTURE, StreamOrder

Lookup = Callable[[Any, Any, Any, Any], Found]
_CAPTURING = (900, 905)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, _ISOLATION: for an event from outside


class FastPath:
    """The repeated calls on one backend. :meth:`make` takes the communicator's lock, and holds it around the rest.

    It makes replays, and the eager calls that have a launch: those on contiguous CuPy arrays or PyTorch tensors, of
    shapes, dtypes and op that came before.

    :ivar lookup: looks up a call on an array or a list, ``lookup_map`` one with an expression, ``lookup_norm`` one with
        RMSNorm, and ``lookup_split`` one that is not an all-reduce.
    """

    def __init__(
        self, calls: CallSequence, device: int, context: int, order: StreamOrder, page: Page, cache: LaunchCache
    ) -> None:  # fmt: skip
        self._calls, self._device, self._context, self._order = calls, device, context, order
        self._abort_word, self._recorder = page.abort_word, page.calls
        lists, maps, norms = ListHits(cache), MapHits(cache), NormHits(cache)
        plain = PlainHits(cache, lists)
        splits = SplitHits(cache, lists, page.rank, page.n)
        cache.kinds |= {PlainCall: plain, ListCall: lists, MapCall: maps, NormCall: norms, SplitCall: splits}
        self.lookup, self.lookup_map = plain.lookup, maps.lookup
        self.lookup_norm, self.lookup_split = norms.lookup, splits.lookup
        ring = page.calls  # these objects are never replaced; only their contents change
        self._recorder_parts = ring.recorded, ring.number, ring.slots, ring.agreed

    def make(
        self, bound: BoundLaunch | None, usual: Callable[[Any, Any, Any, Any], Any],
        array: Any = None, op: Any = None, out: Any = None, stream: Any = None, lookup: Lookup | None = None,
    ) -> Any:  # fmt: skip
        """Make one call under the lock: launch ``bound``, or the eager call of these arguments; else by ``usual``.

        The hot path of every call. It repeats parts of :class:`CallSequence` inline, to save function calls: each takes
        up to 0.1 us, a ``with`` block 0.13, ``*args`` 0.06.

        :param usual: takes the other arguments, which a replay leaves out.
        :param lookup: looks up the eager call; None for :attr:`lookup`.
        :returns: the result of the eager call, or of ``usual``; True for ``bound``.
        """
        calls = self._calls
        try:
            calls.lock.acquire()  # here, so that an interrupt after it still releases the lock
            if calls.within or calls.nested:
                call_lock.make_way(calls)
            if calls.unusable is not None:
                calls.check_usable()
            try:
                calls.within = True
                calls.number = number = calls.number + 1
                result: Any = True
                current: Any = None
                if bound is None:
                    if calls.recording is None:
                        bound, result, current = (lookup or self.lookup)(array, op, out, stream)
                else:  # current_streams.stream_of() does the same
                    current = cupy_runtime.get_current_stream().ptr
                    if not current and (torch_runtime.get_stream or ("torch" in modules and torch_runtime.works())):
                        current = torch_runtime.get_stream(self._device)
                if bound is None or not self._launch(bound, number, current, out is None):
                    return usual(array, op, out, stream)
                return result
            except BaseException as error:
                try:
                    calls.fail(error)
                except IpcReduceError:
                    raise
                except BaseException:
                    calls.nested.insert(0, partial(call_lock.fail_late, calls, error))
                    raise
                raise
            finally:
                calls.within = False
                if calls.nested:
                    call_lock.tell_nested(calls)
        finally:
            try:  # noqa: SIM105  (suppress() takes 0.3 us)
                calls.lock.release()
            except RuntimeError:  # interrupted before we had it
                pass

    def _launch(self, bound: BoundLaunch, number: int, stream: Stream, looked: bool) -> bool:
        """Record call ``number``, as :meth:`FlightRecorder.enter` does, and launch it. False if it has to be ``usual``.

        :param looked: see :meth:`StreamOrder.quick`. For a new result the look-up has looked before it allocated
            that. For a replay nobody has to look, which would take 0.2 us: the driver refuses the launch of
            a graph in a capture.
        """
        order, argument = self._order, bound.argument
        if not argument or self._abort_word[0]:
            return False
        state = order.quick(stream, looked)
        if state is None:
            return False
        recorded, number_word, slots, agreed = self._recorder_parts
        fingerprint = bound.fingerprint
        slot = number % RING
        if recorded[slot] is not fingerprint:
            self._recorder.write(slot, fingerprint)
        number_word[0] = number
        if slots[slot] != agreed[fingerprint.crc] and self._recorder.differing(number) is not None:
            return False
        if state is RESTING:
            order.resume()
            state = ON_STREAM
        try:
            if state is ON_STREAM:
                bound.launch(bound.argument, stream)  # 0 by now if another thread closed the graph
            else:
                order.launch_shared(partial(bound.launch, bound.argument), stream)
        except RuntimeError as error:
            start: Callable[[Stream], Any] = partial(bound.launch, argument)
            self._launch_anyway(start if state is ON_STREAM else partial(order.launch_shared, start), stream, error)
        order.launched = number
        return True

    def _launch_anyway(self, start: Callable[[Stream], Any], stream: Stream, error: Exception) -> None:
        """Launch in our context, if the error was for want of that. :raises CudaError: if not, or CaptureError."""
        error = cupy_runtime.runtime_error("cudaGraphLaunch", error)
        wants_ours = isinstance(error, CudaError) and error.code in driver.INVALID_CONTEXT
        if wants_ours and driver.current_context() != self._context:
            try:
                with using(self._context):  # this thread has another one, or none
                    start(stream)
                return
            except RuntimeError as again:
                error = cupy_runtime.runtime_error("cudaGraphLaunch", again)
        if isinstance(error, CudaError) and error.code in _CAPTURING:
            raise CaptureError(IN_A_CAPTURE) from error
        raise error
