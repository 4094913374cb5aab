"""All-reduces of vLLM's compiled graphs, each made one operator with the RMSNorm that follows it.

A graph cannot hold objects. So the operator finds the all-reduce by the name of vLLM's group, as vLLM's own does.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

Pair = tuple[torch.Tensor, torch.Tensor]
_library: Any = torch.library.Library("ipcreduce_serving", "DEF")
_library.define(
    "all_reduce_rmsnorm(Tensor x, Tensor weight, Tensor? residual, float eps, float weight_bias, str group) "
    "-> (Tensor, Tensor)"
)


@cache
def define(seat_of: Callable[[str], Any]) -> None:
    """Give the operator its kernel, once. ``seat_of`` finds the EngineAllReduce of a group by the group's name."""

    def kernel(
        x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, bias: float, group: str
    ) -> Pair:
        found: Pair = seat_of(group).normalise(x, weight, residual, eps, bias)
        return found

    _library.impl("all_reduce_rmsnorm", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("ipcreduce_serving::all_reduce_rmsnorm", _shapes, lib=_library)


def _shapes(x: torch.Tensor, *_: Any) -> Pair:
    first, second = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return first, second


def key() -> str:
    """A digest of this module, for caches of what it has changed."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def fuse(graph: fx.Graph, group: str) -> int:
    """Replace what can be replaced in a functional graph. Returns how many all-reduces that were.

    Those are all-reduces of the group whose result goes into a RMSNorm: into one with a residual and nowhere else, or
    into one without. Gemma's weights, to which 1 is added in float32, are seen through.
    """
    count = 0
    for norm in list(graph.nodes):
        replace = _REPLACE.get(str(norm.target)) if norm.op == "call_function" else None
        count += replace is not None and replace(graph, norm, group)
    return count


def _with_residual(graph: fx.Graph, norm: fx.Node, group: str) -> bool:
    """``fused_add_rms_norm(x, residual, weight, eps)`` has the same two results as our operator."""
    total, residual, weight, eps = norm.args[:4]
    found = _weight(weight, total)
    if not _is_sum(total, group) or len(total.users) > 1 or found is None or _has_more(norm, 4):
        return False
    with graph.inserting_before(norm):
        ours = graph.call_function(_operator(), (total.args[0], found[0], residual, eps, found[1], group))
    ours.meta["val"] = norm.meta["val"]  # the rest of it describes the arguments of the old operator
    norm.replace_all_uses_with(ours)
    graph.erase_node(norm)
    graph.erase_node(total)
    return True


def _alone(graph: fx.Graph, norm: fx.Node, group: str) -> bool:
    """``rms_norm(x, weight, eps)``; the sum may have other users, which may come before the norm."""
    total, weight, eps = norm.args[:3]
    found = _weight(weight, total)
    if not _is_sum(total, group) or found is None or _has_more(norm, 3):
        return False
    if found[0].op != "placeholder":  # it may be made behind the all-reduce
        return False
    with graph.inserting_after(total):
        ours = graph.call_function(_operator(), (total.args[0], found[0], None, eps, found[1], group))
    ours.meta["val"] = norm.meta["val"], total.meta["val"]
    with graph.inserting_after(ours):
        parts = [graph.call_function(operator.getitem, (ours, place)) for place in range(2)]
    for old, part in zip((norm, total), parts, strict=True):
        part.meta["val"] = old.meta["val"]
        old.replace_all_uses_with(part)
        graph.erase_node(old)
    return True


_REPLACE = {"vllm_ir.fused_add_rms_norm.default": _with_residual, "vllm_ir.rms_norm.default": _alone}


def _operator() -> Any:
    return torch.ops.ipcreduce_serving.all_reduce_rmsnorm.default


def _has_more(norm: fx.Node, known: int) -> bool:
    """True for a mean over a part of the row."""
    return bool(norm.kwargs) or any(one is not None for one in norm.args[known:])


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
