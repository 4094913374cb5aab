"""The streams of an array library, for tests of the launch cache: their handles are numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ipcreduce.errors import ArgumentError

CURRENT, OTHER = 8, 9


class Streams:
    """What ``cupy_runtime`` has of streams. The current one is CURRENT."""

    def stream_handle(self, device: int) -> int:
        return CURRENT

    def get_current_stream(self) -> Any:
        return SimpleNamespace(ptr=CURRENT)

    def stream_of(self, stream: Any) -> tuple[int, Any]:
        if not isinstance(stream, int):
            raise ArgumentError("no stream")
        return stream, stream
