"""FlashInfer with its all-reduce and norms compiled for Hopper. Needs PyTorch 2.11 and g++, and takes ten minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VERSION = "0.6.14"  # which vLLM 0.26.0 asks for
FOR_SGLANG = "0.6.15.post1"  # which SGLang 0.5.17 asks for
TOOLS = [f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-cccl", "cuda-runtime")]
TOOLS += ["nvidia-curand==10.4.*", "ninja"]
IMPORTED = ["apache-tvm-ffi<0.2", "numpy", "packaging", "requests", "tqdm"]  # by FlashInfer as it compiles
# cuBLAS's headers are those that PyTorch has brought.
BUILD = """import os
from pathlib import Path
import torch
os.environ["CPATH"] = str(Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include")
from flashinfer.jit.comm import gen_trtllm_comm_module
from flashinfer.jit.norm import gen_norm_module
for module in gen_trtllm_comm_module(), gen_norm_module():
    module.build(False)
    print(module.jit_library_path)
    print(module.aot_path)"""


def lay_out(target: Path, work: Path, pip: Callable[..., None], version: str) -> None:
    """Fill ``target`` for PYTHONPATH. What compiles further kernels is left out."""
    tools = work / "cuda"
    wanted = [f"flashinfer-python=={version}", "nvidia-ml-py"]
    pip("install", "--no-deps", "--no-compile", "--target", str(target), *wanted)
    pip("install", "--no-deps", "--no-compile", "--target", str(tools), *TOOLS)
    pip("install", "--no-compile", "--target", str(tools), *IMPORTED)
    home = tools / "nvidia" / "cu13"
    (home / "lib" / "stubs").mkdir()
    (home / "lib64").symlink_to("lib")
    (home / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
    stub = [shutil.which("g++") or "g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*stub, str(home / "lib" / "stubs" / "libcuda.so"), "-xc++", "/dev/null"], check=True)
    found = {
        **os.environ, "CUDA_HOME": str(home), "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "MAX_JOBS": "1",
        "FLASHINFER_WORKSPACE_BASE": str(work), "PYTHONPATH": f"{target}{os.pathsep}{tools}",
        "PATH": os.pathsep.join([str(home / "bin"), str(tools / "bin"), os.environ["PATH"]]),
    }  # fmt: skip
    said = subprocess.run([sys.executable, "-c", BUILD], env=found, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(target / "flashinfer" / "data")
    paths = [Path(line) for line in said.stdout.splitlines()[-4:]]
    for made, place in zip(paths[::2], paths[1::2], strict=True):
        place.parent.mkdir(parents=True)
        shutil.copy(made, place)
