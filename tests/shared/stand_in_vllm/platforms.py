"""vLLM's platform: its pool of graphs is that of all engines of a process, and goes with the last one's graphs."""

from __future__ import annotations

import types
from typing import Any


class Platform:
    """As vLLM 0.26 has it."""

    _global_graph_pool: Any = None

    def get_global_graph_pool(self) -> Any:
        if Platform._global_graph_pool is None:
            Platform._global_graph_pool = types.SimpleNamespace(has_gone=False)
        return Platform._global_graph_pool


current_platform = Platform()
