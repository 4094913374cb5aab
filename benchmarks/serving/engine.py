"""One engine of vLLM in this process, measured. ``benchmarks.serving.run`` starts it.

    python -m benchmarks.serving.engine NAME OUT --layers 8 --batches 1,8

The scheduler is in this process too, so that every engine gets the same batches. The workers are processes of their
own. The result goes to OUT after each step, so that a run that was ended leaves what it has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.serving.names import Name, result_path

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 8192, 28672, 64, 8, 128256  # of Llama 3 70B
MAX_TOKENS = 4096  # of a prefill step
KV_BYTES = 4 << 30  # the same for every engine, so that what else they take can be compared
WARM, STEPS, WINDOWS, PROFILED = 8, 40, 3, 20
COMPARED, COMPARED_TOKENS = (8, 64), 32
PREFILLS = (512, 2048)
Prompts = list[dict[str, list[int]]]


class Result:
    """What is known of an engine, and its file."""

    def __init__(self, path: Path, **known: Any) -> None:
        self.path, self.known = path, known

    def note(self, **more: Any) -> None:
        self.known |= more
        self.path.write_text(json.dumps(self.known))


def main() -> None:
    args, result = begin(__doc__)
    start = time.perf_counter()
    from vllm import LLM

    result.note(import_s=since(start))
    start = time.perf_counter()
    llm = LLM(**settings(args.name, model(args.out, args.layers), args.batches, args.ranks))
    result.note(start_s=since(start), workers=llm.collective_rpc("bench_state"))
    llm.collective_rpc("bench_fill")
    measure(llm, result, args.batches)
    result.note(workers_at_end=llm.collective_rpc("bench_state"))
    start = time.perf_counter()
    llm.llm_engine.engine_core.shutdown()
    result.note(shutdown_s=since(start), done=True)


def begin(doc: str | None) -> tuple[argparse.Namespace, Result]:
    """Read the arguments of a program of this folder, and begin its result."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("name", type=Name.of)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--turn", type=int, default=1, help="the number of this run of several")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of an engine (2)")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], required=True)
    args = parser.parse_args()
    packages = args.name.server, "torch", "ipcreduce"
    machine = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    result = Result(
        result_path(args.out, args.name, args.layers, args.turn), name=str(args.name), layers=args.layers,
        turn=args.turn, machine=machine, versions=versions, date=datetime.date.today().isoformat(),
    )  # fmt: skip
    return args, result


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def since(start: float) -> float:
    return round(time.perf_counter() - start, 1)


def model(out: Path, layers: int, more: dict[str, Any] | None = None) -> Path:
    """A folder with a configuration alone: the server makes the weights. ``more`` makes it another model than Llama."""
    folder = out / f"model-{layers}"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": MAX_TOKENS, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        **(more or {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(name: Name, folder: Path, batches: list[int], ranks: int = 2) -> dict[str, Any]:
    """The arguments of vLLM's class LLM."""
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": sorted({1, 2, 4, *COMPARED, *batches})}
    if name.mode == "piecewise":
        graphs["cudagraph_mode"] = "PIECEWISE"
    if name.engine == "flashinfer":
        graphs["pass_config"] = {"fuse_allreduce_rms": True}
    return {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "tensor_parallel_size": ranks,
        "dtype": "bfloat16", "seed": 1, "max_model_len": MAX_TOKENS, "max_num_batched_tokens": MAX_TOKENS,
        "max_num_seqs": max(*batches, *COMPARED), "kv_cache_memory_bytes": KV_BYTES, "enable_prefix_caching": False,
        "enforce_eager": name.mode == "eager", "disable_custom_all_reduce": name.engine == "nccl",
        "worker_extension_cls": "benchmarks.serving.worker.Extension",
        "attention_config": {"backend": "FLASH_ATTN"}, "compilation_config": {} if name.mode == "eager" else graphs,
    }  # fmt: skip


def measure(llm: Any, result: Result, batches: list[int]) -> None:
    """All that is measured while the engine runs."""
    tokens, logprobs = {}, {}
    for count in COMPARED:
        done = llm.generate(prompts(count), sampling(COMPARED_TOKENS, logprobs=1), use_tqdm=False)
        outputs = [request.outputs[0] for request in done]
        tokens[count] = [list(one.token_ids) for one in outputs]
        logprobs[count] = [
            [found[token].logprob for token, found in zip(one.token_ids, one.logprobs, strict=True)] for one in outputs
        ]
    result.note(tokens=tokens, logprobs=logprobs)
    decode: dict[int, Any] = {}
    for batch in batches:
        decode[batch] = decoding(llm, batch)
        result.note(decode=decode)
    sizes = sorted({*batches, *PREFILLS})
    result.note(allreduce_us=llm.collective_rpc("bench_allreduce", args=(sizes, HIDDEN)))
    prefill = {}
    for length in PREFILLS:
        call = partial(llm.generate, prompts(1, length), sampling(1), use_tqdm=False)
        prefill[length] = [timed(call) for _ in range(6)][1:]  # the first may compile
    result.note(prefill_us=prefill)


def decoding(llm: Any, batch: int) -> dict[str, Any]:
    """Times of a step for so many sequences, in windows of steps, and the device's time by kind of kernel."""
    engine = llm.llm_engine
    some = WARM + WINDOWS * STEPS + PROFILED + 8  # one for the prefill, others for what is under way while it profiles
    for number, prompt in enumerate(prompts(batch)):
        engine.add_request(f"{batch}-{number}", {"type": "token", **prompt}, sampling(some))

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step()

    steps(WARM)
    windows = [round(timed(lambda: steps(STEPS)) / STEPS, 1) for _ in range(WINDOWS)]
    llm.collective_rpc("bench_profile_start")
    steps(PROFILED)
    device = llm.collective_rpc("bench_profile_stop")
    while engine.has_unfinished_requests():
        engine.step()
    return {"step_us": windows, "device": device}


def timed(call: Callable[[], Any]) -> float:
    """Microseconds."""
    start = time.perf_counter()
    call()
    return round((time.perf_counter() - start) * 1e6, 1)


def prompts(count: int, length: int = 16) -> Prompts:
    """Random tokens, the same each time."""
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(10, VOCAB - 10) for _ in range(length)]} for _ in range(count)]


def sampling(tokens: int, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs, detokenize=False)


if __name__ == "__main__":
    main()
