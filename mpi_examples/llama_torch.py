# mpirun -n 2 python mpi_examples/llama_torch.py
"""A small Llama in PyTorch, split over the ranks: greedy decoding in every way of running a step.

Each rank holds some heads of the attention and some columns of the MLP; two all-reduces a layer add the parts. The
weights are random. The tokens are compared with those of the unsplit model. Without GPUs only the eager step runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import torch
    from torch import Tensor
    from torch.nn.functional import rms_norm, silu
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)
from mpi4py import MPI

import ipcreduce

VOCABULARY, HIDDEN, MLP, HEADS, LAYERS, LONGEST = 1000, 1024, 2816, 16, 8, 128
BATCHES = (4, 2, 1)
parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=32, help="to decode, for each sequence (32)")
parser.add_argument("--runs", type=int, default=3, help="of each way; their median time is shown (3)")
parser.add_argument("--json", type=Path, help="write the times there, too")
options = parser.parse_args()

comm = ipcreduce.Communicator(device="auto")
on_gpus = comm.backend != "host"
DEVICE = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


class Llama:
    """Part ``rank`` of ``parts`` of the model, with caches for a batch, whose next tokens a step writes in place."""

    def __init__(self, rank: int, parts: int, reduce: Callable[[Tensor], Any]) -> None:
        self.reduce, self.heads = reduce, HEADS // parts
        generator = torch.Generator().manual_seed(7)

        def weight(rows: int, columns: int, split: int | None = None) -> Tensor:
            whole = torch.randn(rows, columns, generator=generator) / rows**0.5
            mine = whole if split is None else whole.chunk(parts, split)[rank]
            return mine.contiguous().to(DEVICE)

        self.embedding, self.head = weight(VOCABULARY, HIDDEN), weight(HIDDEN, VOCABULARY)
        self.layers = [
            {
                **{name: weight(HIDDEN, HIDDEN, 1) for name in ("query", "key", "value")},
                "output": weight(HIDDEN, HIDDEN, 0),
                **{name: weight(HIDDEN, MLP, 1) for name in ("gate", "up")},
                "down": weight(MLP, HIDDEN, 0),
            }
            for _ in range(LAYERS)
        ]
        self.attend: Callable[..., Tensor] = self.attention

    def begin(self, batch: int) -> None:
        """New sequences, each with another first token, in new memory."""
        self.tokens = torch.arange(batch, device=DEVICE) + 1
        self.position = torch.zeros(1, dtype=torch.long, device=DEVICE)
        shape = LAYERS, 2, batch, self.heads, LONGEST, HIDDEN // HEADS
        self.caches = torch.zeros(shape, device=DEVICE)

    def again(self) -> None:
        """The same sequences from their beginning, in the same memory."""
        self.tokens.copy_(torch.arange(len(self.tokens)) + 1)
        self.position.zero_()
        self.caches.zero_()

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of one query for each sequence, with all keys and values up to it."""
        batch, size = len(query), HIDDEN // HEADS
        keys, values = self.caches[layer]
        keys.index_copy_(2, self.position, key.view(batch, self.heads, 1, size))
        values.index_copy_(2, self.position, value.view(batch, self.heads, 1, size))
        scores = (keys @ query.view(batch, self.heads, size, 1)).squeeze(3) / size**0.5
        ahead = torch.arange(LONGEST, device=DEVICE) > self.position
        weights = scores.masked_fill(ahead, float("-inf")).softmax(2)
        return (weights.unsqueeze(2) @ values).reshape(batch, -1)

    def step(self, tokens: Tensor) -> Tensor:
        """Decode one token for each sequence, and write it over the last one."""
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            normal = rms_norm(x, (HIDDEN,))
            heads = self.attend(number, *(normal @ layer[name] for name in ("query", "key", "value")))
            x = x + self.reduce(heads @ layer["output"])
            normal = rms_norm(x, (HIDDEN,))
            x = x + self.reduce((silu(normal @ layer["gate"]) * (normal @ layer["up"])) @ layer["down"])
        tokens.copy_((rms_norm(x, (HIDDEN,)) @ self.head).argmax(1))
        self.position += 1
        return tokens


