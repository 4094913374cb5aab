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


def added_in_place(x: Any, residual: Any, weight: Any, eps: float) -> None:
    rows, total = added(x, residual, torch.ones(()) if weight is None else weight, eps)
    x.copy_(rows)
    residual.copy_(total)


def added(x: Any, residual: Any, weight: Any, eps: float, size: int | None = None) -> Any:
    total = x + residual
    return normalised(total, weight, eps), total


def to_e4m3(rows: Any, scale: Any) -> Any:
    """As vLLM writes it by default."""
    return (rows.to(torch.float32) * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)


def quantise_into(result: Any, rows: Any, scale: Any, parts: Any) -> None:
    result[: rows.shape[0]].copy_(to_e4m3(rows, scale))


class Reducer:
    """An all-reduce of two ranks with the same values, which notes the calls of the operators."""

    def __init__(self) -> None:
        self.biases: list[float] = []
        self.scales = 0

    def normalise(self, x: Any, weight: Any, residual: Any, eps: float, weight_bias: float, scale: Any) -> Any:
        self.biases.append(weight_bias)
        self.scales += scale is not None
        total = 2 * x if residual is None else 2 * x + residual
        rows = normalised(total, weight.float() + weight_bias, eps)
        return rows if scale is None else to_e4m3(rows, scale), total


@pytest.fixture(autouse=True)
def _caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch's compiler would set it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def fusion() -> Iterator[Any]:
    """The module, and vLLM's operators as PyTorch sees them."""
    libraries = [torch.library.Library(name, "DEF") for name in ("vllm", "vllm_ir", "_C")]
    theirs, ir, kernels = libraries
    theirs.define("all_reduce(Tensor x, str group_name) -> Tensor")
    theirs.impl("all_reduce", lambda x, group_name: 2 * x, "CompositeExplicitAutograd")
    ir.define("rms_norm(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor")
    ir.impl("rms_norm", lambda x, weight, eps, size=None: normalised(x, weight, eps), "CompositeExplicitAutograd")
    ir.define(
        "fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, int? variance_size=None) "
        "-> (Tensor, Tensor)"
    )
    ir.impl("fused_add_rms_norm", added, "CompositeExplicitAutograd")
    kernels.define("static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape) -> ()")
    kernels.impl("static_scaled_fp8_quant", quantise_into, "CompositeExplicitAutograd")
    kernels.define("fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()")
    kernels.impl("fused_add_rms_norm", added_in_place, "CompositeExplicitAutograd")
    found = importlib.import_module("ipcreduce.serving.fusion")
    yield found
    for library in libraries:
        library._destroy()


@pytest.fixture
def reducer(fusion: Any) -> Reducer:
    made = Reducer()
    REDUCERS[GROUP] = made
    fusion.define(REDUCERS.__getitem__)
    return made


REDUCERS: dict[str, Reducer] = {}


def all_reduce(x: Any, group: str = GROUP) -> Any:
    return torch.ops.vllm.all_reduce(x, group_name=group)


def norm(x: Any, weight: Any, *size: int) -> Any:
    return torch.ops.vllm_ir.rms_norm(x, weight, EPS, *size)


def add_norm(x: Any, residual: Any, weight: Any, *size: int) -> Any:
    return torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, EPS, *size)


def functional(name: str, *places: int, **given: Any) -> Any:
    """An operator of vLLM's kernels in a functional graph, and what it has written."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    results = auto_functionalized(getattr(torch.ops._C, name).default, **given)
    return tuple(results[place] for place in places)


def quantise(rows: Any, scale: Any, parts: Any = (-1, -1), more: int = 0) -> Any:
    """By vLLM's operator; with some rows more at the end, of padding."""
    result = torch.zeros(rows.shape[0] + more, rows.shape[1], dtype=torch.float8_e4m3fn)
    given = {"result": result, "input": rows, "scale": scale, "group_shape": parts}
    return functional("static_scaled_fp8_quant", 1, **given)[0]


def kernel_norm(x: Any, residual: Any, weight: Any) -> Any:
    """By vLLM's kernel, as with its custom operator under VLLM_BATCH_INVARIANT."""
    return functional("fused_add_rms_norm", 1, 2, input=x, residual=residual, weight=weight, epsilon=EPS)


