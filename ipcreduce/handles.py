"""Integer types of their own for handles that are easily taken for each other in a signature."""

from __future__ import annotations

from typing import NewType

Stream = NewType("Stream", int)  # a cudaStream_t; 0 and 1 are the legacy default stream, 2 the per-thread one
Event = NewType("Event", int)  # a cudaEvent_t
DEFAULT_STREAM = Stream(0)
