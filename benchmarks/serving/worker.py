"""What vLLM's workers do for a measurement: vLLM gives its workers the methods of its ``worker_extension_cls``."""

from __future__ import annotations

import statistics
import zlib
from collections import defaultdict
from typing import Any

import torch

CALLS, TURNS = 50, 25
# Kernels of collectives: ipcreduce's, by their whole names, and others by a part.
KINDS = {
    "allreduce": (
        {"one_shot", "two_shot", "bulk", "fused_one_shot", "fused_two_shot"},
        ("cross_device_reduce", "AllReduce", "allreduce", "all_reduce_kernel", "multimem"),
    ),
    "allgather": ({"gather", "bulk_gather"}, ("AllGather",)),
}


def is_of(kind: str, kernel: str) -> bool:
    ours, theirs = KINDS[kind]
    return kernel in ours or any(part in kernel for part in theirs)


def fill(model: torch.nn.Module, rank: int) -> None:
    """Give the weights a size at which each layer counts: the engine's own are so small that rounding hides it."""
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            else:
                seed = zlib.crc32(f"{name} {rank}".encode())
                generator = torch.Generator(device=weight.device).manual_seed(seed)
                weight.normal_(0, 1 if "embed" in name else 0.02, generator=generator)
    torch.cuda.synchronize()


def state(seat: Any) -> dict[str, Any]:
    """Which all-reduce the engine has, and how much of the GPU's memory is used."""
    free, total = torch.cuda.mem_get_info()
    return {
        "seat": f"{type(seat).__module__}.{type(seat).__name__}", "disabled": getattr(seat, "disabled", None),
        "used_mb": round((total - free) / 1e6, 1), "torch_mb": round(torch.cuda.memory_reserved() / 1e6, 1),
        "gpu": torch.cuda.get_device_name(),
    }  # fmt: skip


class Profile:
    """The kernels that run between its making and :meth:`stop`."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.__enter__()

    def stop(self) -> dict[str, Any]:
        """Microseconds and calls of the collectives and of all kernels, and the kernels that took most."""
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        sums: dict[str, float] = defaultdict(float)
        kernels = []
        for event in self._profile.key_averages():
            if event.self_device_time_total:
                kernels.append([event.key[:100], event.count, round(event.self_device_time_total, 1)])
                sums["all_us"] += event.self_device_time_total
                for kind in KINDS:
                    if is_of(kind, event.key):
                        sums[f"{kind}_us"] += event.self_device_time_total
                        sums[f"{kind}s"] += event.count
        kernels.sort(key=lambda row: -row[2])
        return {**{name: round(value, 1) for name, value in sums.items()}, "kernels": kernels[:12]}


class Extension:
    """Methods for ``LLM.collective_rpc``."""

    device: torch.device
    rank: int

    def bench_state(self) -> dict[str, Any]:
        from vllm.distributed.parallel_state import get_tp_group

        return state(get_tp_group().device_communicator.ca_comm)

    def bench_fill(self) -> None:
        fill(self.get_model(), self.rank)  # type: ignore[attr-defined]

    def bench_allreduce(self, rows: list[int], hidden: int) -> dict[int, float]:
        """Microseconds of one all-reduce through vLLM's dispatch, in a CUDA graph of many, by the number of rows."""
        from vllm.distributed.parallel_state import get_tp_group, graph_capture

        group, found = get_tp_group(), {}
        for count in rows:
            x = torch.zeros(count, hidden, dtype=torch.bfloat16, device=self.device)
            with graph_capture(device=self.device) as context:
                group.device_communicator.all_reduce(x)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=context.stream):
                    held = [group.device_communicator.all_reduce(x) for _ in range(CALLS)]
            times = []
            for _ in range(TURNS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                group.barrier()
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) * 1000 / CALLS)
            found[count] = round(statistics.median(times), 2)
            del graph, held
        return found

    def bench_profile_start(self) -> None:
        self._bench_profile = Profile()

    def bench_profile_stop(self) -> dict[str, Any]:
        profile = self._bench_profile
        del self._bench_profile
        return profile.stop()
