"""A graph in words, for ``describe()`` and ``repr()``."""

from __future__ import annotations

from collections.abc import Sequence

from .breaks import Break
from .pool import GraphPool
from .recording import Segment


def describe(name: str, state: str, pool: GraphPool | None, parts: Sequence[Segment | Break]) -> str:
    """Several lines: see :meth:`Graph.describe`."""
    segments = sum(isinstance(part, Segment) for part in parts)
    lines = [f"graph {name}: {state}, {segments} segments".replace(" :", ":")]
    if pool is not None:
        lines.append(f"pool: {pool.nbytes} bytes in {pool.slabs} slabs")
    for part in parts:
        if isinstance(part, Break):
            lines.append(f"break: {part}")
        else:
            lines.append(f"segment: {part.nodes.kernels} kernel nodes, {part.nodes.others} other nodes")
            lines += [f"  all-reduce: {call}" for call in part.calls]
    return "\n".join(lines)


def one_line(name: str, state: str, parts: Sequence[Segment | Break]) -> str:
    """Name, state, and the numbers of segments and all-reduces."""
    segments = [part for part in parts if isinstance(part, Segment)]
    calls = sum(len(segment.calls) for segment in segments)
    text = f", {calls} all-reduces in {len(segments)} segments" if segments else ""
    return f"<Graph{f' {name!r}' if name else ''}: {state}{text}>"
