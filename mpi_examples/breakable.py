# mpirun -n 4 python mpi_examples/breakable.py
"""Decoding with a transformer split over the ranks: graphs with attention as their break.

Every step gives each sequence of a batch its next token. Projections, MLP and all-reduces have fixed shapes: a
``GraphRunner`` records them once for each batch size. Attention goes over all tokens so far, more at each step: it runs
eagerly between the segments, and finds the present lengths in the forward context. The same is then done by one full
graph, whose attention goes over the whole cache and masks what is not there yet.

Every token is compared with a NumPy computation that has all weights, float64 and no cache. Without GPUs, or CuPy, the
runner calls the model, on NumPy arrays.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

import ipcreduce

LAYERS, HIDDEN, HEADS, WIDTH, INNER = 2, 32, 8, 4, 64  # WIDTH: of a head
LENGTH = 24  # tokens in the cache of a sequence; when it is full, another sequence takes its place
BATCHES = (4, 2, 1)  # the largest first: the others then find their memory in the pool
TOLERANCE = 1e-5  # of the largest element: float32 sums in another order
MODES = {"eager": "none", "broken": "piecewise", "full graph": "full"}

draw = np.random.default_rng(1).standard_normal
SHAPES = ((HIDDEN, 3, HEADS, WIDTH), (HEADS, WIDTH, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN))
WEIGHTS = [  # of the whole model: for each layer to queries, keys and values; from the heads; up; down
    [draw(shape, np.float32) / np.float32(HIDDEN**0.5) for shape in SHAPES] for _ in range(LAYERS)
]
xp: Any = np  # CuPy, if the ranks have GPUs


@dataclass(frozen=True)
class Batch:
    """Descriptor of a recording."""

    sequences: int


@dataclass
class Metadata:
    """What attention has to know in a step: how many tokens each sequence has in the cache."""

    lengths: list[int]
    positions: Any  # the same in an array, (batch, 1), which a full graph reads: its address must stay


# ---- the model
def product(a: Any, b: Any) -> Any:
    """a @ b. CuPy does @ by cuBLAS, which it refuses while a stream captures; these sums are for small sizes only.

    A real model uses nvmath.linalg.advanced.Matmul: plan() before the recording, execute() in it.
    """
    return (a[:, :, None] * b).sum(axis=1)


def norm(x: Any) -> Any:
    return x / ((x * x).sum(axis=1, keepdims=True) / HIDDEN + 1e-6) ** 0.5


def attend(q: Any, keys: Any, values: Any, there: Any = None) -> Any:
    """Of queries (..., heads, WIDTH) to the tokens in keys and values (..., tokens, heads, WIDTH) that are there."""
    scores = (q[..., None, :, :] * keys).sum(axis=-1, keepdims=True) * WIDTH**-0.5
    if there is not None:
        scores = xp.where(there, scores, -np.inf)
    weights = xp.exp(scores - scores.max(axis=-3, keepdims=True))
    return (weights * values).sum(axis=-3) / weights.sum(axis=-3)


@ipcreduce.eager_break  # in mode "full" a plain call
def attention(qkv: Any, cache: Any, out: Any) -> None:
    """Of new tokens, qkv (batch, 3, heads, WIDTH), whose keys and values go into cache (batch, 2, LENGTH, ...)."""
    context = ipcreduce.get_forward_context()
    if context.mode != "full":  # shapes and indices change at each step: not for a graph
        for sequence, length in enumerate(context.attn_metadata.lengths):
            cache[sequence, :, length] = qkv[sequence, 1:]
            keys, values = cache[sequence, :, : length + 1]
            out[sequence] = attend(qkv[sequence, 0], keys, values)
    else:  # nothing changes but what is in arrays
        steps, position = xp.arange(LENGTH), context.attn_metadata.positions
        cache[...] = xp.where((steps == position)[:, None, :, None, None], qkv[:, 1:, None], cache)
        out[...] = attend(qkv[:, 0], cache[:, 0], cache[:, 1], (steps <= position)[:, :, None, None])


class Model:
    """This rank's heads and columns of every layer, with their cache."""

    def __init__(self, comm: ipcreduce.Communicator) -> None:
        heads, inner = (np.array_split(np.arange(n), comm.size)[comm.rank] for n in (HEADS, INNER))
        self.comm = comm
        self.layers = []
        for to_qkv, from_heads, up, down in WEIGHTS:
            mine = [to_qkv[:, :, heads].reshape(HIDDEN, -1), from_heads[heads].reshape(-1, HIDDEN)]
            mine += [up[:, inner], down[inner], np.zeros((BATCHES[0], 2, LENGTH, len(heads), WIDTH), np.float32)]
            self.layers.append([xp.asarray(one) for one in mine])

    def __call__(self, x: Any) -> Any:
        """x: (batch, HIDDEN), the embedding of each sequence's token; the result is of that shape."""
        for to_qkv, from_heads, up, down, cache in self.layers:
            qkv = product(norm(x), to_qkv).reshape(len(x), 3, -1, WIDTH)
            heads = xp.empty((len(x), *qkv.shape[2:]), np.float32)
            attention(qkv, cache[: len(x)], out=heads)
            x = x + self.comm.allreduce(product(heads.reshape(len(x), -1), from_heads))
            x = x + self.comm.allreduce(product(xp.maximum(product(norm(x), up), 0), down))
        return x


