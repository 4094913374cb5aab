"""``python -m tests.programs.security_worker SCENARIO DIRECTORY RANK SIZE``: a rank in a container of its own.

Environment: SECURITY_WORDS, words that describe() has, separated by |; SECURITY_USER, the id of the user that the
process becomes once all is imported (Python itself may lie where that user reads nothing); SECURITY_MOUNT, a command
that mounts something in a namespace of this process alone, once MPI has started (MPICH needs /dev/shm for that).

The ranks meet in DIRECTORY. On the simulated device:
``python -m tests.simulated -m tests.programs.security_worker ...``.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401  # of socket.create_connection()
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from ipcreduce import Communicator, errors
from ipcreduce.cuda import compiler
from ipcreduce.host.segment import Segment
from ipcreduce.page.control_page import Page
from ipcreduce.ranks import connections
from tests.shared import bounds, clock
from tests.shared.bounds import late, no_hang, until
from tests.shared.by_files import ByFiles

_NEW_MOUNTS = 0x20000  # unshare: CLONE_NEWNS
_DUMPABLE = 4  # prctl: what /proc shows of a process that has changed its user is root's else
MACROS = {
    "IPCREDUCE_RANKS": "2", "IPCREDUCE_RANK": "0", "IPCREDUCE_DTYPE": "int32", "IPCREDUCE_OP": "sum",
    "IPCREDUCE_DEPTH": "1", "IPCREDUCE_WHOLE_PACKETS": "1",
}  # fmt: skip


def become(user: int) -> None:
    """Let this process be one of that user, as if it had been started as such."""
    with Communicator(MPI.COMM_SELF) as alone:  # imports what it needs
        alone.allreduce(1.0)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)


def mount(command: str) -> None:
    """Run a command that changes what is mounted, for this process only."""
    assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
    subprocess.run(f"mount --make-rprivate / && {command}", shell=True, check=True)


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block must raise this, with these words in the message."""
    found = None
    try:
        yield
    except kind as error:
        found = error
    assert found is not None, f"no {kind.__name__}"
    assert all(word in str(found) for word in words), f"{words} in {found}"


def denied(call: Callable[..., Any], *arguments: Any) -> None:
    with raises(PermissionError):
        call(*arguments)