def quantised_layers(how: Callable[..., Any]) -> Callable[..., Any]:
    """All norms of a model, each with a quantisation behind it; of some, one rank has more uses."""

    def model(x: Any, residual: Any, weight: Any, scale: Any) -> Any:
        first = all_reduce(x)
        y = how(norm(first, weight), scale).to(x.dtype)
        z, total = add_norm(all_reduce(y), first, weight)
        z = how(z, scale).to(x.dtype)
        rows, total = add_norm(all_reduce(z), total, weight.float() + 1.0)
        return how(rows, scale).to(x.dtype), total

    return model


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


def with_kernels(x: Any, residual: Any, weight: Any) -> Any:
    y, total = kernel_norm(all_reduce(x), residual, weight)
    return kernel_norm(all_reduce(y), total, weight)


CASES: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "layers": (layers, [0.0, 0.0, 0.0]),
    "Gemma": (gemma, [1.0, 1.0]),
    "vLLM's kernel": (with_kernels, [0.0, 0.0]),
    "vLLM's kernel, of another sum": (lambda x, r, w: kernel_norm(2 * x, r, w), []),
    "vLLM's kernel without a weight": (lambda x, r, w: kernel_norm(all_reduce(x), r, None), []),
    "the sum is used elsewhere": (lambda x, r, w: (t := all_reduce(x), *add_norm(t, r, w)), []),
    "another group": (lambda x, r, w: add_norm(all_reduce(x, "dp:0"), r, w), []),
    "a mean over a part": (lambda x, r, w: (norm(all_reduce(x), w, 8), add_norm(all_reduce(x), r, w, 8)), []),
    "a weight of another dtype": (lambda x, r, w: add_norm(all_reduce(x), r, w.float()), []),
    "a residual of another dtype": (lambda x, r, w: add_norm(all_reduce(x), r.float(), w), []),
    "a weight that is made": (lambda x, r, w: norm(all_reduce(x), w * 2), []),
    "another sum": (lambda x, r, w: norm(2 * x, w), []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_gives_the_same_after_the_pass(name: str, fusion: Any, reducer: Reducer):
    model, biases = CASES[name]
    generator = torch.Generator().manual_seed(1)
    x, residual, weight = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((4, HIDDEN), (4, HIDDEN), (HIDDEN,))
    )
    for node in fused(fusion, model, (x, residual, weight), len(biases)):
        found = node.meta["val"]
        assert [(tuple(one.shape), one.dtype) for one in found] == 2 * [((4, HIDDEN), torch.bfloat16)]
    assert reducer.biases == biases


def fused(fusion: Any, model: Callable[..., Any], given: tuple[Any, ...], count: int) -> list[Any]:
    """Our operators in a model's graph, of which so many are replaced, and which still gives what it gave."""
    decompositions = importlib.import_module("torch._inductor.decomposition").select_decomp_table()
    graph = fx_of(model, tracing_mode="fake", decomposition_table=decompositions)(*given)
    expected = graph(*given)
    assert fusion.fuse(graph.graph, GROUP) == count
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*given), expected, rtol=0, atol=0)
    left = [node for node in graph.graph.nodes if "vllm" in str(node.target)]
    assert count == 0 or not left, "nothing of what was replaced is still called"
    ours = [node for node in graph.graph.nodes if "ipcreduce_serving" in str(node.target)]
    for node in ours:
        assert node.meta.keys() == {"val"}, "the rest describes the old operator's arguments, and misleads the compiler"
    return ours


def clamped(least: float, most: float, dtype: str = "float8_e4m3fn") -> Callable[..., Any]:
    def how(rows: Any, scale: Any) -> Any:
        return (rows.to(torch.float32) * scale.reciprocal()).clamp(least, most).to(getattr(torch, dtype))

    return how


