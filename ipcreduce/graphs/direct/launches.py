"""Direct launches, and the recorded launches that they replace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...calls.request import Request
from ...cuda import streams
from ...cuda.driver import Launch
from ...device.arguments import IN, OUT, OUTS
from ...device.prepared import KernelStep, Prepared, Step
from ...ipc.launches import Launches
from ...ipc.plan import KB, PACKET_BYTES, Gpus, LaunchPlan
from ...types import Stream

ALGORITHM = "direct"


def direct(step: LaunchPlan, gpus: Gpus) -> LaunchPlan:
    """The direct launch that replaces a staged one, once the peers have mapped the output.

    It is never the default: over 2 and 4 H200 staged launches are as fast or faster at every size (NOTES.md).
    """
    n, resident = gpus.n, min(gpus.resident, gpus.most_blocks)
    width = -(-step.nbytes // PACKET_BYTES // n)
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
    request: Request
    source: int
    target: int


@dataclass(frozen=True)
class _Noted(Step):
    """A step that also adds itself to ``launched`` when it is captured."""

    step: KernelStep
    request: Request
    launched: list[Launched]

    def start(self, addresses: Any, stream: Stream) -> None:
        self.step.start(addresses, stream)
        (node,) = streams.capture_nodes(stream)  # a launch leaves one node for the next to follow
        words = self.step.launch.args
        self.launched.append(Launched(node, self.step.plan, self.request, int(words[IN]), int(words[OUT])))


def noted(prepared: Prepared, launched: list[Launched]) -> Prepared:
    """A copy of a prepared call that adds its launches to ``launched`` when they are captured.

    Only plain all-reduces of one array can be direct. Other calls stay as they are.
    """
    request = prepared.request
    if request != request.without_epilogue() or request.is_list or request.sms is not None or request.split:
        return prepared
    notes = (_Noted(one, request, launched) if isinstance(one, KernelStep) else one for one in prepared.steps)
    return replace(prepared, steps=tuple(notes))


def launch_to(launches: Launches, launched: Launched, step: LaunchPlan, outputs: list[int]) -> Launch:
    """Make the direct launch ``step``, which takes the place of a recorded one.

    :param outputs: the addresses of the output on this rank and on the next ones, as they are mapped here.
    """
    ((_, kind),) = launched.request.members
    launch = launches.launch(step, kind, launched.request.op)
    launch.args[IN], launch.args[OUT] = launched.source, outputs[0]
    launch.args[OUTS : OUTS + len(outputs)] = outputs
    return launch
