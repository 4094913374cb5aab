"""``ipcreduce.torch.ddp_hook`` in DistributedDataParallel over gloo, on the GPUs that the ranks have, else on the host.

``mpirun -n 2 python tests/mpi/ddp_worker.py scenario ...``: each function among the scenarios runs on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ipcreduce
from ipcreduce import ArgumentError, PeerFailedError, PeerLostError
from ipcreduce.torch import ddp_hook
from tests.shared import worker
from tests.shared.bounds import until

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
WIDTH = 600  # a layer has 1.4 MB, so that there are several buckets of 1 MB, from the second step on
comm = ipcreduce.Communicator(device="auto", timeout=60)
DEVICE = torch.device("cpu") if comm.backend == "host" else torch.device("cuda", torch.cuda.current_device())


class Fails(torch.autograd.Function):
    """The identity, whose derivative raises while ``now`` is set."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fails.now:
            raise KeyError("the derivative")
        return gradient


class Model(nn.Module):
    """Three layers, of which the middle one may be left out. The derivative may fail behind the first bucket.

    :ivar reentrant: the last layer has a backward pass of its own, within that of the others.
    """

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
        first, middle, last = self.layers
        x = Fails.apply(first(x).relu())
        x = x if short else middle(x).relu()
        return checkpoint(last, x, use_reentrant=True) if self.reentrant else last(x)


def wrapped(hook: Any = None, dtype: torch.dtype = torch.float32, state: Any = None, **options: Any) -> Any:
    """A model in DistributedDataParallel, with a hook unless it is None."""
    model = DistributedDataParallel(Model().to(DEVICE, dtype), bucket_cap_mb=1, **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return model


def batch(step: int, dtype: torch.dtype = torch.float32, rank: int = RANK) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTH, generator=generator).to(DEVICE, dtype)


def loss(y: torch.Tensor) -> torch.Tensor:
    return (y.float() ** 2).mean()


class Seen:
    """A hook around another one, which keeps each bucket's gradients from before, and its parameters."""

    def __init__(self, hook: Any) -> None:
        self.buckets: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

        def seen(state: Any, bucket: Any) -> Any:
            self.buckets.append((bucket.buffer().clone(), bucket.parameters()))
            return hook(state, bucket)

        seen.__annotations__.clear()
        self.hook = seen


def array_of(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (
        tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    )


def mean(values: np.ndarray) -> np.ndarray:
    """NumPy's mean over the ranks, summed in their order in float32 and rounded once."""
    everyone = [np.frombuffer(data, values.dtype) for data in WORLD.allgather(values.tobytes())]
    total = everyone[0].astype(np.float32)
    for other in everyone[1:]:
        total = total + other.astype(np.float32)
    return (total / np.float32(SIZE)).astype(values.dtype)


def same_bits(seen: Seen) -> int:
    """Check the gradients that a backward pass has left against NumPy's means. Returns the number of buckets."""
    for before, parameters in seen.buckets:
        found = array_of(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        assert found.tobytes() == mean(array_of(before)).tobytes(), "other bits than NumPy's"
    count = len(seen.buckets)
    seen.buckets.clear()
    return count


def bits() -> None:
    """float32 and bfloat16, buckets that are the gradients and others, automatic mixed precision."""
    for dtype, views, mixed in (
        (torch.float32, False, False), (torch.float32, True, False), (torch.bfloat16, True, False),
        (torch.bfloat16, False, False), (torch.float32, True, True),
    ):  # fmt: skip
        seen = Seen(ddp_hook(comm))
        model = wrapped(seen.hook, dtype, gradient_as_bucket_view=views)
        counts = []
        for step in range(3):
            model.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mixed):
                y = model(batch(step, dtype))
            assert not mixed or y.dtype is torch.bfloat16
            loss(y).backward()
            counts.append(same_bits(seen))
        assert min(counts[1:]) > 1, counts


def unsynchronised() -> None:
    """Two batches within ``no_sync()`` and a third behind it make no call before the third's, on all three."""
    seen = Seen(ddp_hook(comm))
    model = wrapped(seen.hook)
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            calls = comm._state.calls.number
            for part in range(2):
                loss(model(batch(3 * step + part))).backward()
            assert comm._state.calls.number == calls
        loss(model(batch(3 * step + 2))).backward()
        same_bits(seen)
        alone = Model().to(DEVICE)
        for part in range(3):
            (sum(loss(alone(batch(3 * step + part, rank=rank))) for rank in range(SIZE)) / SIZE).backward()
        for own, due in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad, due.grad, rtol=1e-4, atol=1e-6)


