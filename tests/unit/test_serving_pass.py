"""The pass for vLLM's compiled graphs: real graphs of PyTorch, with stand-ins for vLLM's operators and classes."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipcreduce import serving
from ipcreduce.errors import UnsupportedError

torch = pytest.importorskip("torch")
fx_of = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx

GROUP, EPS = "tp:0", 1e-5
HIDDEN = 16


def normalised(x: Any, weight: Any, eps: float) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def added(x: Any, residual: Any, weight: Any, eps: float, size: int | None = None) -> Any:
    total = x + residual
    return normalised(total, weight, eps), total


class Seat:
    """An all-reduce of two ranks with the same values, which notes the calls of the operator."""

    def __init__(self) -> None:
        self.biases: list[float] = []

    def normalise(self, x: Any, weight: Any, residual: Any, eps: float, weight_bias: float) -> Any:
        self.biases.append(weight_bias)
        total = 2 * x if residual is None else 2 * x + residual
        return normalised(total, weight.float() + weight_bias, eps), total


@pytest.fixture(autouse=True)
def _caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch's compiler would set it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def fusion() -> Iterator[Any]:
    """The module, and vLLM's operators as PyTorch sees them."""
    libraries = [torch.library.Library(name, "DEF") for name in ("vllm", "vllm_ir")]
    theirs, ir = libraries
    theirs.define("all_reduce(Tensor x, str group_name) -> Tensor")
    theirs.impl("all_reduce", lambda x, group_name: 2 * x, "CompositeExplicitAutograd")
    ir.define("rms_norm(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor")
    ir.impl("rms_norm", lambda x, weight, eps, size=None: normalised(x, weight, eps), "CompositeExplicitAutograd")
    ir.define(
        "fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, int? variance_size=None) "
        "-> (Tensor, Tensor)"
    )
    ir.impl("fused_add_rms_norm", added, "CompositeExplicitAutograd")
    found = importlib.import_module("ipcreduce.serving.fusion")
    yield found
    for library in libraries:
        library._destroy()


@pytest.fixture
def seat(fusion: Any) -> Seat:
    made = Seat()
    SEATS[GROUP] = made
    fusion.define(SEATS.__getitem__)
    return made


SEATS: dict[str, Seat] = {}


def all_reduce(x: Any, group: str = GROUP) -> Any:
    return torch.ops.vllm.all_reduce(x, group_name=group)


def norm(x: Any, weight: Any, *size: int) -> Any:
    return torch.ops.vllm_ir.rms_norm(x, weight, EPS, *size)


def add_norm(x: Any, residual: Any, weight: Any, *size: int) -> Any:
    return torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, EPS, *size)


def layers(x: Any, residual: Any, weight: Any) -> Any:
    """As a model: the embedding's sum is the first residual; of the last norm, the residual is not used."""
    first = all_reduce(x)
    y = norm(first, weight)
    z, total = add_norm(all_reduce(y), first, weight)
    return add_norm(all_reduce(z), total, weight)[0]


def gemma(x: Any, residual: Any, weight: Any) -> Any:
    first = all_reduce(x)
    y = norm(first, weight.float() + 1.0)
    return add_norm(all_reduce(y), first, weight.float() + 1.0)


CASES: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "layers": (layers, [0.0, 0.0, 0.0]),
    "Gemma": (gemma, [1.0, 1.0]),
    "the sum is used elsewhere": (lambda x, r, w: (t := all_reduce(x), *add_norm(t, r, w)), []),
    "another group": (lambda x, r, w: add_norm(all_reduce(x, "dp:0"), r, w), []),
    "a mean over a part": (lambda x, r, w: (norm(all_reduce(x), w, 8), add_norm(all_reduce(x), r, w, 8)), []),
    "a weight of another dtype": (lambda x, r, w: add_norm(all_reduce(x), r, w.float()), []),
    "a weight that is made": (lambda x, r, w: norm(all_reduce(x), w * 2), []),
    "another sum": (lambda x, r, w: norm(2 * x, w), []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_gives_the_same_after_the_pass(name: str, fusion: Any, seat: Seat):
    model, biases = CASES[name]
    generator = torch.Generator().manual_seed(1)
    x, residual, weight = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((4, HIDDEN), (4, HIDDEN), (HIDDEN,))
    )
    graph = fx_of(model, tracing_mode="fake")(x, residual, weight)
    expected = graph(x, residual, weight)
    assert fusion.fuse(graph.graph, GROUP) == len(biases)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(x, residual, weight), expected, rtol=0, atol=0)
    assert seat.biases == biases
    ours = [node for node in graph.graph.nodes if "ipcreduce_serving" in str(node.target)]
    for node in ours:
        assert node.meta.keys() == {"val"}, "the rest describes the old operator's arguments, and misleads the compiler"
        found = node.meta["val"]
        assert [(tuple(one.shape), one.dtype) for one in found] == 2 * [((4, HIDDEN), torch.bfloat16)]


