"""Direct launches, and the recorded launches that they replace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...cuda import streams
from ...cuda.driver import Launch
from ...ipc.launches import IN, OUT, Launches, PreparedCall
from ...ipc.plan import KB, PACKET_BYTES, RESIDENT, LaunchPlan, most_blocks
from ...types import Stream

ALGORITHM = "direct"
OUTS = 16  # the first word of the outputs in struct Args (packets.cuh)


def direct(step: LaunchPlan, n: int, resident: int = RESIDENT, sharing: int = 1) -> LaunchPlan:
    """The direct launch that replaces a staged one, once the peers have mapped the output.

    It is never the default: over 2 and 4 H200 staged launches are as fast or faster at every size (NOTES.md).
    """
    width, resident = -(-step.nbytes // PACKET_BYTES // n), min(resident, most_blocks(resident, sharing))
    grid, block = (resident, 512) if n == 2 and width > 256 * KB else (-(-resident // 2), 256)  # in tiles
    return LaunchPlan(ALGORITHM, step.offset, step.nbytes, min(grid, -(-width // block)), block, depth(n))


def depth(n: int) -> int:
    """The number of columns that a thread takes at a time."""
    return 4 if n == 2 else 1


@dataclass
class Launched:
    """One launch of a recorded all-reduce: the graph's node, its plan, and the addresses of its part of the message."""

    node: int
    part: LaunchPlan
    prepared: PreparedCall
    source: int
    target: int


@dataclass(frozen=True)
class _Noted:
    """A launch that also adds itself to ``launched`` when it is captured."""

    launch: Launch
    words: memoryview
    part: LaunchPlan
    prepared: PreparedCall
    launched: list[Launched]

    def run(self, stream: Stream) -> None:
        self.launch.run(stream)
        (node,) = streams.capture_nodes(stream)  # a launch leaves one node for the next to follow
        self.launched.append(Launched(node, self.part, self.prepared, self.words[IN], self.words[OUT]))


def noted(prepared: PreparedCall, launched: list[Launched]) -> PreparedCall:
    """A copy of a prepared call that adds its launches to ``launched`` when they are captured."""
    notes: Any = (_Noted(*one, prepared, launched) for one in prepared.launches)
    return replace(prepared, launches=tuple((note, note.words, note.part) for note in notes))


def launch_to(launches: Launches, launched: Launched, step: LaunchPlan, outputs: list[int]) -> Launch:
    """Make the direct launch ``step``, which takes the place of a recorded one.

    :param outputs: the addresses of the output on this rank and on the next ones, as they are mapped here.
    """
    launch, words = launches.launch(step, launched.prepared.dtype, launched.prepared.op)
    words[IN], words[OUT] = launched.source, outputs[0]
    words[OUTS : OUTS + len(outputs)] = memoryview(np.array(outputs, np.uint64).data)
    return launch
