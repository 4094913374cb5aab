# mpirun -n 4 python mpi_examples/piecewise.py
"""A model with one graph for each layer; between layers the host decides if another layer is needed.

A graph cannot contain such a decision. All-reduce gives every rank the same bits, so all ranks decide alike and replay
the same graphs. There is a set of graphs for each batch size. All share one memory pool, and they are registered
together at the end of ``comm.capture()``. Every result is checked against NumPy. Without GPUs each layer is a call.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import numpy as np
from mpi4py import MPI

import ipcreduce

RUNS, LAYERS, HIDDEN, INNER = 200, 4, 16, 32
BATCHES = (8, 4, 2, 1)  # the largest first, so that the others find their memory in the pool
LIMIT = 8  # activations are whole numbers up to this magnitude, so that every sum is exact in any order

comm = ipcreduce.Communicator(device="auto")  # takes a GPU for each rank, if there are any
xp = comm.xp
if comm.backend == "host" and comm.rank == 0:
    print("no GPUs here: with GPUs each layer is recorded once for each batch size, and one launch from then on")

draw = np.random.default_rng(1)
every_up = draw.integers(-1, 2, (LAYERS, HIDDEN, INNER)).astype(np.float32)
every_down = draw.integers(-1, 2, (LAYERS, INNER, HIDDEN)).astype(np.float32)
inner = np.array_split(np.arange(INNER), comm.size)[comm.rank]  # this rank's part of every layer
weights = [(xp.asarray(every_up[i][:, inner]), xp.asarray(every_down[i][inner])) for i in range(LAYERS)]


def product(a: Any, b: Any) -> Any:
    """Compute a @ b by sums: CuPy refuses its own @, which calls cuBLAS, while a stream captures."""
    return (a[:, :, None] * b).sum(axis=1)


def layer(x: Any, up: Any, down: Any) -> Any:
    part = product(xp.maximum(product(x, up), 0), down)
    return xp.maximum(xp.minimum(x + comm.allreduce(part), LIMIT), -LIMIT)


def enough(x: np.ndarray) -> bool:
    """Return True if further layers would change little: nine tenths of the activations are at the limit."""
    return bool((abs(x) == LIMIT).mean() >= 0.9)


class Pieces:
    """The graphs for one batch size. Each reads the previous one's output. Without GPUs there are none."""

    def __init__(self, batch: int, pool: Any) -> None:
        self.x = xp.zeros((batch, HIDDEN), np.float32)
        self.graphs: list[ipcreduce.Graph] = []
        self.outputs: list[Any] = []
        for up, down in weights if comm.backend != "host" else []:
            source = self.outputs[-1] if self.outputs else self.x
            graph = ipcreduce.Graph(comm, pool=pool)
            with graph.record([source, up, down]):  # named, so that the graph keeps them alive
                self.outputs.append(layer(source, up, down))
            pool = graph.pool
            self.graphs.append(graph)
        self.pool = pool

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, int]:
        """Run the model on ``x``. Returns the result and the number of layers used."""
        self.x[...] = xp.asarray(x)
        layers = 0
        while layers < LAYERS and not enough(x):
            if self.graphs:
                self.graphs[layers].replay()
                x = xp.asnumpy(self.outputs[layers])
            else:
                x = layer(x, *weights[layers])
            layers += 1
        return x, layers


def expected(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Compute the same by NumPy, with all weights on one rank."""
    layers = 0
    while layers < LAYERS and not enough(x):
        x = np.clip(x + np.maximum(x @ every_up[layers], 0) @ every_down[layers], -LIMIT, LIMIT)
        layers += 1
    return x, layers


models: dict[int, Pieces] = {}
pool = None
with comm.capture():  # registers all graphs at once, at its end; they can be replayed before that
    for batch in BATCHES:
        models[batch] = Pieces(batch, pool)
        pool = models[batch].pool

order = random.Random(2)  # the same on every rank
wrong, depths = 0, Counter[int]()
for _ in range(RUNS):
    batch = order.choice(BATCHES)
    x = draw.integers(-2, 3, (batch, HIDDEN)).astype(np.float32)
    (result, layers), (right, due) = models[batch](x), expected(x)
    wrong += not (np.array_equal(result, right) and layers == due)
    depths[layers] += 1

comm.synchronize()
graphs = [graph for model in models.values() for graph in model.graphs]
if comm.rank == 0:
    states = ", ".join(sorted({graph.state for graph in graphs}))
    made = f"{len(graphs)} graphs ({states}), pool of {pool.nbytes} bytes" if graphs else "no graphs"
    print(f"{comm.size} ranks, backend {comm.backend}: {made}")
    print(f"layers that were needed: {', '.join(f'{depth} in {depths[depth]} runs' for depth in sorted(depths))}")
    print(f"{RUNS} runs in random order, {wrong} wrong", flush=True)
for graph in graphs:
    graph.close()
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(wrong) == 0 else 1)