def test_the_operator_in_a_compiled_function(fusion: Any, seat: Seat):
    def function(x: Any, residual: Any, weight: Any) -> Any:
        y, total = torch.ops.ipcreduce_serving.all_reduce_rmsnorm(x, weight, residual, EPS, 0.0, GROUP)
        return y + 1, total

    args = torch.ones(2, HIDDEN), torch.ones(2, HIDDEN), torch.ones(HIDDEN)
    with torch.inference_mode():
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
        torch.testing.assert_close(compiled, function(*args))


# ---- in vLLM
class Manager:
    """vLLM's own, with two passes."""

    def configure(self, config: Any) -> None:
        self.passes = ["no-ops", "norms"] if config.compilation_config.pass_config.eliminate_noops else ["norms"]


@pytest.fixture
def vllm(fusion: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for what the pass and the plug-in take of vLLM; its group has our seat."""
    seat = importlib.import_module("ipcreduce.serving.seat")
    comm = object.__new__(seat.EngineAllReduce)
    comm.disabled, comm._comm = False, types.SimpleNamespace(close=lambda: None)
    comm._count_calls()
    group = types.SimpleNamespace(unique_name=GROUP, device_communicator=types.SimpleNamespace(ca_comm=comm))
    config = type("VllmConfig", (), {"compute_hash": lambda self: "theirs"})
    modules = {
        "vllm": {}, "vllm.compilation": {}, "vllm.compilation.passes": {}, "vllm.config": {"VllmConfig": config},
        "vllm.compilation.passes.inductor_pass": {"InductorPass": object},
        "vllm.compilation.passes.pass_manager": {"PostGradPassManager": Manager},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group, "_groups": {GROUP: lambda: group}},
    }  # fmt: skip
    for name, values in modules.items():
        made = types.ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(sys.modules, name, made)
    distributed = types.ModuleType("vllm.distributed")
    distributed.parallel_state = sys.modules["vllm.distributed.parallel_state"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.delitem(sys.modules, "ipcreduce.serving.passes", raising=False)
    passes = importlib.import_module("ipcreduce.serving.passes")
    sys.modules.pop("ipcreduce.serving.passes")
    return types.SimpleNamespace(passes=passes, comm=comm, group=group, config=config)


def configured(vllm: Any, **settings: bool) -> Any:
    manager = vllm.passes.PassManager()
    pass_config = types.SimpleNamespace(**{"eliminate_noops": True, **settings})
    manager.configure(types.SimpleNamespace(compilation_config=types.SimpleNamespace(pass_config=pass_config)))
    return manager.passes


def test_our_pass_comes_before_those_of_norms(vllm: Any, seat: Seat, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "ipcreduce")
    first, ours, last = configured(vllm)
    assert (first, last) == ("no-ops", "norms")
    assert configured(vllm, eliminate_noops=False)[1:] == ["norms"]
    assert len(configured(vllm, enable_sp=False)) == 3
    graph = fx_of(layers, tracing_mode="fake")(torch.ones(4, HIDDEN), torch.ones(4, HIDDEN), torch.ones(HIDDEN))
    ours(graph.graph)
    assert "3 all-reduces of a compiled graph now include the RMSNorm" in caplog.text
    assert ours.uuid() == vllm.passes.FusedNorms(GROUP).uuid() != vllm.passes.FusedNorms("tp:1").uuid()


def test_without_our_all_reduce_there_is_no_pass(vllm: Any, caplog: pytest.LogCaptureFixture):
    assert configured(vllm, enable_sp=True) == ["no-ops", "norms"]
    vllm.comm.disabled = True
    assert configured(vllm) == ["no-ops", "norms"]
    vllm.group.device_communicator.ca_comm = None
    assert configured(vllm) == ["no-ops", "norms"]
    assert caplog.text.count("IPCREDUCE_FUSED has no effect") == 3
    with pytest.raises(UnsupportedError, match=r"tp:0 has no all-reduce of ipcreduce\. Unset IPCREDUCE_FUSED"):
        serving._seat_of(GROUP)


def test_the_plug_in_brings_the_pass(vllm: Any, fusion: Any, monkeypatch: pytest.MonkeyPatch):
    assert serving._seat_of(GROUP) is vllm.comm
    platform = type("Platform", (), {})()
    defined: list[Any] = []
    monkeypatch.setattr(fusion, "define", defined.append)
    serving._bring_the_pass.cache_clear()
    for _ in range(2):
        serving._bring_the_pass(platform)
    assert defined == [serving._seat_of]
    assert platform.get_pass_manager_cls() == "ipcreduce.serving.passes.PassManager"
    assert vllm.config().compute_hash().count("ipcreduce") == 1, "vLLM's cache tells graphs with our operator apart"
    assert vllm.config().compute_hash().startswith("theirs")


def test_a_disabled_seat_raises(vllm: Any):
    vllm.comm.disabled = True
    with pytest.raises(UnsupportedError, match="Start the engine without its fused pass"):
        vllm.comm.normalise(None, None, None, EPS)
