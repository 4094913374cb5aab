"""All mutants, in the order of the layers."""

from __future__ import annotations

from tests.mutants import calls, devices, graphs, house, kernels, leaving, lists, norms, operands, peers

_MODULES = (kernels, calls, peers, leaving, house, operands, lists, norms, devices, graphs)
MUTANTS = [one for module in _MODULES for one in module.MUTANTS]
