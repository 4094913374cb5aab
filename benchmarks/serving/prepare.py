"""Archives with all that a GPU machine without network needs to run a server with ipcreduce, from a package index.

    python -m benchmarks.serving.prepare FOLDER [--flashinfer | --sglang]

The GPU machine has Python 3.12 and PyTorch 2.11 for CUDA 13 with what that brings, transformers, and ipcreduce's own
dependencies. FOLDER gets ipcreduce's wheel, and ``site.tar.xz.00`` and on: vLLM 0.26.0, the last that wants PyTorch
2.11, with the packages that such a machine lacks; or SGLang 0.5.17, which wants it too, with FlashInfer and all its
packages. SGLang compiles kernels as it starts, so that machine has nvcc and ninja besides. Machine code is kept for
Hopper alone. What FOLDER has of these archives already is kept; the wheel is always made anew. Needs pip, xz and strip.
Both options compile FlashInfer's kernels, which needs PyTorch 2.11 and g++ here, too. Standard library only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.serving import fatbins, flashinfer
from benchmarks.serving.run import WITH_FLASHINFER

ROOT = Path(__file__).resolve().parents[2]
VLLM = "0.26.0"
ARCH = 90
PART = 50 << 20  # bytes of an archive's part
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
TARGET = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
TARGET += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
TARGET += [word for name in PLATFORMS for word in ("--platform", name)]
# Of vLLM: its front end in Rust, flash attention 2 (Hopper has 3), what compiles kernels at run time, other Pythons.
NOT_NEEDED = (
    "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/third_party/fmha_sm100/cutlass",
    "vllm/third_party/deep_gemm/include", "vllm/third_party/deep_gemm/_C.cpython-31[0134]*",
    "vllm/entrypoints/serve/instrumentator/static", "bin", "mistral_common/data", "pycountry/locales",
    "xgrammar/include", "xgrammar/lib", "tvm_ffi/include",
)  # fmt: skip
# Of SGLang: other GPUs than Hopper, and attention that is not asked for.
NOT_NEEDED_BY_SGLANG = (
    "sgl_kernel/sm100", "sgl_kernel/fl*_ops.abi3.so", "sgl_kernel/infllm_ops.abi3.so", "sglang/test",
    "sglang/benchmark", "bin",
)  # fmt: skip
# Some kernels of the first library have no machine code for Hopper but PTX. The second has those of experts alone.
FAT = {"_C_stable_libtorch": True, "_moe_C_stable_libtorch": False}
# vLLM imports OpenCV's binding for videos, at once, and uses only names of it then.
CV2 = """def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return 0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--flashinfer", action="store_true", help="with FlashInfer and its all-reduce, compiled")
    which.add_argument("--sglang", action="store_true", help="SGLang, with FlashInfer, in place of vLLM")
    args = parser.parse_args()
    prepare(args.folder, args.flashinfer, args.sglang)


def prepare(folder: Path, with_flashinfer: bool, for_sglang: bool = False) -> None:
    """Fill the folder, and print what it has then."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("ipcreduce-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as work:
        make_wheel(Path(work), folder)
        if not list(folder.glob("site.tar.xz.*")):
            site = Path(work) / "site"
            fill_with_sglang(site) if for_sglang else fill(site, Path(work))
            if with_flashinfer or for_sglang:
                version = flashinfer.FOR_SGLANG if for_sglang else flashinfer.VERSION
                flashinfer.lay_out(site / WITH_FLASHINFER, Path(work), pip, version)
            pack(site, folder)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


def make_wheel(work: Path, folder: Path) -> None:
    """From a copy of the tree, because a build leaves files in it."""
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, work / "tree", ignore=left_out)
    pip("wheel", "--no-deps", str(work / "tree"), "--wheel-dir", str(folder))


def fill(site: Path, work: Path) -> None:
    """Lay out a folder for PYTHONPATH, with the folder ``fallback`` in it."""
    print("fetching vLLM and its dependencies", flush=True)
    pip("download", "--no-deps", *TARGET, "--dest", str(work), f"vllm=={VLLM}")
    install("requirements.txt", site)
    strip_all(site)
    [wheel] = work.glob(f"vllm-{VLLM}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name, keep_ptx in FAT.items():
        library = site / "vllm" / f"{name}.abi3.so"
        zeroed = fatbins.blank(library, ARCH, keep_ptx=keep_ptx)
        print(f"{library.name}: {zeroed / 1e6:.0f} MB of other GPUs are zero now", flush=True)
        strip(library)
    remove(site, NOT_NEEDED)
    install("fallback.txt", site / "fallback")
    (site / "fallback" / "cv2.py").write_text(CV2)


def fill_with_sglang(site: Path) -> None:
    """Lay out a folder for PYTHONPATH. Its packages come before the machine's own: SGLang wants one transformers."""
    print("fetching SGLang and its dependencies", flush=True)
    install("sglang.txt", site)
    remove(site, NOT_NEEDED_BY_SGLANG)
    strip_all(site)


def remove(site: Path, patterns: tuple[str, ...]) -> None:
    for path in [path for pattern in patterns for path in site.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def pack(site: Path, folder: Path) -> None:
    """Compress the folder into parts of a size that can be carried."""
    print("compressing, which takes minutes", flush=True)
    xz = subprocess.Popen(["xz", "-T2", "-6"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tar = subprocess.Popen(["tar", "-C", str(site), "-c", "."], stdout=xz.stdin)
    assert xz.stdin
    assert xz.stdout
    xz.stdin.close()
    number = 0
    while part := xz.stdout.read(PART):
        (folder / f"site.tar.xz.{number:02}.new").write_bytes(part)
        number += 1
    if tar.wait() or xz.wait():
        sys.exit("tar or xz failed; the reason is above")
    for path in folder.glob("*.new"):
        path.rename(path.with_suffix(""))


def install(name: str, target: Path) -> None:
    """The packages of a file beside this one, for the GPU machine's Python, without what they depend on."""
    listed = str(Path(__file__).with_name(name))
    pip("install", "--no-deps", "--no-compile", *TARGET, "--target", str(target), "--requirement", listed)


def pip(what: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", what, "--quiet", "--disable-pip-version-check", *words], check=True)


def strip_all(site: Path) -> None:
    for library in site.rglob("*.so*"):
        if not library.parent.name.endswith(".libs"):  # whose names are hashes of their content
            strip(library)


def strip(library: Path) -> None:
    subprocess.run(["strip", "--strip-unneeded", str(library)], stderr=subprocess.DEVNULL)  # not all of them are ELF


if __name__ == "__main__":
    main()
