"""A stand-in for a server. Run it by ``mpirun -n 2 python tests/mpi/serving_worker.py``.

It makes and calls the class as vLLM and SGLang do: eagerly, in captures of several batch sizes with a warm-up each, and
in replays. Without GPUs its graphs are lists of the calls. Every rank prints "right".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from ipcreduce import ArgumentError, UnsupportedError, process
from ipcreduce.ipc.workspace import bytes_for
from ipcreduce.serving import all_reduce
from tests.shared import worker
from tests.shared.world import WORLD

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", WORLD.rank % torch.cuda.device_count()) if ON_GPU else torch.device("cpu")
HIDDEN, MAX_SIZE = 64, 64 * 64 * 4
SUM = WORLD.size * (WORLD.size + 1) // 2


class ListOfCalls:
    """Graphs for a machine without GPUs."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class Engine:
    """A layer, x + all_reduce(x), with one graph a batch size, as both engines run it."""

    def __init__(self) -> None:
        self.ca_comm = all_reduce.ServingAllReduce(
            group=WORLD, device=DEVICE, max_size=MAX_SIZE, symm_mem_enabled=False, register_graph_buffers=True
        )
        self.fallbacks = 0
        self.graph: ListOfCalls | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        comm = self.ca_comm
        if comm is not None and not comm.disabled and comm.should_custom_ar(x):
            out = comm.custom_all_reduce(x)
            assert out is not None
            if self.graph is not None:
                self.graph.calls.append(lambda: out.copy_(comm.custom_all_reduce(x)))
            return out
        self.fallbacks += 1
        assert self.ca_comm.custom_all_reduce(x) is None
        return torch.zeros_like(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        total = self.all_reduce(x)
        y = x + total
        if self.graph is not None:
            self.graph.calls.append(lambda: torch.add(x, total, out=y))
        return y

    @contextmanager
    def captured(self) -> Iterator[Any]:
        if ON_GPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                yield graph
            return
        self.graph = ListOfCalls()
        yield self.graph
        self.graph = None


def serve(engine: Engine, dtype: torch.dtype) -> None:
    rank = WORLD.rank
    inputs = {size: torch.empty(size, HIDDEN, dtype=dtype, device=DEVICE) for size in (64, 8, 1)}
    graphs = {}
    with engine.ca_comm.capture():
        for size, x in inputs.items():
            x.fill_(rank + 1)
            assert (engine.step(x) == rank + 1 + SUM).all(), "the warm-up"
            with engine.captured() as graph:
                graphs[size] = graph, engine.step(x)
    assert engine.fallbacks == 0
    for turn in range(1, 21):
        for size, (graph, y) in graphs.items():
            inputs[size].fill_(turn * (rank + 1))
            graph.replay()
            assert (y == turn * (rank + 1 + SUM)).all(), f"turn {turn}, batch {size}"
            assert (inputs[size] == turn * (rank + 1)).all(), "the input was changed"


def declines(engine: Engine) -> None:
    comm = engine.ca_comm
    assert comm.should_custom_ar(torch.ones(128, 64, dtype=torch.bfloat16, device=DEVICE)), "of max_size bytes"
    others = [
        torch.ones(MAX_SIZE // 2 + 1, dtype=torch.float16, device=DEVICE),
        torch.ones(8, 8, device=DEVICE).t(),
        torch.ones(8, 8, device=DEVICE)[:, ::2],
        torch.ones(8, dtype=torch.bool, device=DEVICE),
        torch.ones(8, dtype=torch.complex64, device=DEVICE),
        torch.ones(8, device=DEVICE).to(torch.float8_e4m3fn),
        torch.ones(8, device="meta"),
    ]
    for x in others:
        engine.all_reduce(x)
    assert engine.fallbacks == len(others)
    engine.fallbacks = 0
    x = torch.ones(8, 8, device=DEVICE)
    assert comm.custom_all_gather(x) is None
    assert comm.custom_reduce_scatter(x) is None
    assert not comm.fully_connected
    comm.disabled = True  # as SGLang may
    assert comm.custom_all_reduce(x) is None
    comm.disabled = False


def takes_all() -> None:
    """For a server that asks for the same bits in every batch: every size and layout, and a row as if alone."""
    with mock.patch.dict(os.environ, IPCREDUCE_BATCH_INVARIANT="1"):
        comm = all_reduce.ServingAllReduce(group=WORLD, device=DEVICE, max_size=MAX_SIZE)
    generator = torch.Generator().manual_seed(WORLD.rank)
    batch = torch.randn(4 * MAX_SIZE // HIDDEN, 2 * HIDDEN, generator=generator).to(DEVICE, torch.bfloat16)[:, ::2]
    found = comm.custom_all_reduce(batch)
    for row in (0, 7):
        assert torch.equal(found[row], comm.custom_all_reduce(batch[row].contiguous()))
    comm.close()


def how_it_is_made() -> None:
    """On a GPU: our kernels or nothing, and a workspace for the largest message. The engine's other words are taken."""
    asked: dict[str, Any] = {}

    def refuse(group: Any, **options: Any) -> None:
        asked.update(options, group=group)
        raise UnsupportedError("no kernels here")

    with mock.patch.object(all_reduce, "Communicator", refuse):
        made = all_reduce.ServingAllReduce("group", torch.device("cuda:3"), 1 << 20)
        assert asked == {"group": "group", "device": 3, "backend": "ipc", "workspace": bytes_for(1 << 20)}
        assert made.disabled
        assert all_reduce.ServingAllReduce("group", 2).max_size == all_reduce.MAX_SIZE
        assert (asked["device"], asked["workspace"]) == (2, bytes_for(all_reduce.MAX_SIZE))


def main() -> None:
    how_it_is_made()
    engine = Engine()
    assert not engine.ca_comm.disabled
    assert [one.owner() for one in process.live] == [engine.ca_comm._comm]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        serve(engine, dtype)
    with torch.inference_mode():
        serve(engine, torch.float32)
    declines(engine)
    takes_all()
    engine.ca_comm.close()
    engine.ca_comm.close()
    assert engine.ca_comm.disabled
    assert not process.live
    assert engine.ca_comm.custom_all_reduce(torch.ones(8, device=DEVICE)) is None
    if not ON_GPU:  # the kernels cannot run: the engine goes on to its next way
        other = all_reduce.ServingAllReduce(WORLD, 0)
        assert other.disabled
        assert not other.should_custom_ar(torch.ones(8))
        other.close()
    with pytest.raises(ArgumentError, match="group is 'the ranks'"):
        all_reduce.ServingAllReduce("the ranks", DEVICE)
    print("right", flush=True)


if __name__ == "__main__":
    worker.run(main)
