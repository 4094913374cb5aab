"""The current streams of CuPy and, if the program has imported it, of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..types import Stream
from . import cupy_runtime, torch_runtime


def stream_of(device: int, stream: Any = None) -> tuple[Stream, Any]:
    """The handle of a stream, and the object that keeps it valid: see :func:`cupy_runtime.stream_of`.

    :param stream: None stands for CuPy's current stream. If that is the default stream, it stands for PyTorch's.
    :raises ArgumentError: if ``stream`` is not a stream.
    """
    handle, owner = cupy_runtime.stream_of(stream)
    if stream is None and not handle and torch_runtime.works():
        return torch_runtime.current_stream(device)
    return handle, owner


def streams(device: int) -> list[Stream]:
    """The current streams of both libraries, without repetition."""
    found = [cupy_runtime.stream_of()[0]]
    if torch_runtime.works():
        found.append(torch_runtime.stream_handle(device))
    return list(dict.fromkeys(found))


@contextmanager
def on_stream(stream: Stream, device: int) -> Iterator[None]:
    """Make a stream the current one of both libraries in the block."""
    with cupy_runtime.on_stream(stream), torch_runtime.on_stream(stream, device):
        yield
