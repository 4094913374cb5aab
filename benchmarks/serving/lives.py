"""An engine of vLLM that ends and begins anew, sleeps, has another beside it, or gets one prompt in several batches.

    python -m benchmarks.serving.lives NAME OUT --layers 2 --batches 1

Of NAME the mode says which. ``benchmarks.serving.run`` starts it. What was seen is in the result's ``facts``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.engine import Result, begin, model, prompts, sampling, settings

RESTARTS, RANKS = 5, 2
# vLLM 0.26 takes a compiled function again in the next engine, and its name of the group is not valid there.
NOT_COMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
BATCHES = [1, 8]
INVARIANT = (1, 8, 64)  # prompts at once
TOKENS = 32
RANK, PORTS = "RANK", "SERVING_PORTS"  # the environment of a process that is one rank


def main() -> None:
    args, result = begin(__doc__)
    if RANK in os.environ:
        rank_file(result, int(os.environ[RANK])).write_text(json.dumps(lives(args)))
        return
    {"restarts": restarts, "pair": pair, "sleep": sleep, "invariant": invariant}[args.name.mode](args, result)
    result.note(done=True)


def made(args: argparse.Namespace, **more: Any) -> Any:
    """An engine with weights of a size that counts."""
    from vllm import LLM

    llm = LLM(**{**settings(args.name, model(args.out, args.layers), BATCHES), **more})
    llm.collective_rpc("bench_fill")
    return llm


def tokens(llm: Any, count: int = 8) -> list[list[int]]:
    done = llm.generate(prompts(count), sampling(TOKENS), use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in done]


def used_mb(llm: Any) -> list[float]:
    """The memory of each GPU that is in use, as the driver says."""
    return [worker["used_mb"] for worker in llm.collective_rpc("bench_state")]


def note(args: argparse.Namespace, result: Result, llm: Any, facts: dict[str, Any]) -> None:
    result.note(workers=llm.collective_rpc("bench_state"), facts=facts)


# ---- restarts: two processes, each a rank and an engine, in which the engine is made again and again
def restarts(args: argparse.Namespace, result: Result) -> None:
    command = [sys.executable, "-m", "benchmarks.serving.lives", *sys.argv[1:]]
    ports = ",".join(str(port) for port in free_ports(RESTARTS))
    ranks = [subprocess.Popen(command, env=os.environ | environment(rank, ports)) for rank in range(RANKS)]
    codes = [process.wait() for process in ranks]  # if one waits for ever, the limit of benchmarks.serving.run ends it
    if any(codes):
        sys.exit(f"the ranks ended with {codes}; the reason is above")
    found = [json.loads(rank_file(result, rank).read_text()) for rank in range(RANKS)]
    expected = found[0]["tokens"][0]
    result.note(
        workers=[one["worker"] for one in found],
        facts={
            "memory after each end, MB, by rank": [one["used_mb"] for one in found],
            "every life gave the same tokens": all(life == expected for one in found for life in one["tokens"]),
        },
    )


def rank_file(result: Result, rank: int) -> Path:
    return result.path.with_suffix(f".rank{rank}")


def environment(rank: int, ports: str) -> dict[str, str]:
    """As torchrun sets it."""
    return {
        RANK: str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", PORTS: ports,
    }  # fmt: skip


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def lives(args: argparse.Namespace) -> dict[str, Any]:
    """One rank's engines, one after the other. An engine leaves PyTorch's context, and what NCCL keeps."""
    from vllm.platforms import current_platform

    found: dict[str, Any] = {"used_mb": [], "tokens": []}
    for port in os.environ[PORTS].split(","):
        os.environ["MASTER_PORT"] = port
        # vLLM 0.26 would capture into the pool of the engine before, which has gone with the graphs of that engine.
        type(current_platform)._global_graph_pool = None
        llm = made(args, distributed_executor_backend="external_launcher", compilation_config=NOT_COMPILED)
        found["tokens"].append(tokens(llm))
        [found["worker"]] = llm.collective_rpc("bench_state")
        llm.llm_engine.engine_core.shutdown()
        del llm
        found["used_mb"].append(used_now())
    return found


def used_now() -> float:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e6, 1)


# ---- the others: one process, whose workers are processes of their own
def pair(args: argparse.Namespace, result: Result) -> None:
    """Two engines at once, which take turns; then one ends, and the other goes on."""
    first, second = (made(args, gpu_memory_utilization=0.4) for _ in range(2))
    expected = tokens(first)
    turns = [tokens(llm) == expected for llm in (second, first, second)]
    first.llm_engine.engine_core.shutdown()
    turns.append(tokens(second) == expected)
    note(args, result, second, {"the same tokens, in turns": turns[:-1], "after the end of the other": turns[-1]})
    second.llm_engine.engine_core.shutdown()


def sleep(args: argparse.Namespace, result: Result) -> None:
    """The memory before, during and after vLLM's sleep, and whether the graphs still give the same."""
    llm = made(args, enable_sleep_mode=True)
    expected, memory = tokens(llm), [used_mb(llm)]
    llm.sleep(level=1)
    memory.append(used_mb(llm))
    llm.wake_up()
    same = tokens(llm) == expected
    memory.append(used_mb(llm))
    note(args, result, llm, {"memory awake, asleep, awake, MB, by rank": memory, "the same tokens afterwards": same})
    llm.llm_engine.engine_core.shutdown()


def invariant(args: argparse.Namespace, result: Result) -> None:
    """One prompt alone and among others, under VLLM_BATCH_INVARIANT: has it the same bits?"""
    llm = made(args)
    alone, *others = (first_of(llm, count) for count in INVARIANT)
    facts = {
        f"the first of {count} prompts as alone: tokens, logprobs": [alone[0] == found[0], alone[1] == found[1]]
        for count, found in zip(INVARIANT[1:], others, strict=True)
    }
    note(args, result, llm, facts)
    llm.llm_engine.engine_core.shutdown()


def first_of(llm: Any, count: int) -> tuple[list[int], list[float]]:
    """The tokens and their logprobs of the first prompt among so many."""
    one = llm.generate(prompts(count), sampling(TOKENS, logprobs=1), use_tqdm=False)[0].outputs[0]
    chosen = list(one.token_ids)
    return chosen, [found[token].logprob for token, found in zip(chosen, one.logprobs, strict=True)]


if __name__ == "__main__":
    main()
