"""Time of a training step whose gradients are averaged beside the backward pass, and after it.

    mpirun -n 2 python benchmarks/overlap.py OUT.json [--layers 16] [--hidden 4096] [--tokens 2048]

The model is a stack of matrices in bfloat16. A step is a forward and a backward pass and the average of the gradients;
there is no optimizer. The ways take turns:

    alone              no all-reduce: the least that a step can take
    unreduced          DistributedDataParallel with a hook that does nothing
    overlapped         DistributedDataParallel over gloo, with ipcreduce.torch.ddp_hook
    sms=16             the same with a given limit of blocks
    after              all-reduces of ipcreduce after the backward pass
    NCCL overlapped    DistributedDataParallel over NCCL, as it is
    NCCL after         torch.distributed.all_reduce over NCCL after the backward pass
    all-reduces        those of "after" alone, and so of NCCL: what can be hidden

Results are checked first. Times are milliseconds a step: the slowest rank's median over the turns. The timeline is of
one overlapped step on rank 0, in milliseconds from its start: for each bucket when it is full and when it is averaged.
NCCL is left out where the ranks do not have a GPU each. Without GPUs the passes run on the host, for a try.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import ipcreduce
from ipcreduce.bench import report
from ipcreduce.torch import ddp_hook

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
BUCKET_MB = 25  # PyTorch's default
CHECKED = 4096  # elements of each gradient
TOLERANCE = 2**-7  # relative to the largest element: bfloat16 has 8 bits, and gradients are rounded in another order
Step = Callable[[], Any]


class Clock:
    """Moments on the current stream of a GPU, or on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds between two moments, once both have been reached: see :meth:`wait`."""
        return first.elapsed_time(last) if self._on_gpu else (last - first) * 1e3

    def wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def join() -> None:
    """Make PyTorch's default group of the ranks, which are on one host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = WORLD.bcast(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(RANK), "WORLD_SIZE": str(SIZE)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")


def unreduced_bucket(state, bucket):  # PyTorch takes no annotation that is a text
    future = torch.futures.Future(devices=[bucket.buffer().device] if bucket.buffer().is_cuda else [])
    future.set_result(bucket.buffer())
    return future


