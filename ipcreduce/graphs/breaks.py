"""Eager breaks: functions that run between the segments of a graph, at recording and at every replay."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from .. import arrays
from ..cuda import cupy_runtime
from ..errors import ArgumentError, CaptureError
from .pool import GraphPool
from .recording import in_pool

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)


class Breakable(Protocol):
    """A graph that is being recorded."""

    def add_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function between two segments; its result."""


class _Current(threading.local):
    graph: Breakable | None = None  # the one whose body this thread is in; None within a break


current = _Current()
open_recordings: list[Breakable] = []  # in all threads: asked on the way of every replay, where current takes 0.1 us


def eager_break(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function that is to run eagerly, between segments, where a graph is recorded around it.

    At each replay it is called again with the arguments of the recording; within a recording with ``breaks=False``,
    and outside of one, a call is a plain call. It must be the outermost decorator: what a wrapper outside of it does
    on the host is not part of the break, so it is done once, at recording, and what it does on the GPU is captured.

    The function writes its results into arrays that it gets, or returns a device array (the caller gets a CuPy array
    into which each replay copies; shape and dtype must stay), a scalar (that of the recording stays) or None.

    Work on side streams has to be joined before the break: record an event there, and let the recording's stream wait
    for it. To go on there after the break, record a new event on the recording's stream, and let the side stream wait
    for that: an event from before the break belongs to the segment that has ended.

    :raises CaptureError: from a call within a recording, if the function returns anything else.
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        graph = current.graph
        if graph is None:
            return function(*args, **kwargs)
        result: _T = graph.add_break(function, args, kwargs)
        return result

    return wrapper


class Break:
    """One call of a function between two segments."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pool: GraphPool
    ) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._args, self._kwargs = without_blocks(args, pool), without_blocks(kwargs, pool)
        self._pool = pool
        self._output: Any = None  # the array that the body got, if it got one

    def __str__(self) -> str:
        return self._name

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: int) -> Any:
        """The call of the recording, on ``stream``, which is current; what the body gets for its result.

        :raises CaptureError: if the function returns what cannot be kept.
        """
        result = self._function(*args, **kwargs)
        if isinstance(result, _SCALARS):
            return result
        fresh = self._array(result, stream)
        if _is_in(result, [args, kwargs]) or in_pool(fresh, self._pool):  # its place stays as it is
            output = result
        else:
            with cupy_runtime.allocating(self._pool.allocator, stream):
                output = arrays.empty(fresh.shape, fresh.dtype, stream, arrays.device_of(fresh))
            arrays.copy_into(output, fresh, stream)
        self._output = without_blocks(arrays.view(output, stream), self._pool)
        return output

    def replay(self, stream: int) -> None:
        """Another call, with ``stream`` current.

        :raises ArgumentError: if its result has not the shape and dtype of the recording's.
        :raises CaptureError: if it is no device array any more.
        """
        with cupy_runtime.on_stream(stream):
            result = self._function(*self._args, **self._kwargs)
            if self._output is None:
                return
            found, due = self._array(result, stream), self._output
            if found.shape != due.shape or found.dtype != due.dtype:
                raise ArgumentError(
                    f"the break {self._name} has to return {due.dtype} {due.shape}, as at the recording; found "
                    f"{found.dtype} {found.shape}. Record another graph for other shapes"
                )
            if arrays.pointer(found) != arrays.pointer(due):
                arrays.copy_into(due, found, stream)

    def _array(self, result: Any, stream: int) -> Any:
        try:
            if arrays.is_device(result, "what a break returns"):
                return arrays.view(result, stream)
        except ArgumentError:
            pass
        raise CaptureError(
            f"the break {self._name} returned a {type(result).__qualname__}: expected a device array, a scalar or "
            "None. Write other results into arrays that it gets"
        )


def _is_in(array: Any, value: Any) -> bool:
    if type(value) is dict:
        value = list(value.values())
    return value is array or (type(value) in (list, tuple) and any(_is_in(array, one) for one in value))


def without_blocks(value: Any, pool: GraphPool) -> Any:
    """``value`` with views in place of the pool's arrays: they keep the pool, but not the block from being used again.

    Later segments use it again at each replay, as they did when they were recorded. Looked into are lists, tuples and
    dicts.
    """
    if type(value) in (list, tuple):
        return type(value)(without_blocks(one, pool) for one in value)
    if type(value) is dict:
        return {key: without_blocks(one, pool) for key, one in value.items()}
    if arrays.is_cupy(value) and in_pool(value, pool):
        return arrays.view_of(value, pool)
    return value
