"""SGLang's HTTP server with a client that cancels a request, with a worker that is killed, or asleep.

    python -m benchmarks.serving.sglang_server NAME OUT --layers 2 --batches 1

Of NAME the mode says which: "sglang-server", "sglang-killed" or "sglang-sleep". ``benchmarks.serving.run`` starts it,
and ``benchmarks.serving.server`` has the first two. Standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.serving import server, sglang_engine
from benchmarks.serving.engine import begin, model
from benchmarks.serving.names import Name

RANKS = 2


class Client(server.Client):
    """SGLang's server on a port of this machine."""

    worker = "sglang::scheduler_TP1"
    piece = '"output_ids"'

    def command(self, name: Name) -> list[str]:
        known = sglang_engine.settings(name, self.folder, server.BATCHES, RANKS)
        known |= {"host": "127.0.0.1", "port": self.port, "enable_memory_saver": name.mode == "sglang-sleep"}
        words = [sys.executable, "-m", "sglang.launch_server"]
        for key, value in known.items():
            if value is not None and value is not False:
                words.append(f"--{key.replace('_', '-')}")
                words += [] if value is True else map(str, value if isinstance(value, list) else [value])
        return words

    def environment(self) -> dict[str, str]:
        """The second is for torch_memory_saver, which is loaded before PyTorch and needs CUDA's runtime."""
        torch = find_spec("torch")
        beside = Path(torch.origin).parents[1] if torch and torch.origin else self.folder
        libraries = [*map(str, beside.glob("nvidia/*/lib")), os.environ.get("LD_LIBRARY_PATH", "")]
        return {sglang_engine.ANSWERS: str(self.folder), "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}

    def workers(self, what: str) -> list[Any]:
        return sglang_engine.ask_workers(self, self.folder, RANKS, what)

    def update_weights_from_tensor(self, tensors: list[Any], load_format: str) -> tuple[bool, str]:
        """As the method of SGLang's class Engine."""
        each = base64.b64encode(pickle.dumps(tensors)).decode()
        asked = {"serialized_named_tensors": [each] * RANKS, "load_format": load_format}
        answer = json.loads(self.ask("POST", "/update_weights_from_tensor", asked))
        return answer["success"], answer["message"]

    def tokens(self, prompt: list[int]) -> list[int]:
        found: list[int] = json.loads(self.ask("POST", "/generate", body(prompt, server.TOKENS)))["output_ids"]
        return found

    def stream(self, prompt: list[int]) -> Iterator[str]:
        return self.pieces("/generate", body(prompt, server.LONG))

    def running(self) -> float:
        loads = json.loads(self.ask("GET", "/v1/loads?include=core"))["loads"]
        return float(sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads))

    def generated(self) -> None:
        """SGLang counts the tokens of a request when it has ended, and not if it was cancelled."""


def body(prompt: list[int], count: int) -> dict[str, Any]:
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params}


def main() -> None:
    args, result = begin(__doc__)
    trials = {"server": server.cancelled, "killed": server.killed, "sleep": asleep}
    folder = model(args.out, args.layers, sglang_engine.QWEN3)
    server.tried(args, result, Client, folder, trials[args.name.mode.removeprefix("sglang-")])


def asleep(client: Client, process: subprocess.Popen[bytes], _log: Path) -> server.Facts:
    """The memory before, during and after the release, and whether the graphs still give the same."""
    expected, memory = each(client), [used_mb(client)]
    client.ask("POST", "/release_memory_occupation", {})
    memory.append(used_mb(client))
    client.ask("POST", "/resume_memory_occupation", {})
    client.workers("fill")  # SGLang does not keep the weights
    same = each(client) == expected
    memory.append(used_mb(client))
    known = {"memory awake, asleep, awake, MB, by rank": memory, "the same tokens afterwards": same}
    return known | server.stopped(process)


def each(client: Client) -> list[list[int]]:
    """The tokens of each prompt alone."""
    return [client.tokens(one) for one in server.asked()]


def used_mb(client: Client) -> list[float]:
    return [worker["used_mb"] for worker in client.workers("state")]


if __name__ == "__main__":
    main()