class Sequence:
    """Embeddings of LENGTH tokens, and what the model has to make of each."""

    def __init__(self, number: int) -> None:
        self.length = 0
        self.tokens = np.random.default_rng(number).standard_normal((LENGTH, HIDDEN), np.float32)
        x = self.tokens.astype(np.float64)
        for to_qkv, from_heads, up, down in WEIGHTS:
            q, k, v = np.einsum("ix,xchd->cihd", norm(x), to_qkv)
            weights = np.exp(np.einsum("ihd,jhd->hij", q, k) * WIDTH**-0.5) * np.tri(LENGTH)
            weights /= weights.sum(axis=2, keepdims=True)
            x = x + np.einsum("hij,jhd,hdx->ix", weights, v, from_heads)
            x = x + np.maximum(norm(x) @ up, 0) @ down
        self.expected = x


# ---- decoding
def memory(runner: ipcreduce.GraphRunner) -> tuple[int, int]:
    """Bytes of the graphs' pool, and of arrays outside of it."""
    pools = {graph.pool for graph in runner.recordings.values()}
    arrays = 0 if xp is np else xp.get_default_memory_pool().used_bytes()
    return sum(pool.nbytes for pool in pools), arrays


def decode(comm: ipcreduce.Communicator, kind: str, steps: int) -> bool:
    """Some steps, eager, broken or as full graphs; whether all was right."""
    mode = MODES[kind]
    runner = ipcreduce.GraphRunner(Model(comm), comm, mode="full" if mode == "full" else "piecewise", check="always")
    inputs = {batch: xp.zeros((batch, HIDDEN), np.float32) for batch in BATCHES}  # what the graphs read
    positions = {batch: xp.zeros((batch, 1), np.int64) for batch in BATCHES}
    sequences = [Sequence(number) for number in range(BATCHES[0])]
    order, started = random.Random(3), len(sequences)  # the same on every rank
    seconds, error, before = [], 0.0, (0, 0)
    for step in range(steps):
        batch = BATCHES[step] if step < len(BATCHES) else order.choice(BATCHES)  # each is recorded at its first step
        active = sequences[:batch]
        lengths = [one.length for one in active]
        inputs[batch][...] = xp.asarray(np.stack([one.tokens[one.length] for one in active]))
        positions[batch][...] = xp.asarray(np.array(lengths)[:, None])
        if order.randrange(comm.size * 8) == comm.rank:  # a rank is late: the others wait in their all-reduce
            time.sleep(0.01)
        begin = time.perf_counter()
        with ipcreduce.forward_context(Batch(batch), mode, Metadata(lengths, positions[batch])):
            result = runner(inputs[batch])
        result = result if xp is np else xp.asnumpy(result)
        seconds.append(time.perf_counter() - begin)
        expected = np.stack([one.expected[one.length] for one in active])
        error = max(error, float(np.abs(result - expected).max() / np.abs(expected).max()))
        for slot, one in enumerate(active):
            one.length += 1
            if one.length == LENGTH:
                sequences[slot], started = Sequence(started), started + 1
        if step + 1 == len(BATCHES):
            before = memory(runner)
    after = memory(runner)
    if comm.rank == 0:
        each = statistics.median(seconds[len(BATCHES) :]) * 1e3
        print(f"{kind:10} {each:7.3f} ms per token, largest error {error:.1e}, at most {TOLERANCE:g}", flush=True)
        if runner.recordings:
            segments = ", ".join(str(len(graph.segments)) for graph in runner.recordings.values())
            print(f"{'':10} segments: {segments}; pool and arrays: {before}, at the end {after} bytes", flush=True)
    runner.close()
    return error <= TOLERANCE and after == before


def main() -> int:
    global xp
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=32, help="of each kind, at least 4")
    steps = max(parser.parse_args().steps, len(BATCHES) + 1)
    comm = ipcreduce.Communicator(device="auto")  # takes a GPU for each rank, if there are any
    if comm.backend != "mpi":
        import cupy as xp
    elif comm.rank == 0:
        print("graphs need GPUs, and CuPy to use them (python -m ipcreduce info says why): the model runs on the host")
    if comm.rank == 0:
        print(f"{comm.size} ranks, backend {comm.backend}: {steps} steps, each with 4, 2 or 1 sequences")
    right = [decode(comm, kind, steps) for kind in MODES]
    comm.close()
    return 0 if MPI.COMM_WORLD.allreduce(all(right), MPI.LAND) else 1


if __name__ == "__main__":
    sys.exit(main())
