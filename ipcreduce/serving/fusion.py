"""All-reduces of vLLM's compiled graphs, each made one operator with the RMSNorm that follows it.

If a quantisation to e4m3 by a given scale follows the norm, the operator includes that, too. A graph cannot hold
objects. So the operators find the all-reduce by the name of vLLM's group, as vLLM's own does.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from . import quantised

Pair = tuple[torch.Tensor, torch.Tensor]
_library: Any = torch.library.Library("ipcreduce_serving", "DEF")
_library.define(
    "all_reduce_rmsnorm(Tensor x, Tensor weight, Tensor? residual, float eps, float weight_bias, str group) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "all_reduce_rmsnorm_fp8(Tensor x, Tensor weight, Tensor? residual, float eps, float weight_bias, str group, "
    "Tensor scale) -> (Tensor, Tensor)"
)


@cache
def define(reducer_of: Callable[[str], Any]) -> None:
    """Give the operators their kernel, once. ``reducer_of`` finds a group's ServingAllReduce by the group's name."""

    def kernel(
        x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, bias: float, group: str,
        scale: torch.Tensor | None = None,
    ) -> Pair:  # fmt: skip
        found: Pair = reducer_of(group).normalise(x, weight, residual, eps, bias, scale)
        return found

    for name, shapes in (("all_reduce_rmsnorm", _shapes), ("all_reduce_rmsnorm_fp8", _quantised_shapes)):
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ipcreduce_serving::{name}", shapes, lib=_library)


def _shapes(x: torch.Tensor, *_: Any) -> Pair:
    first, second = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return first, second


def _quantised_shapes(x: torch.Tensor, *_: Any) -> Pair:
    return _shapes(x)[0].to(quantised.DTYPE), _shapes(x)[1]


def key() -> str:
    """A digest of this module and of what it uses: caches of compiled graphs keep what it has changed apart by it."""
    texts = [Path(path).read_bytes() for path in (__file__, quantised.__file__)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def fuse(graph: fx.Graph, group: str) -> int:
    """Fuse all-reduces with the RMSNorm after them in a functional graph. Returns how many all-reduces were fused.

    Those are all-reduces of the group whose result goes into a RMSNorm: into one with a residual and nowhere else, or
    into one without. Gemma's weights, to which 1 is added in float32, are seen through.
    """
    count = 0
    for node in list(graph.nodes):
        norm = _norm(node) if node.op == "call_function" else None
        if norm is not None and _can_be_replaced(norm, group):
            _replace(graph, norm, group)
            count += 1
    return count


class _Norm(NamedTuple):
    """A RMSNorm in a graph."""

    node: fx.Node
    total: Any  # what is normalised
    residual: fx.Node | None
    weight: Any
    eps: float
    whole: bool  # False for a mean over a part of the row
    results: tuple[int, int] | None  # the places of the rows and of the residual sum; None if it gives the rows alone

    def takers(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes that are the normalised rows, and those that are the residual sum."""
        if self.results is None:
            return [self.node], [self.total]
        rows, sums = ([one for one in self.node.users if one.args[1] == place] for place in self.results)
        return rows, sums


def _norm(node: fx.Node) -> _Norm | None:
    """The RMSNorm that a node is, or None. vLLM has the last form under VLLM_BATCH_INVARIANT, with a custom one."""
    target = str(node.target)
    if target == "vllm_ir.fused_add_rms_norm.default":
        x, residual, weight, eps, *part = node.args
        return _Norm(node, x, residual, weight, eps, _is_empty(node, part), (0, 1))
    if target == "vllm_ir.rms_norm.default":
        x, weight, eps, *part = node.args
        return _Norm(node, x, None, weight, eps, _is_empty(node, part), None)
    if quantised.is_functional(node, "_C.fused_add_rms_norm.default"):
        x, residual, weight, eps = (node.kwargs[name] for name in ("input", "residual", "weight", "epsilon"))
        return _Norm(node, x, residual, weight, eps, True, (1, 2))
    return None


def _is_empty(norm: fx.Node, part: list[Any]) -> bool:
    return not norm.kwargs and all(one is None for one in part)


def _can_be_replaced(norm: _Norm, group: str) -> bool:
    found = _weight(norm.weight, norm.total)
    if not norm.whole or not _is_sum(norm.total, group) or found is None:
        return False
    if norm.residual is None:  # the sum may have other users, and ours comes before them: the weight must be there
        return found[0].op == "placeholder"
    return len(norm.total.users) == 1 and norm.residual.meta["val"].dtype == norm.total.meta["val"].dtype


def _replace(graph: fx.Graph, norm: _Norm, group: str) -> None:
    """Put our operator in the place of a sum and its norm, and of the quantisation that follows, if one does."""
    weight, bias = _weight(norm.weight, norm.total) or (norm.weight, 0.0)
    rows, sums = norm.takers()
    quant = quantised.after(rows)
    given = norm.total.args[0], weight, norm.residual, norm.eps, bias, group
    with graph.inserting_after(norm.total) if norm.residual is None else graph.inserting_before(norm.node):
        ours = (
            graph.call_function(torch.ops.ipcreduce_serving.all_reduce_rmsnorm.default, given)
            if quant is None
            else graph.call_function(torch.ops.ipcreduce_serving.all_reduce_rmsnorm_fp8.default, (*given, quant.scale))
        )
    values = _values(norm)
    if quant is not None:
        rows, values = quant.results, (quant.results[0].meta["val"], values[1])
    ours.meta["val"] = values  # the rest of it would describe the arguments of the old operator
    with graph.inserting_after(ours):
        parts = [graph.call_function(operator.getitem, (ours, place)) for place in range(2)]
    for old, part, value in zip((rows, sums), parts, values, strict=True):
        part.meta["val"] = value
        for one in old:
            one.replace_all_uses_with(part)
    between = [] if quant is None else [*quant.between, *norm.takers()[0]]
    for one in dict.fromkeys((*rows, *between, *sums, norm.node, norm.total)):
        for user in list(one.users):
            if user.target is operator.getitem and not user.users:
                graph.erase_node(user)  # of a result that nobody takes
        if not one.users:
            graph.erase_node(one)


def _values(norm: _Norm) -> tuple[Any, Any]:
    value = norm.node.meta["val"]
    if norm.results is None:
        return value, norm.total.meta["val"]
    return value[norm.results[0]], value[norm.results[1]]


def _is_sum(node: Any, group: str) -> bool:
    if not isinstance(node, fx.Node) or str(node.target) != "vllm.all_reduce.default":
        return False
    return [*node.args[1:], *node.kwargs.values()] == [group]


def _weight(weight: Any, total: Any) -> tuple[fx.Node, float] | None:
    """The weight of the rows' dtype, and what is added to it; None if it is of another dtype."""
    if not isinstance(weight, fx.Node) or not isinstance(total, fx.Node):
        return None
    bias = 0.0
    if str(weight.target) == "aten.add.Tensor" and isinstance(weight.args[0], fx.Node) and weight.args[1] == 1:
        wide = weight.args[0]
        if str(wide.target) in ("prims.convert_element_type.default", "aten._to_copy.default"):
            weight, bias = wide.args[0], 1.0
    same = isinstance(weight, fx.Node) and weight.meta["val"].dtype == total.meta["val"].dtype
    return (weight, bias) if same else None
