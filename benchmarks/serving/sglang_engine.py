"""One engine of SGLang, measured as vLLM's are. ``benchmarks.serving.run`` starts it.

    python -m benchmarks.serving.sglang_engine NAME OUT --layers 16 --batches 1,8

The scheduler is in a process of its own, as SGLang has no other way. So a step's time is what more tokens take, and
which requests share the first batch may differ between runs. SGLang calls a fused all-reduce in some models alone, of
which Qwen3's is one. Attention is Triton's, because it needs no further library.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.serving.engine import (
    COMPARED,
    COMPARED_TOKENS,
    MAX_TOKENS,
    PREFILLS,
    PROFILED,
    WARM,
    WINDOWS,
    Result,
    begin,
    model,
    prompts,
    since,
    timed,
)
from benchmarks.serving.names import Name

STEPS = 128  # by which the longer of two runs is longer
KV_TOKENS = 1 << 17
ANSWERS = "SERVING_ANSWERS"  # the environment's name for the folder of the workers' answers
WORKER = "benchmarks.serving.sglang_worker"
DONE, ANSWERED = ("fill", "profile_start"), ("state", "profile_stop")  # functions of it; the second two answer
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}


def main() -> None:
    args, result = begin(__doc__)
    start = time.perf_counter()
    from sglang import Engine

    result.note(import_s=since(start))
    folder = model(args.out, args.layers, QWEN3)
    os.environ[ANSWERS] = str(folder)
    start = time.perf_counter()
    engine = Engine(**settings(args.name, folder, args.batches, args.ranks))
    ask = partial(ask_workers, engine, folder, args.ranks)
    ask("fill")
    result.note(start_s=since(start), workers=ask("state"))
    measure(engine, ask, result, args.batches)
    result.note(workers_at_end=ask("state"))
    start = time.perf_counter()
    engine.shutdown()
    result.note(shutdown_s=since(start), done=True)


def settings(name: Name, folder: Path, batches: list[int], ranks: int) -> dict[str, Any]:
    """The arguments of SGLang's class Engine."""
    fused = name.engine in ("fused", "flashinfer")
    return {
        "model_path": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "tp_size": ranks,
        "dtype": "bfloat16", "random_seed": 1, "context_length": MAX_TOKENS, "chunked_prefill_size": MAX_TOKENS,
        "max_total_tokens": KV_TOKENS, "disable_radix_cache": True,
        "custom_weight_loader": [f"{WORKER}.{what}" for what in (*DONE, *ANSWERED)],
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "cuda_graph_bs_decode": sorted({1, 2, 4, *COMPARED, *batches}), "cuda_graph_bs_prefill": [64, *PREFILLS],
        "disable_custom_all_reduce": name.engine == "nccl",
        "flashinfer_allreduce_fusion_backend": "auto" if fused else None,
        "enforce_disable_flashinfer_allreduce_fusion": not fused, "log_level": "info",
    }  # fmt: skip


def ask_workers(engine: Any, folder: Path, ranks: int, what: str) -> list[Any]:
    """Call a function of ``sglang_worker`` in each worker. Returns the answers."""
    done, text = engine.update_weights_from_tensor([], load_format=f"{WORKER}.{what}")
    if not done:
        raise RuntimeError(f"SGLang's workers did not do {what}: {text}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)] if what in ANSWERED else []


def measure(engine: Any, ask: Callable[[str], list[Any]], result: Result, batches: list[int]) -> None:
    """All that is measured while the engine runs."""
    tokens, logprobs = {}, {}
    for count in COMPARED:
        done = generate(engine, count, COMPARED_TOKENS, return_logprob=True)
        tokens[count] = [one["output_ids"] for one in done]
        logprobs[count] = [[found[0] for found in one["meta_info"]["output_token_logprobs"]] for one in done]
    result.note(tokens=tokens, logprobs=logprobs)
    decode: dict[int, Any] = {}
    for batch in batches:
        decode[batch] = decoding(engine, ask, batch)
        result.note(decode=decode)
    prefill = {}
    for length in PREFILLS:
        times = [timed(partial(generate, engine, 1, 1, length)) for _ in range(6)]
        prefill[length] = times[1:]  # the first may compile
    result.note(prefill_us=prefill)


def decoding(engine: Any, ask: Callable[[str], list[Any]], batch: int) -> dict[str, Any]:
    """Times of a step for so many sequences, and the device's time by kind of kernel.

    The profiled steps begin with prompts of one token, whose prefill is a step of as many tokens as the others.
    """
    generate(engine, batch, WARM)
    short = statistics.median(timed(lambda: generate(engine, batch, WARM)) for _ in range(WINDOWS))
    long = [timed(lambda: generate(engine, batch, WARM + STEPS)) for _ in range(WINDOWS)]
    ask("profile_start")
    generate(engine, batch, PROFILED, 1)
    return {"step_us": [round((one - short) / STEPS, 1) for one in long], "device": ask("profile_stop")}


def generate(engine: Any, count: int, tokens: int, length: int = 16, **more: Any) -> list[Any]:
    ids = [one["prompt_token_ids"] for one in prompts(count, length)]
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    done: list[Any] = engine.generate(input_ids=ids, sampling_params=params, **more)
    return done


if __name__ == "__main__":
    main()
