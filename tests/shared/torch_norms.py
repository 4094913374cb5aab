"""PyTorch's operators of an all-reduce with RMSNorm, on every rank: tests/mpi has them on the host, tests/gpu on GPUs.

The results are compared with NumPy's. Importing this module imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import ipcreduce
import ipcreduce.torch as operators
from tests.shared import norms

PLAIN = torch.ops.ipcreduce.all_reduce_rmsnorm.default
IN_PLACE = torch.ops.ipcreduce.all_reduce_rmsnorm_.default
STATIC = torch.ops.ipcreduce.all_reduce_rmsnorm_static_fp8.default
DYNAMIC = torch.ops.ipcreduce.all_reduce_rmsnorm_dynamic_fp8.default
NAME = "norms"  # the communicator's
EPS, BIAS, SCALE, HIDDEN = 1e-5, 1.0, 0.125, 256
PER = {"token": "token", "128": "group", "128 column-major": "group"}  # and the words of tests/shared/norms.py
FORMS = (5, HIDDEN), (2, 3, HIDDEN), (1, HIDDEN), (HIDDEN,), (0, HIDDEN), (3, 0, HIDDEN)


class Inputs(NamedTuple):
    """A rank's tensors, and what is due: the sum of all ranks' ``x`` is exact."""

    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor
    numbers: tuple[Any, ...]  # eps, weight_bias, communicator
    due: Callable[..., norms.Results]


def drawn(comm: Any, device: str, *form: int, dtype: str = "bfloat16") -> Inputs:
    rng = np.random.default_rng(5)
    of_numpy = norms.DTYPES[dtype]
    parts = rng.integers(-8, 9, (comm.size, *form)).astype(of_numpy)
    residual = rng.standard_normal(form).astype(of_numpy)
    weight = rng.standard_normal(form[-1]).astype(of_numpy)

    def due(*, with_residual: bool = True, scales: str = "") -> norms.Results:
        total = parts.astype(np.float64).sum(0).astype(of_numpy)
        if not total.size:
            return norms.Results(*[np.empty(0)] * 4)
        rows = total.reshape(-1, form[-1])
        return norms.results(
            rows, residual.reshape(rows.shape) if with_residual else None, weight, eps=EPS,
            weight_bias=BIAS, scales=scales, given=SCALE,
        )  # fmt: skip

    def tensor(array: Any) -> torch.Tensor:
        made = torch.from_numpy(np.array(array).view(f"i{array.dtype.itemsize}"))
        return made.view(getattr(torch, dtype)).to(device).clone(memory_format=torch.contiguous_format)

    scale = torch.tensor([SCALE], device=device)
    return Inputs(tensor(parts[comm.rank]), tensor(weight), tensor(residual), scale, (EPS, BIAS, NAME), due)


def bits(x: torch.Tensor) -> bytes:
    return x.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def same(found: torch.Tensor, due: Any, form: tuple[int, ...]) -> None:
    """The same bits, in a tensor of shape ``form``."""
    assert found.shape == form, (found.shape, form)
    assert bits(found) == np.ascontiguousarray(due).tobytes(), (found, due)


def as_call(found: Any, call: Any) -> None:
    """The results have the bits, shapes, dtypes and strides of those of ``comm.allreduce_rmsnorm``."""
    for one, other in zip(found, call, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert one.stride() == other.stride(), (one.stride(), other.stride())
        assert bits(one) == bits(other)


def refused(words: str, call: Callable[[], Any], kind: Any = ipcreduce.ArgumentError) -> None:
    try:
        call()
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"{words!r} is not in the message") from error
        return
    raise AssertionError(f"no {kind.__name__} where {words!r} was due")


def results(comm: Any, device: str) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        for form in FORMS:
            x, weight, residual, _, numbers, due = drawn(comm, device, *form, dtype=dtype)
            kept = x.clone(), residual.clone()
            for given in (residual, None):
                right = due(with_residual=given is not None)
                found = PLAIN(x, weight, given, *numbers)
                same(found[0], right.y, form)
                same(found[1], right.residual_out, form)
                as_call(found, comm.allreduce_rmsnorm(x, weight, EPS, residual=given, weight_bias=BIAS))
                for result in found:
                    result.fill_(3)
            assert x.equal(kept[0]), "x was changed, or a result shares its memory"
            assert residual.equal(kept[1]), "residual was changed, or a result shares its memory"
            assert IN_PLACE(x, weight, residual, *numbers) is None
            right = due()
            same(x, right.y, form)
            same(residual, right.residual_out, form)
    x, weight, residual, *_ = drawn(comm, device, 4, HIDDEN)
    strided = torch.stack([x, x], 1)[:, 0]
    found = operators.all_reduce_rmsnorm(strided, weight, communicator=NAME)
    as_call(found, comm.allreduce_rmsnorm(x, weight))
    assert all(one.is_contiguous() for one in found)
    as_call(operators.all_reduce_rmsnorm(x, weight, residual), comm.allreduce_rmsnorm(x, weight, residual=residual))


def quantised(comm: Any, device: str) -> None:
    """e4m3 with the three scales. Column-major scales begin each column at a multiple of 16 bytes."""
    for form in FORMS:
        x, weight, residual, scale, numbers, due = drawn(comm, device, *form)
        kept = x.clone(), residual.clone()
        for given in (residual, None):
            keywords = {"residual": given, "weight_bias": BIAS}
            right = due(with_residual=given is not None, scales="given")
            found = STATIC(x, weight, scale, given, *numbers)
            assert found[0].dtype is torch.float8_e4m3fn
            same(found[0], right.quantised, form)
            same(found[1], right.residual_out, form)
            call = comm.allreduce_rmsnorm(x, weight, EPS, quantize=ipcreduce.FP8(scale=scale), **keywords)
            as_call(found, (call[0], call[2]))
            for per, scales in PER.items():
                right = due(with_residual=given is not None, scales=scales)
                numbers_of, scales_of, added = DYNAMIC(x, weight, given, per, *numbers)
                columns = 1 if per == "token" else HIDDEN // 128
                same(numbers_of, right.quantised, form)
                same(scales_of, right.scales, (*form[:-1], columns))
                same(added, right.residual_out, form)
                size = 128 if per[:3] == "128" else per
                fp8 = ipcreduce.FP8(per=size, column_major="column" in per)
                as_call(
                    (numbers_of, scales_of, added),
                    comm.allreduce_rmsnorm(x, weight, EPS, quantize=fp8, **keywords),
                )
                if "column" in per and len(form) == 2 and form[0] > 1:
                    assert scales_of.stride() == (1, -(-form[0] // 4) * 4)
                for result in (numbers_of.view(torch.uint8), scales_of, added, *found[1:]):
                    result.fill_(3)
        assert x.equal(kept[0])
        assert residual.equal(kept[1])
        assert scale.item() == SCALE
    x, weight, *_ = drawn(comm, device, 2, 192)
    refused('rows of 192 elements, no multiple of 128. Pass FP8(per="token")', lambda: DYNAMIC(x, weight, None, "128"))
    for per in ("group", "tokens", ""):
        words = f"there are no scales per {per!r}. Pass one of "
        refused(words, lambda per=per: DYNAMIC(x, weight, None, per))
    as_call(DYNAMIC(x, weight), comm.allreduce_rmsnorm(x, weight, quantize=ipcreduce.FP8(per="token")))


def _not_differentiated(operator: str, name: str, tensor: torch.Tensor, call: Callable[..., Any]) -> None:
    """``call`` passes its argument to ``operator`` by this name."""
    words = f"{name} requires grad or has a tangent, and {operator} has no derivative. Pass {name}.detach(), "
    leaf, pair = tensor.clone().requires_grad_(), torch.stack([tensor] * 2)
    refused(words, lambda: call(leaf))
    refused(words, lambda: torch.func.grad(lambda a: call(a).sum())(tensor))
    refused(words, lambda: torch.func.jvp(call, (tensor,), (tensor,)))
    refused(words, lambda: torch.func.vmap(torch.func.grad(call))(pair))
    with forward_ad.dual_level():
        refused(words, lambda: call(forward_ad.make_dual(tensor, tensor)))
    inner = torch.ones((), device=tensor.device)
    outer = torch.func.grad(lambda b: torch.func.grad(lambda a: call(b).sum() + a)(inner))
    refused(words, lambda: outer(tensor))
    refused(words, lambda: torch.func.grad(lambda a: call(leaf).sum() + a)(inner))
    with torch.no_grad():
        call(leaf)
    words = f"{operator} within torch.func.vmap. Pass the whole batch"
    refused(words, lambda: torch.func.vmap(call)(pair), ipcreduce.UnsupportedError)


def differentiated(comm: Any, device: str) -> None:
    """No operator has a derivative, and each says so where one would be lost."""
    x, weight, residual, scale, numbers, due = drawn(comm, device, 3, HIDDEN)
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce_rmsnorm": lambda x, weight, residual: PLAIN(x, weight, residual, *numbers)[0],
        "all_reduce_rmsnorm_": lambda x, weight, residual: IN_PLACE(x * 1, weight, residual * 1, *numbers),
        "all_reduce_rmsnorm_static_fp8": lambda x, weight, residual: STATIC(x, weight, scale, residual, *numbers)[1],
        "all_reduce_rmsnorm_dynamic_fp8": lambda x, weight, residual: DYNAMIC(x, weight, residual, "token", *numbers)[
            2
        ],
    }
    tensors = {"x": x, "weight": weight, "residual": residual}
    for operator, call in calls.items():
        for name, tensor in tensors.items():
            _not_differentiated(operator, name, tensor, lambda a, call=call, name=name: call(**tensors | {name: a}))
    parameter = torch.nn.Parameter(weight)
    right = due()
    with torch.no_grad():
        same(PLAIN(x, parameter, residual, *numbers)[0], right.y, (3, HIDDEN))
        leaf = x.clone().requires_grad_()
        IN_PLACE(leaf, parameter, residual.clone(), *numbers)
        same(leaf.detach(), right.y, (3, HIDDEN))
    with torch.inference_mode():
        IN_PLACE(x.clone(), parameter, residual.clone(), *numbers)
    total = float(right.y.astype(np.float32).sum())
    unrelated = torch.func.grad(lambda a: a * PLAIN(x, weight, residual, *numbers)[0].float().sum())
    assert abs(float(unrelated(torch.ones((), device=device))) - total) < 0.1


def changed(comm: Any, device: str) -> None:
    """What all_reduce_rmsnorm_ writes counts as changed for autograd."""
    inputs = drawn(comm, device, 3, HIDDEN)
    for place in (0, 2):
        leaf = inputs[place].clone().requires_grad_()
        middle = leaf * 2
        saved = middle.sin()
        given = [inputs.x.clone(), inputs.weight, inputs.residual.clone()]
        given[place] = middle.detach()
        IN_PLACE(*given, *inputs.numbers)
        refused("modified by an inplace operation", saved.sum().backward, RuntimeError)


def wrong(comm: Any, device: str) -> None:
    """Arguments that are refused on every rank, and names. The communicator works afterwards."""
    x, weight, residual, scale, numbers, due = drawn(comm, device, 2, HIDDEN)
    for operator, given in ((PLAIN, ()), (IN_PLACE, (residual,)), (STATIC, (scale,)), (DYNAMIC, ())):
        words = "there is no communicator 'none': no communicator has been given this name"
        refused(words, lambda operator=operator, given=given: operator(x, weight, *given, communicator="none"))
    refused("weight has shape (128,)", lambda: PLAIN(x, weight[:128], residual, *numbers))
    refused("weight has shape (256,) and dtype float32", lambda: STATIC(x, weight.float(), scale, residual, *numbers))
    refused("shares memory with", lambda: IN_PLACE(x, weight, x, *numbers))
    refused("eps is -1", lambda: PLAIN(x, weight, residual, -1.0, 0.0, NAME))
    refused("which cannot be normalised", lambda: PLAIN(x.double(), weight.double(), None, *numbers))
    refused("the scale of FP8 has shape (2,)", lambda: STATIC(x, weight, scale.repeat(2), None, *numbers))
    same(PLAIN(x, weight, residual, *numbers)[0], due().y, (2, HIDDEN))


def checks_of_pytorch(comm: Any, device: str) -> None:
    """Schemas, fake implementations and dynamic shapes, as PyTorch itself tests operators."""
    for form in FORMS:
        x, weight, residual, scale, numbers, _ = drawn(comm, device, *form)
        cases: list[tuple[Any, tuple[Any, ...]]] = [
            (PLAIN, (x, weight, residual, *numbers)),
            (PLAIN, (x, weight, None, *numbers)),
            (IN_PLACE, (x.clone(), weight, residual.clone(), *numbers)),
            (STATIC, (x, weight, scale, residual, *numbers)),
            *((DYNAMIC, (x, weight, residual, per, *numbers)) for per in PER),
        ]
        if form == FORMS[0]:
            cases.append((PLAIN, (torch.stack([x, x], 1)[:, 0], weight, residual, *numbers)))
        if form == FORMS[1]:
            cases += [(PLAIN, (x.mT, weight[:3], None, *numbers)), (DYNAMIC, (x.movedim(0, 1), weight))]
        for operator, arguments in cases:
            found = torch.library.opcheck(operator, arguments)
            assert set(found.values()) == {"SUCCESS"}, (operator, form, found)


class Layer(torch.nn.Module):
    """The end of a layer in each of the operator's forms; the result is of float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.register_buffer("scale", torch.tensor([SCALE], device=weight.device))

    def forward(self, x: torch.Tensor, residual: torch.Tensor, per: str = "token") -> tuple[torch.Tensor, ...]:
        y, residual = operators.all_reduce_rmsnorm(x * 2, self.weight, residual, EPS, BIAS, NAME)
        x, residual = y + 1, residual * 1
        operators.all_reduce_rmsnorm_(x, self.weight, residual, EPS, BIAS, NAME)
        q, residual = operators.all_reduce_rmsnorm_static_fp8(x, self.weight, self.scale, residual, communicator=NAME)
        codes, scales, residual = operators.all_reduce_rmsnorm_dynamic_fp8(
            residual * 2, self.weight, None, per, communicator=NAME
        )
        columns = scales if per == "token" else scales.repeat_interleave(128, -1)
        return q.float() * self.scale, codes.float() * columns, scales, residual


