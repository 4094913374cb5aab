"""vLLM's class LLM. Its tokens count from 7; asleep, it uses less memory."""

from __future__ import annotations

import os
import types
from typing import Any

SamplingParams = types.SimpleNamespace


class LLM:
    """An engine of two ranks; of one, in a process that is a rank."""

    living = 0

    def __init__(self, **settings: Any) -> None:
        from vllm.platforms import current_platform

        self.settings, self.pool = settings, current_platform.get_global_graph_pool()
        assert not self.pool.has_gone
        LLM.living += 1
        assert LLM.living == 1 or settings.get("gpu_memory_utilization", 1) < 0.5
        external = settings.get("distributed_executor_backend") == "external_launcher"
        assert external == ("RANK" in os.environ) == ("MASTER_PORT" in os.environ)
        self.workers = 1 if external else 2
        self.asleep = False
        self.llm_engine = types.SimpleNamespace(engine_core=self)

    def shutdown(self) -> None:
        LLM.living -= 1
        self.pool.has_gone = LLM.living == 0

    def sleep(self, level: int) -> None:
        assert self.settings["enable_sleep_mode"]
        self.asleep = True

    def wake_up(self) -> None:
        self.asleep = False

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        tokens = range(7, 7 + params.max_tokens)
        logprobs = [{token: types.SimpleNamespace(logprob=-0.5 * len(prompts))} for token in tokens]
        one = types.SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs)
        return [types.SimpleNamespace(outputs=[one])] * len(prompts)

    def collective_rpc(self, name: str) -> list[Any]:
        state = {"gpu": "H100", "seat": "a.B", "used_mb": 1.0 if self.asleep else 9.0}
        return self.workers * [state if name == "bench_state" else None]
