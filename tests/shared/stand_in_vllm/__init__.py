"""vLLM and SGLang's server, as far as ``benchmarks.serving`` uses them, with no model: a site-packages folder."""

from __future__ import annotations

import shutil
from pathlib import Path

HERE = Path(__file__).parent


def lay_out(site: Path) -> None:
    """Fill the folder with modules of the names that programs import, and the metadata that they read."""
    place = site / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    for package in (site / "vllm" / "entrypoints", place):
        (package / "__init__.py").touch()
    shutil.copy(HERE / "engine.py", site / "vllm" / "__init__.py")
    shutil.copy(HERE / "platforms.py", site / "vllm" / "platforms.py")
    shutil.copy(HERE / "server.py", place / "api_server.py")
    (site / "sglang").mkdir()
    shutil.copy(HERE / "server.py", site / "sglang" / "launch_server.py")
    shutil.copy(HERE / "devices.py", site / "torch.py")
    for name in ("vllm", "sglang", "torch", "ipcreduce"):
        info = site / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
