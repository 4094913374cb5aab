"""All mutants, in the order of the layers."""

from __future__ import annotations

from tests.mutants import coordination, devices, graphs, kernels, leaving, operands, peers

MUTANTS = [
    one for module in (kernels, coordination, peers, leaving, operands, devices, graphs) for one in module.MUTANTS
]
