# mpirun -n 4 python mpi_examples/train_digits.py
"""Data-parallel training on the 1,797 scanned digits of scikit-learn, with one all-reduce a step.

Of each digit that is not held out there are four copies more, which are moved by a pixel.
Every rank holds the whole network and a shard of the digits. One buffer holds the gradients of all layers and, as its
last element, the loss. One all-reduce in place sums it, and all ranks take the same step. At the end the example checks
the accuracy on held-out digits, that all ranks hold the same weights bit for bit, and that the same training in one
process arrives at these weights.

With --graph (on GPUs) the work of a step, all-reduce included, is recorded once and then replayed by one launch.
"""

from __future__ import annotations

import argparse
import operator
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import ipcreduce

try:
    from sklearn.datasets import load_digits
    from threadpoolctl import threadpool_limits  # which scikit-learn needs
except ImportError:
    sys.exit("this example needs scikit-learn: pip install scikit-learn")

INPUTS, HIDDEN, OUTPUTS = 64, 2048, 10
BATCH, RATE, MOMENTUM = 768, 0.1, 0.9
HELD_OUT = 360
SIDE = 8  # pixels of an image
TIMEOUT = 600.0  # in seconds: the other ranks wait while one of them trains alone
LEAST_ACCURACY = 0.95
TOLERANCE = 1e-2  # between the weights of many ranks and of one: every step takes float32 sums in another order

xp: Any = np  # CuPy, if the ranks have GPUs


def by_sums(a: Any, b: Any) -> Any:
    """Compute a @ b by sums: CuPy refuses its own @, which calls cuBLAS, while a stream captures."""
    return (a[:, :, None] * b).sum(axis=1)


product: Callable[[Any, Any], Any] = operator.matmul


def layers(vector: Any) -> tuple[Any, Any, Any, Any]:
    """Split a vector of parameters or gradients into views w1, b1, w2, b2."""
    w1, b1, w2, b2 = xp.split(vector, np.cumsum([INPUTS * HIDDEN, HIDDEN, HIDDEN * OUTPUTS]).tolist())
    return w1.reshape(INPUTS, HIDDEN), b1, w2.reshape(HIDDEN, OUTPUTS), b2


def first_weights() -> Any:
    random = np.random.default_rng(1)
    w1 = random.standard_normal(INPUTS * HIDDEN) * (2 / INPUTS) ** 0.5
    w2 = random.standard_normal(HIDDEN * OUTPUTS) * (2 / HIDDEN) ** 0.5
    return xp.asarray(np.concatenate([w1, np.zeros(HIDDEN), w2, np.zeros(OUTPUTS)]), dtype=xp.float32)


def gradients(weights: Any, images: Any, wanted: Any, share: Any, out: Any) -> None:
    """Fill ``out`` with this rank's part of the gradients and, last, of the loss. Both are means over the whole batch.

    wanted: (images, OUTPUTS), 1 at each image's digit. share: (images, 1), each image's weight in the mean.
    """
    w1, b1, w2, b2 = layers(weights)
    to_w1, to_b1, to_w2, to_b2 = layers(out[:-1])
    hidden = xp.maximum(product(images, w1) + b1, 0)
    scores = product(hidden, w2) + b2
    scores -= scores.max(axis=1, keepdims=True)
    log_p = scores - xp.log(xp.exp(scores).sum(axis=1, keepdims=True))
    out[-1] = -(wanted * log_p * share).sum()
    to_scores = (xp.exp(log_p) - wanted) * share
    to_hidden = product(to_scores, w2.T) * (hidden > 0)
    to_w1[...], to_b1[...] = product(images.T, to_hidden), to_hidden.sum(axis=0)
    to_w2[...], to_b2[...] = product(hidden.T, to_scores), to_scores.sum(axis=0)