def decode(model: Llama, step: Callable[[], Any]) -> tuple[list[list[int]], float]:
    """All tokens, and the median time of a step in microseconds."""
    times, found = [], []
    for _ in range(options.runs + 1):
        model.again()
        kept = torch.zeros(options.tokens, len(model.tokens), dtype=torch.long, device=DEVICE)
        wait()
        MPI.COMM_WORLD.Barrier()
        started = time.perf_counter()
        for index in range(options.tokens):
            step()
            kept[index] = model.tokens
        wait()
        times.append((time.perf_counter() - started) / options.tokens * 1e6)
        found = kept.T.tolist()
    return found, statistics.median(times[1:])


def wait() -> None:
    if on_gpus:
        torch.cuda.synchronize()


# ---- ways of running a step. Each yields a function that runs one.
@contextmanager
def eager(model: Llama) -> Iterator[Callable[[], Any]]:
    yield lambda: model.step(model.tokens)


@contextmanager
def torch_graph(model: Llama) -> Iterator[Callable[[], Any]]:
    model.step(model.tokens)  # kernels and libraries are loaded before the capture
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step(model.tokens)
    yield graph.replay


@contextmanager
def whole(model: Llama) -> Iterator[Callable[[], Any]]:
    model.step(model.tokens)
    with ipcreduce.Graph(comm) as graph:
        with graph.record():
            model.step(model.tokens)
        yield graph.replay


@contextmanager
def with_breaks(model: Llama) -> Iterator[Callable[[], Any]]:
    """Attention runs eagerly, between nine graphs."""
    model.attend = ipcreduce.eager_break(model.attention)
    with whole(model) as replay:
        yield replay
    model.attend = model.attention


@contextmanager
def runner(model: Llama) -> Iterator[Callable[[], Any]]:
    with ipcreduce.GraphRunner(model.step, comm=comm, mode="full") as run:

        def step() -> None:
            with ipcreduce.forward_context(len(model.tokens), "full"):
                run(model.tokens)

        yield step


def nccl() -> Callable[[Tensor], Tensor]:
    """PyTorch's all-reduce, which needs a GPU for each rank."""
    import torch.distributed as dist

    dist.init_process_group("nccl", "tcp://127.0.0.1:29533", world_size=comm.size, rank=comm.rank, device_id=DEVICE)

    def reduce(part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    return reduce


def main() -> bool:
    if HEADS % comm.size:
        sys.exit(f"this model has {HEADS} heads: run it with 1, 2, 4, 8 or 16 ranks")
    torch.set_grad_enabled(False)
    unsplit = Llama(0, 1, lambda part: part)
    split = Llama(comm.rank, comm.size, comm.allreduce)
    rows: list[tuple[str, int, float]] = []
    right = True
    ways: dict[str, tuple[Callable[..., Any], Any]] = {"eager": (eager, None)}
    if on_gpus:
        ways |= {"torch.cuda.graph": (torch_graph, None), "ipcreduce.Graph": (whole, None)}
        ways |= {"ipcreduce.Graph, attention in breaks": (with_breaks, None), "GraphRunner": (runner, None)}
        if comm.backend == "ipc" and torch.cuda.device_count() >= comm.size > 1:
            theirs = nccl()
            ways |= {"eager, NCCL": (eager, theirs), "torch.cuda.graph, NCCL": (torch_graph, theirs)}
    for batch in BATCHES:
        unsplit.begin(batch)
        expected, _ = decode(unsplit, lambda: unsplit.step(unsplit.tokens))
        for name, (way, reduce) in ways.items():
            split.reduce = comm.allreduce if reduce is None else reduce
            split.begin(batch)
            with way(split) as step:
                found, taken = decode(split, step)
            rows.append((name, batch, max(MPI.COMM_WORLD.allgather(taken))))
            same = found == expected
            right = right and same
            if comm.rank == 0:
                tell = "the tokens of the unsplit model" if same else "OTHER TOKENS"
                print(f"batch {batch}, {name:37} {rows[-1][2]:9.0f} us a step, {tell}", flush=True)
    if comm.rank == 0 and options.json:
        table = [{"way": name, "batch": batch, "us": round(us, 1)} for name, batch, us in rows]
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return right


if comm.rank == 0:
    print(f"{LAYERS} layers of {HIDDEN}, {comm.size} ranks, backend {comm.backend}")
    if not on_gpus:
        print("no GPUs here: eager steps only; with GPUs they run in graphs too, and beside NCCL")
ok = main()
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(ok, MPI.LAND) else 1)