def compiled(comm: Any, device: str, backends: tuple[str, ...] = ("aot_eager", "inductor")) -> None:
    """Without a break of the graph, also for shapes that change. What requires grad is refused while it is compiled."""
    x, weight, residual, *_ = drawn(comm, device, 4, HIDDEN)
    layer = Layer(weight)
    for backend in backends:
        torch._dynamo.reset()
        graph = torch.compile(layer, fullgraph=True, backend=backend)
        for per in PER:
            for rows in (4, 3, 7, 1):
                a, _, b, *_ = drawn(comm, device, rows, HIDDEN)
                with torch.no_grad():
                    due, found = layer(a, b, per), graph(a, b, per)
                for one, other in zip(found, due, strict=True):
                    assert one.equal(other), (backend, per, rows)
        torch._dynamo.reset()
        with_gradients = torch.compile(
            lambda x: PLAIN(x, layer.weight.detach(), residual, communicator=NAME)[0] * 1,
            fullgraph=True,
            backend=backend,
        )
        assert with_gradients(x).equal(comm.allreduce_rmsnorm(x, weight, residual=residual)[0])
        refused("weight requires grad or has a tangent", lambda graph=graph: graph(x, residual), Exception)
        assert comm.allreduce(1) == comm.size, "the ranks are apart"


