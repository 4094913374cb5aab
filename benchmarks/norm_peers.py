"""FlashInfer's all-reduce with residual and RMSNorm for benchmarks/fused.py, called as vLLM 0.26 does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from ipcreduce.bench import contenders

try:
    from benchmarks.norm_cases import EPS, Call, Case, Products
except ImportError:  # as in fused.py
    from norm_cases import EPS, Call, Case, Products

WORLD = MPI.COMM_WORLD
FEW_ROWS = 16  # up to which vLLM lets the next kernel start early in two shots; in one shot it never does


class FlashInfer:
    """Its kernels of TensorRT-LLM, which every rank of ``WORLD`` has to make, and the workspace of one group."""

    def __init__(self, rows: int, hidden: int) -> None:
        """Make room for ``rows`` rows of ``hidden``. :raises ImportError: without PyTorch or FlashInfer."""
        import flashinfer.comm
        import torch

        self._comm, self._group = flashinfer.comm, contenders.TorchNccl(WORLD)
        self._workspace = flashinfer.comm.create_allreduce_fusion_workspace(
            backend="trtllm", world_size=WORLD.size, rank=WORLD.rank, max_token_num=rows, hidden_dim=hidden,
            dtype=torch.bfloat16, group=torch.distributed.group.WORLD,
        )  # fmt: skip

    def calls(self, case: Case, products: Products) -> dict[str, Call]:
        """The call in one shot, and in two where it takes rows enough, into the outputs of ``case``."""
        tensors = map(products.tensor, (case.x, case.residual, case.weight, case.residual_out, case.out))
        given = dict(zip(("input", "residual_in", "rms_gamma", "residual_out", "norm_out"), tensors, strict=True))
        call: Callable[..., Any] = partial(
            self._comm.allreduce_fusion, workspace=self._workspace, rms_eps=EPS, launch_with_pdl=True, fp32_acc=True,
            pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm, **given,
        )  # fmt: skip
        rows = case.shape.rows
        found = {"FlashInfer, one shot": partial(call, use_oneshot=True, trigger_completion_at_end=True)}
        if rows > WORLD.size:
            found["FlashInfer, two shots"] = partial(
                call, use_oneshot=False, trigger_completion_at_end=rows > FEW_ROWS
            )  # fmt: skip
        return {name: partial(products.on_stream, one) for name, one in found.items()}

    def close(self) -> None:
        """Free the workspace, and end PyTorch's process group."""
        self._workspace.destroy()
        self._group.close()