def owner(file: str) -> int | None:
    """The user of a file; None if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(file).st_uid
    return None


def await_file(path: Path) -> None:
    until(path.exists, path.name)


def right(comm: Communicator, count: int = 1000) -> None:
    assert (comm.allreduce(np.full(count, comm.rank + 1.0)) == comm.size * (comm.size + 1) / 2).all()


def reduces(group: ByFiles, *words: str) -> None:
    """A communicator whose description has these words starts soon; its results and its errors are right."""
    with no_hang("start-up"):
        made = Communicator(group)
    with made as comm:
        for word in (*words, *filter(None, os.environ.get("SECURITY_WORDS", "").split("|"))):
            assert word in comm.describe(), f"{word!r} in {comm.describe()}"
        for count in (1, 1000, 300_000):
            right(comm, count)
        if "tests.simulated" in sys.modules:
            on_device(comm)
        with raises(errors.RankMismatchError, "(3,)", "(4,)"):
            comm.allreduce(np.ones(3 + (comm.rank == comm.size - 1)))
        right(comm)


def on_device(comm: Communicator) -> None:
    import cupy

    assert comm.backend == "nccl", comm.describe()
    result = comm.allreduce(cupy.full((1000,), comm.rank + 1, np.float32))
    comm.synchronize()
    assert (cupy.asnumpy(result) == comm.size * (comm.size + 1) / 2).all()


# ---- scenarios
def apart(group: ByFiles, directory: Path) -> None:
    """The ranks share no memory, and a description says why."""
    reduces(group, "host arrays: by messages of MPI, because ")


def together(group: ByFiles, directory: Path) -> None:
    """The ranks share memory, whatever else they do not share."""
    reduces(group, "of shared memory")


def alone_in_its_network(group: ByFiles, directory: Path) -> None:
    """Ranks that do not reach each other at all: start-up ends in time, and says what to look at."""
    words = (
        "neither share memory (opening the control page",
        "connecting the ranks (is TCP",
        "Let the ranks share /dev/shm",
    )
    refused = raises(errors.UnsupportedError, *words)
    with no_hang("start-up"), mock.patch.object(connections, "_MAX_SECONDS", 2.0), refused:
        Communicator(group)
    with Communicator(MPI.COMM_SELF) as alone:
        right(alone)


def dies_unseen(group: ByFiles, directory: Path) -> None:
    """The last rank ends where no pid tells of it: the others miss it at the timeout, and not before."""
    comm = Communicator(group)
    assert "of shared memory" in comm.describe()
    assert os.getpid() == 1, "each is the first process of its namespace, so that pids mean others here"
    of_mpi = [line.split()[3] for line in Path("/proc/self/maps").read_text().splitlines() if "/mpich_shm_1_" in line]
    device = os.stat("/dev/shm").st_dev
    assert f"{os.major(device):02x}:{os.minor(device):02x}" not in of_mpi, "MPI's own memory is the other rank's, too"
    for _ in range(2):
        right(comm)
        late(0.3)  # a few turns of the watchdog, which must take nobody for dead
    if group.Get_rank() == group.Get_size() - 1:
        os._exit(9)
    begun = clock.now()
    with clock.passing(20.0), raises(errors.PeerTimeoutError, f"rank {group.Get_size() - 1} did not call within"):
        right(comm)
    assert clock.now() - begun > 120 or comm._state.calls.page.missed()
    with no_hang("close()"):
        comm.close()


def shown(group: ByFiles, directory: Path) -> None:
    """While start-up shares memory, its file waits until somebody has looked at it."""

    def waits(kind: type, name: str) -> None:
        opens: Callable[..., Any] = kind.open  # type: ignore[attr-defined]

        def looked_at(path: str, *arguments: Any) -> Any:
            (directory / f"{name}.partial").write_text(f"{os.getpid()} {path}")
            (directory / f"{name}.partial").rename(directory / name)
            await_file(directory / f"{name} seen")
            return opens(path, *arguments)

        kind.open = looked_at  # type: ignore[attr-defined]

    waits(Page, "page")
    waits(Segment, "segment")
    cache = compiler.cache_directory()
    (cache / "kernel").touch()
    reduces(group, "of shared memory")


def looks(group: ByFiles, directory: Path) -> None:
    """Another user finds the files of :func:`shown`, and gets at none of them."""
    for name in ("page", "segment"):
        await_file(directory / name)
        pid, path = (directory / name).read_text().split()
        status = os.stat(path)
        assert (status.st_mode & 0o7777, status.st_uid != os.getuid()) == (0o600, True), status
        others = map(str, Path("/dev/shm").glob("ipcreduce-*"))
        for file in {path, *(file for file in others if owner(file) == status.st_uid)}:
            for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
                denied(os.open, file, flags)
            denied(os.unlink, file)
            denied(os.rename, file, "/dev/shm/ipcreduce-mine")
        denied(os.listdir, f"/proc/{pid}/fd")
        denied(os.listdir, f"/proc/{pid}/map_files")
        denied(os.open, f"/proc/{pid}/mem", os.O_RDONLY)
        (directory / f"{name} seen").touch()
    cache = Path(os.environ["IPCREDUCE_CACHE_DIR"])
    with raises(errors.UnsupportedError, "other users may write to", f"this process is of user {os.getuid()}"):
        compiler.cache_directory()
    denied(os.listdir, cache)
    denied(os.open, cache / "kernel", os.O_RDONLY)


def homes(group: ByFiles, directory: Path) -> None:
    """A home that cannot be used: kernels are compiled all the same, it is said what to set, and then they are kept."""
    del os.environ["IPCREDUCE_CACHE_DIR"]
    os.environ.pop("XDG_CACHE_HOME", None)
    for home in os.environ["SECURITY_HOMES"].split("|"):
        os.environ["HOME"] = home
        if home == "unset":
            del os.environ["HOME"]
        compiler._cache.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert compiler.compile_kernel("verify", MACROS, (9, 0)).startswith(b"\x7fELF")
        [text] = [str(one.message) for one in caught]
        assert "the kernel cache " in text, text
        assert "et IPCREDUCE_CACHE_DIR to a directory of yours" in text, text
        assert not Path("~").exists()
    compiler._cache.cache_clear()
    os.environ["IPCREDUCE_CACHE_DIR"] = str(directory / f"own {os.getuid()}")
    assert compiler.compile_kernel("verify", MACROS, (9, 0)).startswith(b"\x7fELF")
    assert any((directory / f"own {os.getuid()}").iterdir())


def many(group: ByFiles, directory: Path) -> None:
    """So many communicators of 4 ranks find room in the 64 MB that Docker gives."""
    made: list[Any] = []
    with raises(OSError, "No space left on device: /dev/shm needs 0."):
        while True:
            made.append((Page.create(0, 4), Segment.create(0, 4)))
    assert len(made) == 41
    assert 1 << 20 < made[0][1].nbytes < 4 << 20
    assert made[-1][1].nbytes < 400_000


SCENARIOS = [apart, together, alone_in_its_network, dies_unseen, shown, looks, homes, many]


def main(name: str, directory: str, rank: str, size: str) -> None:
    """Run one scenario as one rank."""
    bounds.patient()
    os.umask(0)  # the directory of the ranks' messages is for all users
    [scenario] = [one for one in SCENARIOS if one.__name__ == name]
    if name == "homes":
        compiler.compile_kernel("verify", MACROS, (9, 0))  # imports all that the compiler needs
        kernels = Path(directory) / "kernels"  # that user may not enter this tree
        kernels.mkdir()
        for source in compiler.kernel_directory().glob("*.cu*"):
            shutil.copyfile(source, kernels / source.name)
        compiler.kernel_directory = lambda: kernels  # type: ignore[assignment]
    if os.environ.get("SECURITY_MOUNT"):
        mount(os.environ["SECURITY_MOUNT"])
    if os.environ.get("SECURITY_USER"):
        become(int(os.environ["SECURITY_USER"]))
    scenario(ByFiles(directory, rank, size), Path(directory))
    print("right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
