"""The collectives of the servers' objects, with stand-ins for the servers, the all-reduce and PyTorch.

tests/gpu/serving.py has them over a real reducer.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest

from ipcreduce import serving
from ipcreduce.errors import UnsupportedError


class Reducer:
    """One that gives its calls back, or declines them."""

    takes = True

    def make_all_gather(self, *given: Any) -> Any:
        return ("all_gather", *given) if self.takes else None

    def make_reduce_scatter(self, *given: Any) -> Any:
        return ("reduce_scatter", *given) if self.takes else None

    def make_broadcast(self, *given: Any) -> Any:
        return ("broadcast", *given) if self.takes else None


class Server:
    """An object of a server, which gives the names and the arguments of its own methods back."""

    def __init__(self) -> None:
        self.ca_comm: Any = Reducer()
        self.pynccl_comm = types.SimpleNamespace(disabled=False)


def own(name: str) -> Any:
    return lambda self, *given: (f"own {name}", *given)


class Tensor:
    """What the methods ask of a tensor."""

    def __init__(self, text: str, whole: bool = True) -> None:
        self.text, self.whole = text, whole

    def is_contiguous(self) -> bool:
        return self.whole

    def reshape(self, form: int) -> str:
        return f"{self.text} reshaped"

    def view(self, form: int) -> str:
        assert self.whole
        return f"{self.text} viewed"


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Any:
    reducer = types.ModuleType("ipcreduce.serving.all_reduce")
    vars(reducer)["ServingAllReduce"] = Reducer
    torch = types.ModuleType("torch")
    vars(torch)["compiler"] = types.SimpleNamespace(is_compiling=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, reducer.__name__, reducer)
    monkeypatch.delitem(sys.modules, "ipcreduce.serving.methods", raising=False)
    monkeypatch.setattr(serving, "methods", None, raising=False)  # the import sets it; it is undone afterwards
    found = importlib.import_module("ipcreduce.serving.methods")
    yield found
    sys.modules.pop("ipcreduce.serving.methods")


VLLM = "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "reduce_scatterv_into_output", "broadcast"
SGLANG = (
    "all_gather", "_all_gather_into_tensor", "all_gatherv", "_reduce_scatter_tensor", "reduce_scatter_tensor",
    "reduce_scatterv", "broadcast",
)  # fmt: skip


def served(methods: Any, kind: str, names: tuple[str, ...]) -> Any:
    made = type("Theirs", (Server,), {name: own(name) for name in names})()
    methods.give(made, getattr(methods, kind))
    return made


def test_the_calls_of_a_reducer(methods: Any):
    vllm = served(methods, "CommunicatorMethods", VLLM)
    assert vllm.all_gather("x") == ("all_gather", "x", -1, None, None)
    assert vllm.all_gatherv("x", sizes=[1, 2]) == ("all_gather", "x", 0, [1, 2], None)
    assert vllm.reduce_scatter("x", 1) == ("reduce_scatter", "x", 1, None, None)
    assert vllm.reduce_scatterv("x", 0, [1, 2]) == ("reduce_scatter", "x", 0, [1, 2], None)
    assert vllm.reduce_scatterv_into_output("x", "y", 0, [1, 2]) == ("reduce_scatter", "x", 0, [1, 2], "y")
    assert vllm.broadcast("x", 1) == ("broadcast", "x", 1)
    sglang = served(methods, "SGLangMethods", SGLANG)
    assert sglang.all_gather("x", 1) == ("all_gather", "x", 1, None, None)
    assert sglang.all_gatherv("x", [1, 2], "y") == [("all_gather", "x", 0, [1, 2], "y")]
    assert sglang.reduce_scatterv("x", "y", [1, 2]) == ("reduce_scatter", "x", 0, [1, 2], "y")
    assert sglang.broadcast("x") == ("broadcast", "x", 0)
    assert sglang._all_gather_into_tensor(Tensor("y"), Tensor("x")) is None
    y = Tensor("y")
    assert sglang._reduce_scatter_tensor(y, Tensor("x")) is y


@pytest.mark.parametrize("how", ["declined", "taken away", "another"])
def test_what_is_declined_is_the_servers(methods: Any, how: str):
    for kind, names in (("CommunicatorMethods", VLLM), ("SGLangMethods", SGLANG)):
        made = served(methods, kind, names)
        if how == "declined":
            made.ca_comm.takes = False
        else:
            made.ca_comm = None if how == "taken away" else types.SimpleNamespace(**dict.fromkeys(VLLM, id))
        assert made.all_gather("x", 1)[:3] == ("own all_gather", "x", 1)
        assert made.all_gatherv("x", 0, [1])[0] == "own all_gatherv"
        assert made.reduce_scatterv("x", 0, [1]) == ("own reduce_scatterv", "x", 0, [1])
        assert made.broadcast("x", 1) == ("own broadcast", "x", 1)
        if kind == "CommunicatorMethods":
            assert made.reduce_scatter("x") == ("own reduce_scatter", "x", -1)
        else:
            y = Tensor("y")
            assert made._reduce_scatter_tensor(y, Tensor("x"))[:2] == ("own _reduce_scatter_tensor", y)


@pytest.mark.parametrize("comm", [None, types.SimpleNamespace(disabled=True)])
def test_vllm_without_nccl(methods: Any, comm: Any):
    """Its reduce-scatters would return what an allocation holds."""
    vllm = served(methods, "CommunicatorMethods", VLLM)
    vllm.pynccl_comm = comm
    assert vllm.reduce_scatter("x")[0] == "reduce_scatter"
    vllm.ca_comm.takes = False
    for call in (lambda: vllm.reduce_scatter("x"), lambda: vllm.reduce_scatterv("x")):
        with pytest.raises(UnsupportedError, match=r"VLLM_DISABLE_PYNCCL leaves vLLM no other\. Unset it"):
            call()
    assert vllm.all_gather("x") == ("own all_gather", "x", -1), "which has PyTorch's"


def test_sglang_leaves_some_calls(methods: Any, monkeypatch: pytest.MonkeyPatch):
    """Strided outputs, lists of outputs, and compiled code, whose operators call the two that are ours."""
    called: list[str] = []
    sglang = served(methods, "SGLangMethods", SGLANG)
    theirs = type(sglang).__mro__[2:]
    for name in ("_all_gather_into_tensor", "reduce_scatter_tensor"):
        [kind] = [one for one in theirs if name in vars(one)]
        monkeypatch.setattr(kind, name, lambda self, *given, name=name: called.append(name))
    assert sglang.all_gather("x", 0, ["y"]) == ("own all_gather", "x", 0, ["y"])
    sglang._all_gather_into_tensor(Tensor("y", whole=False), Tensor("x"))
    sglang.reduce_scatter_tensor(Tensor("y", whole=False), Tensor("x"))
    assert called == ["_all_gather_into_tensor", "reduce_scatter_tensor"]
    sglang.reduce_scatter_tensor(Tensor("y"), Tensor("x"))
    assert len(called) == 2
    monkeypatch.setattr(sys.modules["torch"].compiler, "is_compiling", lambda: True)
    sglang.reduce_scatter_tensor(Tensor("y"), Tensor("x"))
    assert called[2:] == ["reduce_scatter_tensor"]
    assert sglang.all_gather("x", 0) == ("own all_gather", "x", 0, None)
    package = methods.__file__.rpartition("serving")[0]
    for name in ("all_gather", "reduce_scatter_tensor"):
        code = getattr(methods.SGLangMethods, name).__code__
        assert not code.co_filename.startswith(package), "torch.compile skips the package's files"
