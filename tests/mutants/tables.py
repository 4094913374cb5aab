"""All mutants, in the order of the layers."""

from __future__ import annotations

from tests.mutants import coordination, devices, graphs, kernels, operands, peers

MUTANTS = [one for module in (kernels, coordination, peers, operands, devices, graphs) for one in module.MUTANTS]
