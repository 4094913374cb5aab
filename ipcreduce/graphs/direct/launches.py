"""The launches of recorded all-reduces, with all that a direct kernel in the place of one needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ...cuda import streams
from ...cuda.driver import Launch
from ...ipc.launches import IN, OUT, Launches, PreparedCall
from ...ipc.plan import LaunchPlan
from ...types import Stream

OUTS = 16  # the first word of the outputs in struct Args (packets.cuh)


@dataclass
class Launched:
    """One launch of a recorded all-reduce: the graph's node, its plan, and the addresses of its part of the message."""

    node: int
    part: LaunchPlan
    dtype: str
    op: str
    source: int
    target: int


class _Noted:
    """A launch that also notes the node that it becomes in a capture."""

    def __init__(self, launch: Launch, note: Callable[[int], object]) -> None:
        self._launch, self._note = launch, note

    def run(self, stream: Stream) -> None:
        self._launch.run(stream)
        (node,) = streams.capture_nodes(stream)  # a launch leaves one node for the next to follow
        self._note(node)


def noted(prepared: PreparedCall, launched: list[Launched]) -> PreparedCall:
    """The same call, whose launches are added to ``launched`` when they are captured."""

    def one(launch: Launch, words: memoryview, part: LaunchPlan) -> Any:
        def note(node: int) -> None:
            launched.append(Launched(node, part, prepared.dtype, prepared.op, words[IN], words[OUT]))

        return cast("Launch", _Noted(launch, note)), words, part

    return replace(prepared, launches=tuple(one(*launch) for launch in prepared.launches))


def launch_to(launches: Launches, launched: Launched, step: LaunchPlan, outputs: list[int]) -> Launch:
    """The direct launch ``step`` in the place of a recorded one.

    :param outputs: the addresses of the output on this rank and on the next ones, as they are mapped here.
    """
    launch, words = launches.launch(step, launched.dtype, launched.op)
    words[IN], words[OUT] = launched.source, outputs[0]
    words[OUTS : OUTS + len(outputs)] = memoryview(np.array(outputs, np.uint64).data)
    return launch