def traced(comm: Any, device: str) -> None:
    """torch.export, make_fx and torch.jit.trace: the operator is a node of the graph, and works on other values."""
    x, weight, residual, _, numbers, due = drawn(comm, device, 3, HIDDEN)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Any:
            return PLAIN(x, weight, residual, *numbers)

    program = torch.export.export(Model(), (x * 0, weight, residual))
    assert [node.target for node in program.graph.nodes].count(PLAIN) == 1
    made = make_fx(Model())(x * 0, weight, residual)
    assert [node.target for node in made.graph.nodes].count(PLAIN) == 1
    for call in (program.module(), made, torch.jit.trace(Model(), (x * 0, weight, residual))):
        y, added = call(x, weight, residual)
        same(y, due().y, (3, HIDDEN))
        same(added, due().residual_out, (3, HIDDEN))


def captured(comm: Any, device: str) -> None:
    """In torch.cuda.graph, and by the mode of torch.compile that captures. Only on GPUs."""
    x, weight, residual, scale, numbers, due = drawn(comm, device, 4, HIDDEN)
    given = torch.zeros_like(x), residual.clone()
    PLAIN(given[0], weight, residual, *numbers)
    DYNAMIC(given[0], weight, residual, "128 column-major", *numbers)
    STATIC(given[0], weight, scale, residual, *numbers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain = PLAIN(given[0], weight, residual, *numbers)
        dynamic = DYNAMIC(given[0], weight, residual, "128 column-major", *numbers)
        static = STATIC(given[0], weight, scale, residual, *numbers)
        IN_PLACE(given[0], weight, given[1], *numbers)
    for _ in range(3):
        given[0].copy_(x)
        given[1].copy_(residual)
        graph.replay()
        comm.synchronize()
        right, form = due(), (4, HIDDEN)
        for y, added in (plain, given):
            same(y, right.y, form)
            same(added, right.residual_out, form)
        grouped = due(scales="group")
        same(dynamic[0], grouped.quantised, form)
        same(dynamic[1], grouped.scales, (4, HIDDEN // 128))
        assert dynamic[1].stride() == (1, 4)
        same(static[0], due(scales="given").quantised, form)
    del graph


ALL = results, quantised, differentiated, changed, wrong, checks_of_pytorch, compiled, traced


def run(comm: Any, device: str) -> None:
    """Every check, on a communicator that has no name yet. On the host there is nothing to capture."""
    operators.register(NAME, comm)
    for check in ALL:
        check(comm, device)
    if device != "cpu":
        captured(comm, device)
