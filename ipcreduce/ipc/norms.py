"""The launch of a fused all-reduce with RMSNorm: one kernel, for rows that have one (norm_plan.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from ..calls.norm_shape import NormShape
from ..cuda import driver
from ..device.norm_kernels import Kernel, NormKernels, NormLaunch, Words, macros_of, set_addresses, words_of
from .norm_plan import NormPlan


def fused_launch(
    plan: NormPlan, shape: NormShape, kernels: NormKernels, base: Words, exchange: Mapping[str, str],
    variants: Iterable[tuple[str, int, int]] = (),
) -> NormLaunch:  # fmt: skip
    """The launch of ``plan``.

    :param base: the words of struct Args, which the kernels share with the plain all-reduce.
    :param exchange: the macros about the ranks.
    :param variants: kernel, cluster and depth of what else rows of this length need: all are loaded at once, because
        loading waits for all work on the device.
    :raises IpcReduceError: if a kernel does not compile. :raises CudaError: if it does not load.
    """

    def kernel(name: str, cluster: int, depth: int) -> Kernel:
        return name, macros_of(shape, depth, cluster, exchange)

    wanted = kernel(plan.kernel, plan.cluster, plan.depth)
    kernels.load(dict.fromkeys([wanted, *(kernel(*variant) for variant in sorted(variants))]))
    args = np.concatenate([base, words_of(shape)])
    launch = driver.Launch(
        kernels.function(wanted), plan.grid, plan.block, args, programmatic=kernels.programmatic
    )  # fmt: skip
    return NormLaunch(plan.kernel, launch, args, partial(set_addresses, args.data, len(base)))
