# mpirun -n 4 python mpi_examples/breakable.py
"""Decode with a transformer split over the ranks, by graphs in which attention is an eager break.

Each step computes the next token of every sequence in a batch. Projections, MLP and all-reduces have fixed shapes: a
``GraphRunner`` records them once for each batch size. Attention covers all tokens so far, one more at each step: it
runs eagerly between the segments, and reads the present lengths from the forward context. Then a full graph does the
same; its attention covers the whole cache and masks the tokens that are not there yet.

Every token is compared with a NumPy computation that uses all weights, float64 and no cache. Without GPUs, or without
CuPy, the runner calls the model on NumPy arrays, at every step and in both modes.
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

LAYERS, HIDDEN, HEADS, WIDTH, INNER = 2, 32, 8, 4, 64  # WIDTH is that of one head
LENGTH = 24  # tokens in a sequence's cache; a new sequence replaces one whose cache is full
BATCHES = (4, 2, 1)  # the largest first, so that the others find their memory in the pool
TOLERANCE = 1e-5  # relative to the largest element: float32 sums are taken in another order
MODES = {"eager": "none", "broken": "piecewise", "full graph": "full"}

draw = np.random.default_rng(1).standard_normal
SHAPES = ((HIDDEN, 3, HEADS, WIDTH), (HEADS, WIDTH, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN))
WEIGHTS = [  # of the whole model; in each layer: to queries, keys and values; from the heads; up; down
    [draw(shape, np.float32) / np.float32(HIDDEN**0.5) for shape in SHAPES] for _ in range(LAYERS)
]
xp: Any = np  # CuPy, if the ranks have GPUs


@dataclass(frozen=True)
class Batch:
    """The batch descriptor of a recording."""

    sequences: int


@dataclass
class Metadata:
    """The input of attention in a step: the number of tokens that each sequence has in the cache."""

    lengths: list[int]
    positions: Any  # the same as an array, (batch, 1). A full graph reads it, so its address must not change


# ---- the model
def product(a: Any, b: Any) -> Any:
    """Compute a @ b by elementwise products and sums, for small sizes only.

    CuPy refuses its own @, which calls cuBLAS, while a stream captures. A real model uses
    nvmath.linalg.advanced.Matmul, with plan() before the recording and execute() in it.
    """
    return (a[:, :, None] * b).sum(axis=1)


def norm(x: Any) -> Any:
    return x / ((x * x).sum(axis=1, keepdims=True) / HIDDEN + 1e-6) ** 0.5


def attend(q: Any, keys: Any, values: Any, there: Any = None) -> Any:
    """Attention of queries (..., heads, WIDTH) over keys and values (..., tokens, heads, WIDTH).

    ``there`` masks the tokens that exist; None means all of them.
    """
    scores = (q[..., None, :, :] * keys).sum(axis=-1, keepdims=True) * WIDTH**-0.5
    if there is not None:
        scores = xp.where(there, scores, -np.inf)
    weights = xp.exp(scores - scores.max(axis=-3, keepdims=True))
    return (weights * values).sum(axis=-3) / weights.sum(axis=-3)


@ipcreduce.eager_break  # in mode "full" this is a plain call
def attention(qkv: Any, cache: Any, out: Any) -> None:
    """Attention of new tokens, qkv (batch, 3, heads, WIDTH); keys and values go into cache (batch, 2, LENGTH, ...)."""
    context = ipcreduce.get_forward_context()
    if context.mode != "full":  # shapes and indices change at each step, which a graph does not allow
        for sequence, length in enumerate(context.attn_metadata.lengths):
            cache[sequence, :, length] = qkv[sequence, 1:]
            keys, values = cache[sequence, :, : length + 1]
            out[sequence] = attend(qkv[sequence, 0], keys, values)
    else:  # for a graph: only the contents of arrays change
        steps, position = xp.arange(LENGTH), context.attn_metadata.positions
        cache[...] = xp.where((steps == position)[:, None, :, None, None], qkv[:, 1:, None], cache)
        out[...] = attend(qkv[:, 0], cache[:, 0], cache[:, 1], (steps <= position)[:, :, None, None])


class Model:
    """This rank's heads and MLP columns of every layer, with their cache."""

    def __init__(self, comm: ipcreduce.Communicator) -> None:
        heads, inner = (np.array_split(np.arange(n), comm.size)[comm.rank] for n in (HEADS, INNER))
        self.comm = comm
        self.layers = []
        for to_qkv, from_heads, up, down in WEIGHTS:
            mine = [to_qkv[:, :, heads].reshape(HIDDEN, -1), from_heads[heads].reshape(-1, HIDDEN)]
            mine += [up[:, inner], down[inner], np.zeros((BATCHES[0], 2, LENGTH, len(heads), WIDTH), np.float32)]
            self.layers.append([xp.asarray(one) for one in mine])

    def __call__(self, x: Any) -> Any:
        """Run one step. x: (batch, HIDDEN), the embedding of each sequence's token. The result has the same shape."""
        for to_qkv, from_heads, up, down, cache in self.layers:
            qkv = product(norm(x), to_qkv).reshape(len(x), 3, -1, WIDTH)
            heads = xp.empty((len(x), *qkv.shape[2:]), np.float32)
            attention(qkv, cache[: len(x)], out=heads)
            x = x + self.comm.allreduce(product(heads.reshape(len(x), -1), from_heads))
            x = x + self.comm.allreduce(product(xp.maximum(product(norm(x), up), 0), down))
        return x


class Sequence:
    """The embeddings of LENGTH tokens, and the model's expected output for each."""

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
    """The bytes of the graphs' pools, and those of CuPy's arrays outside of them."""
    pools = {graph.pool for graph in runner.recordings.values()}
    arrays = 0 if xp is np else xp.get_default_memory_pool().used_bytes()
    return sum(pool.nbytes for pool in pools), arrays


def decode(comm: ipcreduce.Communicator, kind: str, steps: int) -> bool:
    """Decode some steps: eager, with breaks, or by full graphs. Return True if all results are right."""
    mode = MODES[kind]
    runner = ipcreduce.GraphRunner(Model(comm), comm, mode="full" if mode == "full" else "piecewise", check="always")
    inputs = {batch: xp.zeros((batch, HIDDEN), np.float32) for batch in BATCHES}  # the arrays that graphs read
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
        if order.randrange(comm.size * 8) == comm.rank:  # this rank is late: the others wait in their all-reduce
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
    if comm.backend != "host":
        import cupy as xp
    elif comm.rank == 0:
        print(
            "no GPUs here: with GPUs the runner records a graph for each batch size, and replays it in the later steps"
        )
    if comm.rank == 0:
        print(f"{comm.size} ranks, backend {comm.backend}: {steps} steps, each with 4, 2 or 1 sequences")
    right = [decode(comm, kind, steps) for kind in MODES]
    comm.close()
    return 0 if MPI.COMM_WORLD.allreduce(all(right), MPI.LAND) else 1


if __name__ == "__main__":
    sys.exit(main())
