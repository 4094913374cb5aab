"""All mutants, in the order of the layers."""

from __future__ import annotations

from tests.mutants import coordination, devices, graphs, house, kernels, operands, peers

MUTANTS = [one for module in (kernels, coordination, peers, house, operands, devices, graphs) for one in module.MUTANTS]
