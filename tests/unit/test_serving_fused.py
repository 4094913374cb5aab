"""The fused call that SGLang asks the all-reduce for, with stand-ins for PyTorch and the communicator."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from ipcreduce import serving
from ipcreduce.errors import PeerLostError


class Tensor:
    """What the all-reduce asks of a tensor."""

    def __init__(self, *shape: int, dtype: str = "bfloat16", device: str = "cuda:0", whole: bool = True) -> None:
        self.shape, self.dtype, self.device, self.whole = shape, dtype, device, whole

    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.whole


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The all-reduce's module, over a stand-in for PyTorch."""
    torch = types.ModuleType("torch")
    vars(torch).update({name: name for name in ("float16", "bfloat16", "float32", "int32")}, Tensor=Tensor)
    vars(torch).update(
        device=lambda name: types.SimpleNamespace(type=name, index=None),
        zeros=lambda count, dtype, device: np.zeros(count, np.float32),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "ipcreduce.serving.all_reduce", raising=False)
    monkeypatch.setattr(serving, "all_reduce", None, raising=False)  # the import sets it; it is undone afterwards
    found = importlib.import_module("ipcreduce.serving.all_reduce")
    sys.modules.pop("ipcreduce.serving.all_reduce")
    return found


@pytest.fixture
def comm(module: Any) -> Any:
    return a_reducer(module)


def a_reducer(module: Any) -> Any:
    """One over a communicator that returns the arguments of its call."""
    made = object.__new__(module.ServingAllReduce)
    made.device, made.max_size, made.disabled, made._takes_all = "cuda:0", 1024, False, False
    made._comm = types.SimpleNamespace(allreduce=lambda x: x, close=lambda: None)
    made._comm.allreduce_rmsnorm = lambda x, w, eps, *, residual, weight_bias: (x, w, eps, residual, weight_bias)
    made._count_calls()
    return made


def test_the_fused_call(comm: Any):
    x, residual, weight = Tensor(4, 64), Tensor(4, 64), Tensor(64)
    assert comm.fused_allreduce_rmsnorm(x, residual, weight, 1e-5) == (x, weight, 1e-5, residual, 0)
    large = Tensor(1000, 64)
    assert comm.fused_allreduce_rmsnorm(large, large, weight, 1e-5) is None
    assert comm.normalise(large, weight, None, 1e-5, 1.0) == (large, weight, 1e-5, None, 1), "vLLM cannot take another"


def test_what_the_fused_call_declines(comm: Any):
    x, weight = Tensor(4, 64), Tensor(64)
    others = [
        (Tensor(16, 64), Tensor(16, 64), weight),
        (Tensor(4, 64, dtype="int32"), Tensor(4, 64, dtype="int32"), Tensor(64, dtype="int32")),
        (Tensor(0, 64), Tensor(0, 64), weight),
        (Tensor(), Tensor(), weight),
        (x, Tensor(2, 64), weight),
        (x, x, Tensor(32)),
        (x, x, Tensor(64, dtype="float32")),
        (x, Tensor(4, 64, whole=False), weight),
        (x, x, Tensor(64, device="cuda:1")),
    ]
    for three in others:
        assert comm.fused_allreduce_rmsnorm(*three, 1e-6) is None
    comm.disabled = True
    assert comm.fused_allreduce_rmsnorm(x, x, weight, 1e-6) is None


def test_the_batch_does_not_decide_who_sums(comm: Any):
    """One row is always contiguous and small. Of a batch neither need be true."""
    batches = [Tensor(1, 64), Tensor(1000, 64), Tensor(4, 64, whole=False)]
    assert [comm.should_custom_ar(x) for x in batches] == [True, False, False]
    comm._takes_all = True
    assert all(comm.custom_all_reduce(x) is x for x in batches)
    assert not comm.should_custom_ar(Tensor(1, 64, dtype="bool"))
    assert not comm.should_custom_ar(Tensor(1, 64, device="cuda:1"))


