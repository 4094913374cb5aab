"""Run engines of vLLM or SGLang, each in a process of its own, on a machine with GPUs. Standard library only.

    python -m benchmarks.serving.run OUT ours stock nccl --archives FOLDER [--layers 8,16] [--turns 3] [--ranks 4]

FOLDER is what ``benchmarks.serving.prepare`` made; it is unpacked once. The names are in ``benchmarks.serving.names``.
OUT gets a file of results and a log for each run. One whose result is whole already is not run again, so the same
command goes on where it stopped: ``--total`` is the time in which no further run begins that would not have a minute,
and ``--limit`` ends a run. The names take turns, so that a slow minute of the machine is not one engine's alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from benchmarks.serving.names import Name, result_path

ROOT = Path(__file__).resolve().parents[2]
BATCHES = "1,8,32,64,128,256"
SHORTEST = 60  # seconds in which an engine can do anything
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1",
    # Each of these would compile kernels with tools that the archives lack. The second needs NVLink's multicast, which
    # not every machine lets its guests use.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip

WITH_FLASHINFER = "flashinfer"  # a folder of the archives
FLASHINFER = {  # its kernels are there without nvcc, and those named need no multicast, which PyTorch is not to make
    "VLLM_HAS_FLASHINFER_CUBIN": "1", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}  # fmt: skip


def main() -> int:
    args = parse(sys.argv[1:])
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    unpack(args.archives, args.site)
    say(begin, "unpacked")
    whole = True
    for turn, layers, name in itertools.product(range(1, args.turns + 1), args.layers, args.names):
        path = result_path(args.out, name, layers, turn)
        if is_whole(path):
            say(begin, f"{path.name} is there")
            continue
        left = args.total - (time.monotonic() - begin)
        if left < SHORTEST:
            say(begin, f"no time is left for {path.stem}: run the same command again")
            return 1
        status = run_one(args, name, layers, turn, min(args.limit, left))
        say(begin, f"{path.stem}: {status}")
        if not is_whole(path):
            whole = False
            lines = path.with_suffix(".log").read_text(errors="replace").splitlines()[-25:]
            print("\n".join(line[:300] for line in lines))
    return 0 if whole else 1


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", type=Name.of, nargs="+")
    parser.add_argument("--archives", type=Path, required=True)
    parser.add_argument("--site", type=Path, help="where they are unpacked (a folder in /tmp by their folder's name)")
    parser.add_argument("--layers", type=lambda text: [int(one) for one in text.split(",")], default=[8])
    parser.add_argument("--turns", type=int, default=1, help="how often each is run")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of an engine that is measured (2); trials take 2")
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--limit", type=float, default=240, help="seconds for a run")
    parser.add_argument("--total", type=float, default=540, help="seconds for all of them")
    args = parser.parse_args(words)
    args.out = args.out.absolute()
    args.site = args.site or Path(f"/tmp/ipcreduce-serving-{args.archives.absolute().name}")
    return args


def say(begin: float, text: str) -> None:
    print(f"[{time.monotonic() - begin:3.0f} s] {text}", flush=True)


def is_whole(path: Path) -> bool:
    try:
        return "after" in json.loads(path.read_text())
    except (OSError, ValueError):
        return False


def unpack(archives: Path, site: Path) -> None:
    """Lay out the packages, ipcreduce's anew each time, and compile what is new."""
    parts = sorted(archives.glob("site.tar.xz.*"))
    [wheel] = archives.glob("ipcreduce-*.whl")
    stamp = site / "unpacked"
    if not stamp.exists():
        if not parts:
            sys.exit(f"{archives} has no site.tar.xz.00. Make it with benchmarks.serving.prepare")
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir(parents=True)
        xz = subprocess.Popen(["xz", "-dc", "-T0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        tar = subprocess.Popen(["tar", "-x", "-C", str(site)], stdin=xz.stdout)
        assert xz.stdin
        for part in parts:
            xz.stdin.write(part.read_bytes())
        xz.stdin.close()
        if xz.wait() or tar.wait():
            sys.exit("the archives could not be unpacked; the reason is above")
        # The machine's own packages come first, then those of the folder fallback.
        (site / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(site / 'fallback')!r})\n")
        stamp.touch()
    for old in site.glob("ipcreduce*"):
        shutil.rmtree(old)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)], stdout=subprocess.DEVNULL)


def environment(name: Name, site: Path) -> dict[str, str]:
    """A process's environment for this engine. What the user has set stays, but for what makes the engines differ."""
    with_flashinfer = name.engine == "flashinfer" or name.server == "sglang"  # SGLang imports it in any case
    found = {**SETTINGS, **(FLASHINFER if with_flashinfer else {}), **os.environ}
    places = [site / WITH_FLASHINFER] if with_flashinfer else []
    found["PYTHONPATH"] = os.pathsep.join(str(place) for place in (*places, site, ROOT))
    found["IPCREDUCE_ENGINES"] = "1" if name.engine in ("ours", "fused") else "0"
    found["IPCREDUCE_FUSED"] = "1" if name.engine == "fused" else "0"
    found["VLLM_BATCH_INVARIANT"] = "1" if name.mode == "invariant" else "0"
    found["IPCREDUCE_BATCH_INVARIANT"] = "1" if name.mode in ("invariant", "alone") else "0"
    found["VLLM_DISABLE_PYNCCL"] = "1" if name.mode == "alone" else "0"
    found["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn" if name.mode == "spawn" else "fork"
    return found


def run_one(args: argparse.Namespace, name: Name, layers: int, turn: int, limit: float) -> str:
    """Run one engine, and add to its result what it left behind. Returns how it ended."""
    path = result_path(args.out, name, layers, turn)
    path.unlink(missing_ok=True)
    before = shared_memory()
    command = [sys.executable, "-m", name.program, str(name), str(args.out)]
    command += ["--layers", str(layers), "--turn", str(turn), "--batches", args.batches, "--ranks", str(args.ranks)]
    with path.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=args.site, env=environment(name, args.site), stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = f"exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            status = f"ended after {limit:.0f} s"
    time.sleep(1)  # for the processes that end with it
    left = session(process.pid)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    if path.exists():
        found = json.loads(path.read_text())
        if found.get("done"):
            served = re.findall(
                r"ipcreduce has served (\d+) calls", path.with_suffix(".log").read_text(errors="replace")
            )
            found["after"] = {
                "status": status, "processes": len(left), "shared": sorted(shared_memory() - before),
                "served": [int(count) for count in served],
            }  # fmt: skip
            path.write_text(json.dumps(found))
    return status


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def session(leader: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended since
            continue
        if int(sid) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
