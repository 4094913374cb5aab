"""All mutants, in the order of the layers."""

from __future__ import annotations

from tests.mutants import (
    calls,
    devices,
    graphs,
    house,
    kernels,
    leaving,
    lists,
    maps,
    matrix,
    norm_calls,
    norms,
    operands,
    peers,
    serving,
    suspended,
)

_MODULES = (
    kernels, calls, peers, leaving, house, operands, lists, maps, norms, norm_calls, matrix, devices, suspended,
    graphs, serving,
)  # fmt: skip
MUTANTS = [one for module in _MODULES for one in module.MUTANTS]