def test_what_is_declined_is_said_once(comm: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "ipcreduce")
    others = [Tensor(1, dtype="bool"), Tensor(1, device="cuda:1"), Tensor(2, whole=False), Tensor(1000)]
    for _ in range(2):
        assert not any(comm.should_custom_ar(x) for x in others)
        assert comm.make_reduce_scatter(others[0], 0) is None
        assert comm.make_broadcast(others[1], 0) is None
        assert comm.make_all_gather([Tensor(2), others[1]], 0) is None
        assert comm.make_reduce_scatter(Tensor(2), 0, None, others[1]) is None
    assert caplog.messages == [
        f"ipcreduce leaves {kind} of tensors {why} to the server"
        for kind, why in [
            ("all-reduces", "of bool"), ("all-reduces", "on cuda:1"), ("all-reduces", "that are not contiguous"),
            ("all-reduces", "of more than 1024 bytes"), ("reduce-scatters", "of bool"), ("broadcasts", "on cuda:1"),
            ("all-gathers", "on cuda:1"), ("reduce-scatters", "on cuda:1"),
        ]
    ]  # fmt: skip
    comm.disabled = True
    assert comm.make_all_gather(Tensor(2), 0) is None
    assert len(caplog.messages) == 8, "why it is disabled was said before"


@pytest.mark.parametrize("text", ["0", "1"])
def test_what_is_taken_is_read_once(module: Any, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_BATCH_INVARIANT", text)
    group = types.SimpleNamespace(rank=0, size=1, allgather=lambda part: [part])
    reducer = module.ServingAllReduce(group, "cpu")
    reducer.close()
    assert reducer._takes_all == (text == "1")


@pytest.mark.parametrize("closed", [False, True])
def test_the_calls_served_are_told_once(module: Any, closed: bool, caplog: pytest.LogCaptureFixture):
    """At close(), or when the server drops the object; vLLM does only the second."""
    caplog.set_level("INFO", "ipcreduce")
    comm, x = a_reducer(module), Tensor(4, 64)
    comm.custom_all_reduce(x)
    comm.fused_allreduce_rmsnorm(x, x, Tensor(64), 1e-6)
    comm.custom_all_reduce(x)
    comm.custom_all_reduce(Tensor(1000, 64))  # too large
    first = [f"ipcreduce serves the server's {kind}" for kind in ("all-reduces", "all-reduces with RMSNorm")]
    assert caplog.messages[:-1] == first, "the first of each kind is told at once"
    if closed:
        comm.close()
        comm.close()
    told = "ipcreduce has served 3 calls"
    assert caplog.text.count(told) == closed
    assert comm._tell.atexit != closed  # also where the server drops it at its end only
    del comm
    gc.collect()
    assert caplog.text.count(told) == 1


def test_a_communicator_is_told_once(module: Any, caplog: pytest.LogCaptureFixture):
    """By itself, and not by the all-reduce, too. It is of one rank, over NumPy arrays in place of tensors."""
    caplog.set_level("INFO")
    group = types.SimpleNamespace(rank=0, size=1, allgather=lambda part: [part])
    reducer = module.ServingAllReduce(group, "cpu")
    try:
        assert not reducer.disabled
        [record] = caplog.records
        assert "made a communicator" in record.getMessage()
    finally:
        reducer.close()


def test_an_error_of_the_fused_call_is_in_the_log(comm: Any, caplog: pytest.LogCaptureFixture):
    def fail(*_: Any, **__: Any) -> None:
        raise PeerLostError("rank 1 is gone")

    comm._comm.allreduce_rmsnorm = fail
    with pytest.raises(PeerLostError):
        comm.fused_allreduce_rmsnorm(Tensor(4, 64), Tensor(4, 64), Tensor(64), 1e-6)
    assert "an all-reduce with RMSNorm failed" in caplog.text
    assert "rank 1 is gone" in caplog.text