def with_moved_copies(images: Any) -> Any:
    """The images, and behind them all of them moved by a pixel down, up, to the right and to the left."""
    room = np.pad(images.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    places = (1, 1), (0, 1), (2, 1), (1, 0), (1, 2)
    return np.concatenate([room[:, y : y + SIDE, x : x + SIDE] for y, x in places]).reshape(-1, INPUTS)


def accuracy(weights: Any, images: Any, digits: Any) -> float:
    w1, b1, w2, b2 = layers(weights)
    found = (xp.maximum(images @ w1 + b1, 0) @ w2 + b2).argmax(axis=1)
    return float((found == digits).mean())


def train(
    images: Any,
    digits: Any,
    epochs: int,
    rank: int,
    size: int,
    reduce: Callable[[Any], None],
    report: Callable[[int, Any, float], None],
    graph: ipcreduce.Graph | None = None,
) -> Any:
    """Train for some epochs on this rank's shard, every size-th digit. Returns the weights."""
    shard, wanted = xp.asarray(images[rank::size]), xp.asarray(np.eye(OUTPUTS, dtype=np.float32)[digits[rank::size]])
    weights = first_weights()
    velocity = xp.zeros_like(weights)
    grads = xp.zeros(weights.size + 1, dtype=xp.float32)
    loss, weight = xp.zeros((), dtype=xp.float32), xp.zeros((), dtype=xp.float32)
    # A graph reads fixed arrays of BATCH rows: unused rows are zero, and so is their share in the mean.
    rows = [xp.zeros((BATCH, columns), dtype=xp.float32) for columns in (INPUTS, OUTPUTS, 1)]

    def step(*batch: Any) -> None:
        gradients(weights, *batch, out=grads)
        reduce(grads)
        velocity[...] = MOMENTUM * velocity - RATE * grads[:-1]
        weights[...] += velocity
        loss[...] += grads[-1] * weight

    order = np.random.default_rng(2)  # the same batches on every rank, and for every number of ranks
    for epoch in range(1, epochs + 1):
        shuffled = order.permutation(len(images))
        loss.fill(0)
        for start in range(0, len(images), BATCH):
            batch = shuffled[start : start + BATCH]
            mine = xp.asarray(batch[batch % size == rank] // size)
            part = [shard[mine], wanted[mine], xp.full((len(mine), 1), 1 / len(batch), dtype=xp.float32)]
            weight.fill(len(batch) / len(images))
            if graph is None:
                step(*part)
                continue
            for fixed, values in zip(rows, part, strict=True):
                fixed[: len(mine)], fixed[len(mine) :] = values, 0
            if graph.state == "empty":
                with graph.record((rows, weights, velocity, grads, loss, weight)):  # a real step
                    step(*rows)
            else:
                graph.replay()
        report(epoch, weights, float(loss))
    return weights


def now() -> float:
    """Wait for all work on the GPU, then return the time in seconds."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
    return time.perf_counter()


def main() -> int:
    global xp, product
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", choices=["auto", "host", "gpu"], default="auto")
    parser.add_argument("--graph", action="store_true", help="record a training step once, and replay it; on GPUs")
    args = parser.parse_args()

    world = MPI.COMM_WORLD
    comm = ipcreduce.Communicator(device="auto", timeout=TIMEOUT)  # takes a GPU for each rank, if there are any
    if args.device != "host" and comm.backend != "host":
        import cupy as xp
    elif args.device == "gpu":
        sys.exit("--device gpu: the ranks have no GPUs that they can use; python -m ipcreduce info says why")
    elif comm.backend == "host" and comm.rank == 0:
        print("no GPUs here: with GPUs the training runs there, and --graph makes each step one launch")
    backend = "host" if xp is np else comm.backend
    graph = None
    if args.graph and xp is not np:
        graph, product = ipcreduce.Graph(comm), by_sums
    elif args.graph and comm.rank == 0:
        print("--graph needs GPUs: going on without")

    data = load_digits()
    images, digits = (data.images.reshape(-1, INPUTS) / 16).astype(np.float32), data.target
    mixed = np.random.default_rng(0).permutation(len(images))
    held, rest = mixed[:HELD_OUT], mixed[HELD_OUT:]
    held_images, held_digits = xp.asarray(images[held]), xp.asarray(digits[held])
    images, digits = with_moved_copies(images[rest]), np.tile(digits[rest], 5)
    threads = max(1, len(os.sched_getaffinity(0)) // comm.size)  # of each process, in matrix products on the host

    def reduce(grads: Any) -> None:
        ipcreduce.allreduce(grads, out=grads, comm=comm)

    def report(epoch: int, weights: Any, loss: float) -> None:
        if comm.rank == 0:
            right = accuracy(weights, held_images, held_digits)
            print(f"epoch {epoch:3}/{args.epochs}   loss {loss:.4f}   held-out accuracy {right:.1%}", flush=True)

    if comm.rank == 0:
        print(f"{comm.size} ranks, {xp.__name__}, backend {backend}: {len(rest)} digits and {HELD_OUT} held out")
    with threadpool_limits(threads):
        begin = now()
        weights = train(images, digits, args.epochs, comm.rank, comm.size, reduce, report, graph)
        seconds = now() - begin

    right = accuracy(weights, held_images, held_digits)
    everybodys = world.allgather(weights.tobytes())
    checks = {
        f"held-out accuracy {right:.1%}, at least {LEAST_ACCURACY:.0%}": right >= LEAST_ACCURACY,
        "all ranks hold the same weights, bit for bit": len(set(everybodys)) == 1,
    }
    if comm.rank == 0:
        print("the same in one process, to compare", flush=True)
        with threadpool_limits(threads):
            begin = now()
            in_one = train(images, digits, args.epochs, 0, 1, lambda *_: None, lambda *_: None)
            alone = now() - begin
        apart = float(abs(weights - in_one).max())
        same = f"one process arrives within {apart:.1e} of these weights, at most {TOLERANCE:g}"
        checks[same] = apart <= TOLERANCE
        print(f"{args.epochs} epochs took {seconds:.2f} s, and {alone:.2f} s in one process with as many threads")
        if graph is not None:
            print(f"each step one {graph.describe().splitlines()[0]}")
        for check, passed in checks.items():
            print(f"{'ok  ' if passed else 'FAIL'} {check}", flush=True)
    if graph is not None:
        graph.close()
    passed = comm.allreduce(all(checks.values()), "all")  # also of rank 0, for which the others wait here
    comm.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