QUANTISED: dict[str, tuple[Callable[..., Any], int]] = {  # how the rows of three norms are quantised, and how many are
    "arithmetic": (to_e4m3, 3),
    "the other factor first": (
        lambda y, s: (s.reciprocal() * y.to(torch.float32)).clamp(-448, 448).to(torch.float8_e4m3fn), 3
    ),
    "vLLM's operator": (quantise, 3),
    "vLLM's operator, no parts": (lambda y, s: quantise(y, s, None), 3),
    "a scale for each row": (lambda y, s: quantise(y, s, (1, -1)), 0),
    "with padding": (lambda y, s: quantise(y, s, more=2)[: y.shape[0]], 0),
    "a scale that is made": (lambda y, s: to_e4m3(y, s * 2), 0),
    "a scale that is made, vLLM's operator": (lambda y, s: quantise(y, s * 2), 0),
    "other bounds": (clamped(-240, 240), 0),
    "one bound": (clamped(-448, 1000), 0),
    "another format": (clamped(-448, 448, "float8_e5m2"), 0),
    "a scale that is no inverse": (lambda y, s: (y.to(torch.float32) * s).clamp(-448, 448).to(torch.float8_e4m3fn), 0),
    "in the rows' dtype": (lambda y, s: (y * s.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), 0),
    "the rows are used elsewhere": (lambda y, s: to_e4m3(y, s).to(y.dtype) + y, 0),
    "a step is used elsewhere": (lambda y, s: (w := y.to(torch.float32)).to(y.dtype) + to_e4m3(w, s).to(y.dtype), 0),
    "nothing": (lambda y, s: y, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantisation_that_follows_is_included(name: str, fusion: Any, reducer: Reducer):
    how, count = QUANTISED[name]
    generator = torch.Generator().manual_seed(1)
    x, residual, weight = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((4, HIDDEN), (4, HIDDEN), (HIDDEN,))
    )
    ours = fused(fusion, quantised_layers(how), (x, residual, weight, torch.tensor(0.03)), 3)
    assert reducer.biases == [0.0, 0.0, 1.0]
    assert reducer.scales == count
    dtypes = [node.meta["val"][0].dtype for node in ours]
    assert dtypes == [torch.float8_e4m3fn] * count + [torch.bfloat16] * (3 - count)


@pytest.mark.parametrize("scale", ["float64", "two"])
def test_a_scale_that_ours_does_not_take(scale: str, fusion: Any, reducer: Reducer):
    given = torch.tensor(0.03, dtype=torch.float64) if scale == "float64" else torch.tensor([[0.03] * 8 + [0.06] * 8])
    x, weight = torch.ones(4, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN, dtype=torch.bfloat16)
    model = quantised_layers(
        lambda y, s: (y.to(torch.float32) * s.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    )
    fused(fusion, model, (x, x, weight, given), 3)
    assert reducer.scales == 0


def test_the_operator_in_a_compiled_function(fusion: Any, reducer: Reducer):
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
def vllm(fusion: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stand-ins for what the pass and the plug-in take of vLLM; its group has our all-reduce."""
    all_reduce = importlib.import_module("ipcreduce.serving.all_reduce")
    comm = object.__new__(all_reduce.ServingAllReduce)
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
    yield types.SimpleNamespace(passes=passes, comm=comm, group=group, config=config)
    comm._tell.detach()  # else it logs its end within another test, when it is collected


def configured(vllm: Any, **settings: bool) -> Any:
    manager = vllm.passes.PassManager()
    pass_config = types.SimpleNamespace(**{"eliminate_noops": True, **settings})
    manager.configure(types.SimpleNamespace(compilation_config=types.SimpleNamespace(pass_config=pass_config)))
    return manager.passes


def test_our_pass_comes_before_those_of_norms(vllm: Any, reducer: Reducer, caplog: pytest.LogCaptureFixture):
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
        serving._reducer_of(GROUP)


def test_the_plug_in_brings_the_pass(vllm: Any, fusion: Any, monkeypatch: pytest.MonkeyPatch):
    assert serving._reducer_of(GROUP) is vllm.comm
    platform = type("Platform", (), {})()
    defined: list[Any] = []
    monkeypatch.setattr(fusion, "define", defined.append)
    serving._bring_the_pass.cache_clear()
    for _ in range(2):
        serving._bring_the_pass(platform)
    assert defined == [serving._reducer_of]
    assert platform.get_pass_manager_cls() == "ipcreduce.serving.passes.PassManager"
    assert vllm.config().compute_hash().count("ipcreduce") == 1, "vLLM's cache tells graphs with our operator apart"
    assert vllm.config().compute_hash().startswith("theirs")


def test_a_disabled_reducer_raises(vllm: Any):
    vllm.comm.disabled = True
    with pytest.raises(UnsupportedError, match="Start the server without its fused pass"):
        vllm.comm.normalise(None, None, None, EPS)