def unused() -> None:
    """A layer that one rank does not use counts as zeros there; one that none uses keeps its gradient."""
    seen = Seen(ddp_hook(comm))
    model = wrapped(seen.hook, find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        loss(model(batch(step), short=RANK == 0)).backward()
        own = model.module.layers[1].weight.grad
        if SIZE == 1:
            assert own is None
            continue
        same_bits(seen)
        assert bool((own != 0).any())
    model.zero_grad()
    loss(model(batch(3), short=True)).backward()
    assert model.module.layers[1].weight.grad is None


def static() -> None:
    """``static_graph=True``, whose first step calls the hook at the end of the backward pass, and ``join()``."""
    seen = Seen(ddp_hook(comm))
    model = wrapped(seen.hook, static_graph=True)
    for step in range(3):
        model.zero_grad()
        loss(model(batch(step))).backward()
        same_bits(seen)
    model = wrapped(ddp_hook(comm))
    with model.join():
        for step in range(2 + RANK):  # the last rank has more batches
            model.zero_grad()
            loss(model(batch(step))).backward()
    comm.synchronize()
    assert comm.allreduce(1) == SIZE


def as_without() -> None:
    """After 50 steps the weights are within 1e-5 of those of DistributedDataParallel alone, relative to the largest."""
    trained = []
    for hook in (None, ddp_hook(comm)):
        model = wrapped(hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(50):
            optimizer.zero_grad()
            loss(model(batch(step % 5)) - 1).backward()
            optimizer.step()
        trained.append([parameter.detach() for parameter in model.parameters()])
    initial = [parameter.detach().to(DEVICE) for parameter in Model().parameters()]
    worst = 0.0
    for theirs, ours, before in zip(*trained, initial, strict=True):
        assert float((theirs - before).abs().max()) > 1e-3, "nothing was trained"
        worst = max(worst, float((theirs - ours).abs().max() / theirs.abs().max()))
        everyone = WORLD.allgather(array_of(ours).tobytes())
        assert len(set(everyone)) == 1, "the ranks have different weights"
    assert worst <= 1e-5, worst
    if RANK == 0:
        print(f"largest difference of a weight after 50 steps, relative: {worst:.1e}")


def step_of(model: Any, step: int = 0) -> None:
    """A step to its end, where what went wrong on the GPU is known too."""
    loss(model(batch(step))).backward()
    comm.synchronize()


@contextlib.contextmanager
def failing(own: type[Exception], words: str, kind: type[Exception] = PeerFailedError) -> Iterator[None]:
    """In the block the last rank raises an error of its own, and the others hear of it."""
    with pytest.raises(own if RANK == SIZE - 1 else kind, match=None if RANK == SIZE - 1 else words):
        yield


class Broken:
    """A bucket without gradients."""

    def __init__(self, bucket: Any) -> None:
        self.index = bucket.index

    def buffer(self) -> torch.Tensor:
        raise KeyError("the buffer")


def failures() -> None:
    """If one rank's hook raises, or its backward pass elsewhere, every rank's backward() does. Then the ranks go on."""
    if SIZE == 1:
        return
    broken = [False]
    hook = ddp_hook(comm)

    def inside(state: Any, bucket: Any) -> Any:
        return hook(state, Broken(bucket) if broken[0] and bucket.index() == 1 else bucket)

    def outside(state: Any, bucket: Any) -> Any:
        if broken[0] and bucket.index() == 1:
            raise KeyError("the program's own hook")
        return hook(state, bucket)

    for one in (inside, outside):
        one.__annotations__.clear()
    for case, used, words in (
        ("inside", inside, "raised an error .*'the buffer'"),
        ("outside", outside, "its backward pass raised an exception"),
        ("derivative", hook, "its backward pass raised an exception"),
        ("derivative behind a pass within", hook, "its backward pass raised an exception"),
    ):
        model = wrapped(used)
        model.module.reentrant = case == "derivative behind a pass within"
        step_of(model)  # from now on it has several buckets
        step_of(model, 1)
        Fails.now = case.startswith("derivative") and RANK == SIZE - 1
        broken[0] = not Fails.now and RANK == SIZE - 1
        with failing(KeyError, words):
            step_of(model, 2)
        broken[0] = Fails.now = False
        if RANK == SIZE - 1:  # PyTorch may drop the failed pass in another thread
            until(lambda: comm._state.calls.raised, "the word to the others")
        assert comm.allreduce(1) == SIZE, "the communicator does not go on"
    step_of(wrapped(hook))


def left() -> None:
    """A program that leaves the communicator's block before its first bucket does not keep the others waiting."""
    if SIZE == 1:
        return
    words = "its program left the communicator's block by KeyError"
    with failing(KeyError, words, PeerLostError), ipcreduce.Communicator(device="auto", timeout=60) as own:
        model = wrapped(ddp_hook(own))
        loss(model(batch(0))).backward()
        y = loss(model(batch(1)))
        if RANK == SIZE - 1:
            raise KeyError
        y.backward()
        own.synchronize()


def groups() -> None:
    """The model's group has to be the ranks in their order. Otherwise every rank raises, in its first backward pass."""
    turned = WORLD.Split(0, -RANK)
    pairs = [dist.new_group([rank]) for rank in range(SIZE)]
    words = "the model's process group is not the communicator's ranks: rank 0 of"
    cases: list[tuple[Any, Any, Any, str]] = [(comm, "mine", None, "the hook's state is a str. Pass None")]
    if SIZE > 1:
        cases.append((ipcreduce.Communicator(turned, device="auto", timeout=60), None, None, words))
        cases.append((ipcreduce.Communicator(MPI.COMM_SELF, device="auto", timeout=60), None, None, words))
        cases.append((comm, pairs[RANK], pairs[RANK], words))
    for one, state, group, expected in cases:
        model = wrapped(ddp_hook(one), state=state, process_group=group)
        with pytest.raises(ArgumentError, match=expected):
            loss(model(batch(0))).backward()
        assert one.allreduce(1) == one.size, "the communicator does not go on"
    own = ipcreduce.Communicator(MPI.COMM_SELF, device="auto", timeout=60)
    model = wrapped(ddp_hook(own), state=pairs[RANK], process_group=pairs[RANK])
    loss(model(batch(0))).backward()
    model = wrapped(ddp_hook(comm), state=dist.group.WORLD)
    loss(model(batch(0))).backward()
    with pytest.raises(ArgumentError, match=r"comm is a Intracomm.*Call ddp_hook\(comm\)"):
        ddp_hook(WORLD)
    copy.deepcopy(ddp_hook(comm))
    for one, *_ in cases[1:3]:
        one.close()
    own.close()
    turned.Free()


SCENARIOS = [bits, unsynchronised, unused, static, as_without, failures, left, groups]


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("localhost", 0, SIZE, True, wait_for_workers=False) if RANK == 0 else None
    port = WORLD.bcast(store.port if store else None)
    store = store or dist.TCPStore("localhost", port, SIZE, False)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)
    worker.play(SCENARIOS, sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    worker.run(main)