class Run:
    """The ways, each with a copy of the model."""

    def __init__(self, comm: ipcreduce.Communicator, device: torch.device, options: argparse.Namespace) -> None:
        self.comm, self.clock = comm, Clock(device)
        torch.manual_seed(1)
        layers = [torch.nn.Linear(options.hidden, options.hidden, bias=False) for _ in range(options.layers)]
        self.model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
        torch.manual_seed(100 + RANK)
        self.x = torch.randn(options.tokens, options.hidden, device=device, dtype=torch.bfloat16)
        self.marks: list[tuple[Any, Any]] | None = None  # of the buckets, while they are wanted
        self.warm_seconds = 1.0 if device.type == "cuda" else 0.0
        self.models: dict[str, Any] = {}
        self.limits: list[int] = options.sms
        self.nccl: Any = None
        if device.type == "cuda" and torch.cuda.device_count() >= SIZE:
            self.nccl = dist.new_group(backend="nccl")

    def ways(self) -> dict[str, Step]:
        overlapped = self.wrapped(None)
        overlapped.register_comm_hook(None, self.marked(ddp_hook(self.comm)))
        unreduced = self.wrapped(None)
        unreduced.register_comm_hook(None, unreduced_bucket)
        for sms in self.limits:
            self.models[f"sms={sms or None}"] = model = self.wrapped(None)
            model.register_comm_hook(None, ddp_hook(self.comm, sms or None))
        plain = {name: copy.deepcopy(self.model) for name in ("alone", "after")}
        self.models |= plain | {"unreduced": unreduced, "overlapped": overlapped}
        found: dict[str, Step] = {
            "alone": lambda: self.passes("alone"),
            "unreduced": lambda: self.passes("unreduced"),
            "overlapped": lambda: self.passes("overlapped"),
            "after": lambda: self.average(self.passes("after")),
        }
        for name in (f"sms={sms or None}" for sms in self.limits):
            found[name] = lambda name=name: self.passes(name)
        if self.nccl is not None:
            self.models |= {"NCCL overlapped": self.wrapped(self.nccl), "NCCL after": copy.deepcopy(self.model)}
            found["NCCL overlapped"] = lambda: self.passes("NCCL overlapped")
            found["NCCL after"] = lambda: self.average_by_nccl(self.passes("NCCL after"))
        return found

    def wrapped(self, group: Any) -> Any:
        return DistributedDataParallel(
            copy.deepcopy(self.model), process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )

    def passes(self, name: str) -> list[torch.Tensor]:
        """Forward and backward pass of a way's model. Returns its gradients."""
        model = self.models[name]
        model.zero_grad()
        model(self.x).float().square().mean().backward()
        return self.gradients(name)

    def gradients(self, name: str) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.models[name].parameters()]

    def average(self, gradients: list[torch.Tensor]) -> None:
        self.comm.allreduce(gradients, "avg", out=gradients)

    def average_by_nccl(self, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self.nccl)

    def all_reduces(self) -> dict[str, Step]:
        """The all-reduces alone, of the gradients that the last step has left."""
        found: dict[str, Step] = {"all-reduces": lambda: self.average(self.gradients("after"))}
        if self.nccl is not None:
            found["NCCL all-reduces"] = lambda: self.average_by_nccl(self.gradients("NCCL after"))
        return found

    # ---- results
    def check(self, ways: dict[str, Step]) -> None:
        """Compare the first elements of each gradient with their mean over the ranks, computed on the host."""
        parts = {}
        for name, step in ways.items():
            for _ in range(18):  # from the second step on PyTorch uses several buckets, and our hook tries its ways
                step()
            self.clock.wait()
            parts[name] = torch.stack([grad.flatten()[:CHECKED].float().cpu() for grad in self.gradients(name)])
        everyone = [torch.empty_like(parts["alone"]) for _ in range(SIZE)]
        dist.all_gather(everyone, parts.pop("alone"))
        due = sum(everyone) / SIZE
        del parts["unreduced"]
        for name, found in parts.items():
            error = ((found - due).abs().amax(1) / due.abs().amax(1)).max()
            assert error <= TOLERANCE, f"{name}: the gradients are wrong, by {float(error):.1e}"

    # ---- times
    def times(self, ways: dict[str, Step], turns: int, steps: int) -> dict[str, float]:
        """Milliseconds a step, by way: the slowest rank's median over the turns.

        The GPU's clock falls within a second of matrix products, so such a second comes before each time.
        """
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, step in ways.items():
                begin = time.monotonic()
                while WORLD.allreduce(time.monotonic() - begin, MPI.MAX) < self.warm_seconds:
                    for _ in range(steps):
                        self.passes("alone")
                    self.clock.wait()
                step()
                self.clock.wait()
                WORLD.Barrier()
                begin = self.clock.now()
                for _ in range(steps):
                    step()
                end = self.clock.now()
                self.clock.wait()
                found[name].append(self.clock.between(begin, end) / steps)
        return {name: WORLD.allreduce(statistics.median(times), MPI.MAX) for name, times in found.items()}

    def marked(self, hook: Any) -> Any:
        """The hook, which notes when a bucket is full and when it is averaged, if that is wanted."""
        side = torch.cuda.Stream() if self.x.is_cuda else None

        def noting(state: Any, bucket: Any) -> Any:
            if self.marks is None:
                return hook(state, bucket)
            full = self.clock.now()
            future = hook(state, bucket)
            with torch.cuda.stream(side):  # does nothing for None
                future.wait()
                self.marks.append((full, self.clock.now()))
            return future

        noting.__annotations__.clear()
        return noting

    def timeline(self, step: Step) -> dict[str, Any]:
        """One overlapped step, in milliseconds from its start."""
        step()
        self.clock.wait()
        WORLD.Barrier()
        self.marks = []
        begin = self.clock.now()
        step()
        end = self.clock.now()
        self.clock.wait()
        marks, self.marks = self.marks, None
        buckets = [[round(self.clock.between(begin, one), 4) for one in pair] for pair in marks]
        return {"buckets": buckets, "end": round(self.clock.between(begin, end), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.overlap", description=__doc__)
    parser.add_argument("json", type=Path, nargs="?")
    for name, default in (("layers", 16), ("hidden", 4096), ("tokens", 2048), ("turns", 11), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--sms", type=int, nargs="*", default=[], help="further limits of the hook's blocks; 0 for none"
    )
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(RANK % torch.cuda.device_count())  # of one host
        device = torch.device("cuda", torch.cuda.current_device())
    join()
    with ipcreduce.Communicator(device=device.index, timeout=60) as comm:
        run = Run(comm, device, options)
        ways = run.ways()
        run.check(ways)
        times = run.times(ways | run.all_reduces(), options.turns, options.steps)
        timeline = run.timeline(ways["overlapped"])
        comm.synchronize()
        backend = comm.backend
    if RANK == 0:
        for name, ms in times.items():
            print(f"{name:16} {ms:9.3f} ms", flush=True)
        about = {name: getattr(options, name) for name in ("layers", "hidden", "tokens", "turns", "steps")}
        about |= {"ranks": SIZE, "backend": backend, "bucket_mb": BUCKET_MB}
        if options.json:
            rounded = {name: round(ms, 4) for name, ms in times.items()}
            report.write_json(
                options.json, report.header(sys.argv) | about | {"ms_of_step": rounded, "timeline_ms": timeline}
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
