"""Eager breaks: functions that run between the segments of a graph, at the recording and at every replay."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from ..arrays import views
from ..cuda import array_protocols, cupy_runtime, current_streams, torch_runtime
from ..errors import ArgumentError, CaptureError
from ..texts import kind_of
from ..types import Stream
from .nests import holders, objects, rebuilt
from .pool import GraphPool
from .recording import in_pool

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)


class _Current(threading.local):
    graph: Any = None  # the Graph whose body this thread executes; None within a break
    rehearsing = False  # see rehearsing(); False within a break


current = _Current()
open_recordings: list[Any] = []  # of all threads: each replay looks here first, as reading ``current`` takes 0.1 us


def check_task() -> None:
    """Check that no other asyncio task of this thread records. :raises CaptureError: if one does."""
    if current.graph is not None:
        current.graph.check_task()


def eager_break(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function to run eagerly, between two segments, when it is called within a graph's recording.

    Each replay calls the function again with the arguments of the recording. Outside of a recording, and in one with
    ``breaks=False``, a call is a plain call. This must be the outermost decorator. A wrapper outside of it is not part
    of the break: its work on the host is done only at the recording, and its work on the GPU is captured.

    The function may write its results into arrays that it receives, or return one of these:

    - a device array: the caller gets a CuPy array into which each replay copies, so shape and dtype must not change.
      For one of its arguments that is this very array, also for a replay that returns another one, or another view;
    - a scalar: the caller keeps the recording's value;
    - None.

    Join work on side streams before the break: record an event there, and let the recording's stream wait for it. To
    continue there after the break, record a new event on the recording's stream, and let the side stream wait for that
    one. An event from before the break belongs to the segment that has ended.

    :raises CaptureError: from a call within a recording, or within a runner's function on a communicator without GPUs,
        if the function returns anything else. NumPy arrays are then allowed.
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        graph = current.graph
        if graph is None:
            return _rehearsed(function, args, kwargs) if current.rehearsing else function(*args, **kwargs)
        return cast("_T", graph.add_break(function, args, kwargs))

    return wrapper


@contextmanager
def rehearsing(breaks: bool) -> Iterator[None]:
    """Make calls of decorated functions plain ones in the block, and check that a recording would take their results.

    :param breaks: False in place of a recording that has no breaks: nothing is checked.
    """
    before, current.rehearsing = current.rehearsing, breaks
    try:
        yield
    finally:
        current.rehearsing = before


def _rehearsed(function: Callable[_P, _T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _T:
    with rehearsing(False):
        result = function(*args, **kwargs)
    kind = type(result)
    if not isinstance(result, _SCALARS) and not any(hasattr(kind, name) for name in array_protocols.PROTOCOLS):
        raise _cannot_return(_name(function), result, "an array")
    return result


class Break:
    """One call of a function between two segments."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pool: GraphPool
    ) -> None:
        self._function, self._name, self._pool = function, _name(function), pool
        given = args, kwargs

        def ours(one: Any) -> bool:
            return views.is_cupy(one) and in_pool(one, pool)

        self._args, self._kwargs = without_blocks(given, pool, holders(given, ours))
        self._output: Any = None  # the array returned to the body, if any

    def __str__(self) -> str:
        return self._name

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Stream) -> Any:
        """Call the function at the recording. Returns the result to give to the body.

        :param stream: the current stream.
        :raises CaptureError: if the result is not a device array, a scalar or None.
        """
        result = self._function(*args, **kwargs)
        if isinstance(result, _SCALARS):
            return result
        fresh = self._array(result, stream)
        given = any(one is result for one in objects([args, kwargs]))
        if given or in_pool(fresh, self._pool):  # its address stays valid
            output = result
        else:
            with cupy_runtime.allocating(self._pool.allocator, stream):
                output = views.empty(fresh.shape, fresh.dtype, stream, views.device_of(fresh))
            views.copy_into(output, fresh, stream)
        self._output = without_blocks(views.view(output, stream), self._pool)
        return (
            torch_runtime.over(output, result) if output is not result and torch_runtime.is_tensor(result) else output
        )

    def replay(self, stream: Stream) -> None:
        """Call the function again, with ``stream`` current, and copy its result into the recording's.

        :raises ArgumentError: if the result's shape or dtype differs from the recording's.
        :raises CaptureError: if the result is no longer a device array.
        """
        with current_streams.on_stream(stream, self._pool.device):
            result = self._function(*self._args, **self._kwargs)
            if self._output is None:
                return
            found, due = self._array(result, stream), self._output
            if found.shape != due.shape or found.dtype != due.dtype:
                raise ArgumentError(
                    f"the break {self._name} returned {found.dtype} {found.shape}, but {due.dtype} {due.shape} at the "
                    "recording. Record another graph for other shapes"
                )
            views.copy_into(due, found, stream)

    def _array(self, result: Any, stream: Stream) -> Any:
        refusal = None
        try:
            if views.is_device(result, "what a break returns"):
                return views.view(result, stream)
        except ArgumentError as error:
            refusal = error
        raise _cannot_return(self._name, result, "a device array") from refusal


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _cannot_return(name: str, result: Any, array: str) -> CaptureError:
    return CaptureError(
        f"the break {name} returned {kind_of(result)}. It may return {array}, a scalar or None. Let it "
        "write other results into arrays that it receives"
    )


def without_blocks(nest: Any, pool: GraphPool, only: Collection[int] | None = None) -> Any:
    """Replace the pool's arrays in ``nest``, also in lists, tuples and dicts, by views that do not own their block.

    The block may be reused: later segments do so at each replay, as at the recording. The memory stays allocated as
    long as the view, whatever becomes of the graph.

    :param only: see :func:`rebuilt`.
    """

    def leaf(value: Any) -> Any:
        if not views.is_cupy(value):
            return value
        first, past = views.extent(value)
        hold = pool.hold(first, past - first)
        return value if hold is None else views.view_of(value, hold)

    return rebuilt(nest, leaf, only)
