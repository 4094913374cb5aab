"""Quantisations to e4m3 by a given scale, as they stand in vLLM's compiled graphs.

vLLM writes one in two ways. By default it is plain arithmetic: to float32, times 1 / scale, clamped to ±448, to e4m3.
With its custom operator ``quant_fp8`` it is one call. Both give what ``ipcreduce.FP8(scale=...)`` gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

DTYPE = torch.float8_e4m3fn
_MAX = torch.finfo(DTYPE).max
_WHOLE = (None, [-1, -1], (-1, -1))  # the parts of a tensor that share a scale, where all of it does
_WIDEN = "prims.convert_element_type.default"
_OPERATOR = "_C.static_scaled_fp8_quant.default"


class Quantisation(NamedTuple):
    """The scale, the nodes that are the quantised rows, and those between the rows and them, from the last."""

    scale: fx.Node
    results: list[fx.Node]
    between: list[fx.Node]


def is_functional(node: fx.Node, name: str) -> bool:
    """True for an operator that changes its arguments, as it stands in a functional graph."""
    return str(node.target) == "auto_functionalized" and str(node.args[0]) == name


def after(rows: list[fx.Node]) -> Quantisation | None:
    """The quantisation that is all that uses the rows; None if there is none."""
    users = [user for one in rows for user in one.users]
    if len(users) != 1:
        return None
    found = _call(users[0]) if is_functional(users[0], _OPERATOR) else _arithmetic(users[0])
    return found if found is not None and _fits(found, rows[0].meta["val"]) else None


def _fits(found: Quantisation, rows: torch.Tensor) -> bool:
    """True if the scale is one float32 that is there from the start, and the results are e4m3 without padding."""
    scale, results = found.scale.meta.get("val"), [one.meta["val"] for one in found.results]
    return (
        found.scale.op == "placeholder"
        and isinstance(scale, torch.Tensor)
        and scale.dtype == torch.float32
        and scale.numel() == 1
        and bool(results)
        and all(one.dtype == DTYPE and one.shape == rows.shape for one in results)
    )


def _call(user: fx.Node) -> Quantisation | None:
    given = user.kwargs
    if given.get("group_shape") not in _WHOLE or not isinstance(given["scale"], fx.Node):
        return None
    results = [one for one in user.users if one.args[1] == 1]
    assert isinstance(given["result"], fx.Node)
    return Quantisation(given["scale"], results, [user, given["result"]])


def _arithmetic(user: fx.Node) -> Quantisation | None:
    nodes = [user]
    while len(nodes) < 5 and len(nodes[-1].users) == 1:
        nodes.append(next(iter(nodes[-1].users)))
    if [str(one.target) for one in nodes] != [
        _WIDEN, "aten.mul.Tensor", "aten.clamp_min.default", "aten.clamp_max.default", _WIDEN
    ]:  # fmt: skip
        return None
    wide, product, at_least, at_most, result = nodes
    inverse: Any = product.args[1] if product.args[0] is wide else product.args[0]
    if wide.args[1] != torch.float32 or (at_least.args[1], at_most.args[1]) != (-_MAX, _MAX):
        return None
    if not isinstance(inverse, fx.Node) or str(inverse.target) != "aten.reciprocal.default":
        return None
    scale = inverse.args[0]
    assert isinstance(scale, fx.Node)
    return Quantisation(scale, [result], [at_most, at_least, product, wide, inverse])
