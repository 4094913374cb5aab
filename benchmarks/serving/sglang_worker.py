"""What SGLang's workers do for a measurement. SGLang calls these in each of them, as loaders of new weights.

A loader returns nothing. So an answer is a file, one for each rank, in the folder that the environment names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving import worker
from benchmarks.serving.sglang_engine import ANSWERS

_profiles: list[worker.Profile] = []


def fill(model: torch.nn.Module, _: Any) -> None:
    worker.fill(model, torch.distributed.get_rank())


def state(*_: Any) -> None:
    from sglang.srt.distributed import get_tp_group

    _answer(worker.state(get_tp_group().ca_comm))


def profile_start(*_: Any) -> None:
    _profiles.append(worker.Profile())


def profile_stop(*_: Any) -> None:
    _answer(_profiles.pop().stop())


def _answer(found: dict[str, Any]) -> None:
    (Path(os.environ[ANSWERS]) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
