"""What this machine has: GPUs, an MPI, a compiler. Standard library only: used before anything is set up."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def cuda() -> tuple[int, int]:
    """(GPUs visible, CUDA generation of the driver, such as 13); (0, 0) with no GPU or no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return 0, 0
    driver.cuDriverGetVersion(ctypes.byref(version))
    return count.value, version.value // 1000


def pretend_hosts(rank: int, size: int, hosts: int) -> None:
    """Let this process be one of ``size`` ranks on so many hosts of equal size, for the library and for NCCL.

    NCCL refuses two ranks of one host on one GPU, so there each of them gets a host of its own.
    """
    host = f"host {rank * hosts // size}"
    if hosts > 1:
        os.environ["IPCREDUCE_HOSTID"] = host
    if hosts > 1 or 0 < cuda()[0] < size:
        os.environ["NCCL_HOSTID"] = host if cuda()[0] >= size else f"rank {rank}"
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def find_mpirun(python: str) -> str | None:
    """The launcher to use: $MPIRUN, else the one that is installed beside python, else the one on PATH.

    Those of other virtual environments are passed over: their MPI is for the mpi4py there.
    """
    beside = Path(python).parent / "mpirun"
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)  # of which some may be closed to this user
    path = os.pathsep.join(one for one in folders if not os.path.exists(Path(one, "..", "pyvenv.cfg")))
    return os.environ.get("MPIRUN") or (str(beside) if os.path.exists(beside) else shutil.which("mpirun", path=path))


@functools.cache
def mpirun(python: str) -> tuple[str, ...]:
    """The launcher with the flags that it needs to start any number of ranks here, also as root.

    Raises RuntimeError if there is none, or if python's mpi4py does not work with it: why in its first line.
    """
    found = find_mpirun(python) or "mpirun"
    command = [found] if os.path.exists(found) else shlex.split(found)  # a path, or words
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"no {command[0]}")
    try:
        version = output_of(*command, "--version")
        # MPICH needs none of these: it runs as root, binds nothing and counts no slots.
        if "Open MPI" in version:
            command += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        probe = "from mpi4py import MPI; print(f'world of {MPI.COMM_WORLD.size}')"
        seen = output_of(*command, "-n", "2", python, "-c", probe)
    except (OSError, subprocess.SubprocessError) as error:
        seen = str(getattr(error, "output", None) or error)
    if "world of 2" not in seen:
        why = f"{command[0]} and the mpi4py of {python} do not work together"
        raise RuntimeError(f"{why}\n(for another MPI give MPIRUN= and a VENV= of its own)\n{seen}")
    return tuple(command)


def output_of(*command: str) -> str:
    run = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        text=True,
        check=True,
    )
    return run.stdout


def own_directory() -> Path:
    """What tests keep in /tmp between their runs: this user's alone, whatever others have left there under its name.

    Root within a user namespace has the id of root, but not its files.
    """
    for number in itertools.count():
        path = Path(tempfile.gettempdir(), f"ipcreduce-tests-{os.getuid()}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            break
    return path


def letters_beyond_ascii(text: str) -> set[str]:
    """Those in what a command prints, but for the letters of this machine's folders."""
    folders = "".join([str(ROOT), sys.prefix, tempfile.gettempdir(), *os.environ.values()])
    return {letter for letter in text if not letter.isascii()} - set(folders)


TOKEN = "TEST_RUN_OF_IPCREDUCE"  # in the environment of every rank that tests start, with a word for its run


def ranks_environment() -> dict[str, str]:
    """The environment of ranks that are started without a launcher, which says that they are ranks."""
    return environment() | {TOKEN: "plain"}


def environment() -> dict[str, str]:
    """The environment for what we start: this tree comes first on the path, and BLAS keeps to one thread."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


def left_out(python: str) -> dict[str, str]:
    """The tiers of tests that cannot run here, each with the reason."""
    reasons = {}
    try:
        mpirun(python)
    except RuntimeError as error:
        reasons = dict.fromkeys(("mpi", "sim", "gpu"), str(error).splitlines()[0])
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        reasons["sim"] = "no C++ compiler (g++, or give CXX=)"
    if cuda()[0] == 0:
        reasons["gpu"] = "no GPU"
    elif subprocess.run([python, "-c", "import cupy"], capture_output=True).returncode:
        reasons["gpu"] = "CuPy is not installed"
    return reasons
