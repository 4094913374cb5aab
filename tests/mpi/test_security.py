"""Ranks in containers, by namespaces, and of several users: the statements of SECURITY.md that need them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.shared.bounds import HANG
from tests.tools import machine
from tests.tools.processes import remove_left

ALICE, BOB = 54321, 54322  # users that no list has
CAROL, DAVE = 54323, 54324  # of one test alone, whose files are looked for

PIDS = ("--pid", "--fork", "--mount-proc", "--kill-child")

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")


class Rank(NamedTuple):
    """The way in which a rank is started: the words before the command, and its environment."""

    before: tuple[str, ...] = ()
    environ: dict[str, str] = {}  # noqa: RUF012


def user(uid: int) -> Rank:
    """A rank of another user."""
    return Rank(environ={"SECURITY_USER": str(uid)})


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that every user may write to; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)
        yield Path(path)


# ---- starting ranks
@functools.cache
def why_not(command: tuple[str, ...]) -> str:
    """The reason for which a command does not run here; "" if it does."""
    try:
        done = subprocess.run(
            [*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def unshare(*namespaces: str, mount: str = "") -> Rank:
    """A rank in such namespaces of its own, with a ``mount`` there; skips where the kernel forbids it."""
    as_root = () if os.getuid() == 0 else ("--user", "--map-root-user")
    command = ("unshare", *as_root, *namespaces) if as_root or namespaces else ()
    first = "true"
    if "--pid" in namespaces:  # MPICH names its file by the pid: it starts where no other process of pid 1 has one
        first, mount = "mount -t tmpfs tmpfs /dev/shm", "umount -l /dev/shm"
        command += ("sh", "-c", f'{first} && exec "$0" "$@"')
    probe = ("unshare", *as_root, *namespaces, "--mount", "sh", "-c", f'{first} && {mount or "true"} && exec "$0"')
    if reason := why_not(probe):
        pytest.skip(f"no {' '.join([*namespaces, mount])} by unshare: {reason}")
    return Rank(command, {"SECURITY_MOUNT": mount})


def shm(options: str = "") -> Rank:
    """A rank in a container with a /dev/shm of its own."""
    return unshare(mount=f"mount -t tmpfs {options} tmpfs /dev/shm")


def start(scenario: str, directory: Path, rank: int, size: int, how: Rank, **more: str) -> subprocess.Popen[str]:
    on_sim = ["-m", "tests.simulated"] if "SIM_DEVICES" in more else []
    worker = [*on_sim, "-m", "tests.programs.security_worker", scenario, str(directory), str(rank), str(size)]
    basic = {"CUDA_VISIBLE_DEVICES": "", "IPCREDUCE_CACHE_DIR": str(directory / "cache"), "SIM_SHARED": str(directory)}
    environ = machine.ranks_environment() | basic | more | how.environ
    if "SECURITY_USER" in environ:
        environ.pop("COVERAGE_PROCESS_CONFIG", None)  # that user may write no file beside ours
    return subprocess.Popen(
        [*how.before, sys.executable, *worker], cwd=machine.ROOT, text=True, start_new_session=True, env=environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit status, output) of each; who has not ended after ``HANG`` seconds is killed."""
    until = time.monotonic() + HANG
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = [(process.returncode, process.communicate()[0]) for process in processes]
    remove_left()  # also of who has become another user, or mounted something over /dev/shm
    return found


def hold(scenario: str, directory: Path, *ranks: Rank, **environ: str) -> None:
    """The scenario holds among these ranks."""
    processes = [start(scenario, directory, rank, len(ranks), how, **environ) for rank, how in enumerate(ranks)]
    assert outputs(processes) == [(0, "right\n")] * len(ranks)


# ---- containers
NOT_SHARED = "opening the control page (is /dev/shm shared between the ranks?) failed on 1 of 2 ranks: rank 1: "
MISSING = "[Errno 2] No such file or directory"
APART = {
    "own": (["", ""], f"{NOT_SHARED}{MISSING}"),
    "read-only": (["-o ro", ""], "creating the control page failed on 1 of 2 ranks: rank 0: [Errno 30] Read-only file"),
    "one page": (["-o size=4k", ""], "creating the control page failed on 1 of 2 ranks: rank 0: [Errno 28] No space"),
}


@pytest.mark.parametrize("kind", APART)
def test_each_container_has_a_dev_shm_of_its_own(directory: Path, kind: str):
    options, words = APART[kind]
    hold("apart", directory, *map(shm, options), SECURITY_WORDS=words, PYTHONWARNINGS="ignore:/dev/shm has no room")


def test_how_many_communicators_find_room_in_a_container_of_docker(directory: Path):
    hold("many", directory, shm("-o size=64m"))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_container_has_no_dev_shm(directory: Path, rank: int):
    """The rank that would make the files, or the other one."""
    ranks = [Rank(), Rank()]
    ranks[rank] = unshare(mount="mount -t tmpfs tmpfs /dev")
    words = [f"creating the control page failed on 1 of 2 ranks: rank 0: {MISSING}", f"{NOT_SHARED}{MISSING}"]
    hold("apart", directory, *ranks, SECURITY_WORDS=words[rank])


def test_a_dev_shm_that_one_rank_may_only_read(directory: Path):
    read_only = unshare(mount="mount -o bind,remount,ro /dev/shm")
    hold("apart", directory, Rank(), read_only, SECURITY_WORDS=f"{NOT_SHARED}[Errno 30] Read-only file system")


@pytest.mark.skipif("sim" in machine.left_out(sys.executable), reason="no simulated device: needs g++")
def test_with_gpus_in_containers_without_a_shared_dev_shm(directory: Path):
    """Device arrays go over NCCL."""
    words = f"backend nccl|{NOT_SHARED}"
    environ = {
        "SIM_DEVICES": "2",
        "IPCREDUCE_WORKSPACE_MB": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONWARNINGS": "ignore:NCCL is used",
    }
    hold("apart", directory, shm(), shm(), SECURITY_WORDS=words, **environ)


def test_networks_of_their_own_that_do_not_meet(directory: Path):
    apart = unshare("--net", mount="mount -t tmpfs tmpfs /dev/shm")
    if why_not((*apart.before, sys.executable, "-c", "from mpi4py import MPI")):
        pytest.skip("MPI does not start without a network")  # Open MPI
    hold("alone_in_its_network", directory, apart, apart)


@pytest.mark.skipif(shutil.which("ip") is None, reason="no ip, of iproute2")
def test_networks_of_their_own_with_a_link(directory: Path):
    """As by default between two containers of one host: loopback is not the same for both."""
    names = [f"ipcreduce-{uuid.uuid4().hex[:8]}-{side}" for side in "ab"]
    links = [name[-10:] for name in names]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True)
            command_works("ip", "netns", "add", name)
        command_works("ip", "link", "add", links[0], "netns", names[0], "type", "veth",
                      "peer", "name", links[1], "netns", names[1])  # fmt: skip
        for address, name, link in zip(("10.213.7.1/24", "10.213.7.2/24"), names, links, strict=True):
            command_works("ip", "-n", name, "address", "add", address, "dev", link)
            for up in (link, "lo"):
                command_works("ip", "-n", name, "link", "set", up, "up")
        ranks = [Rank(("ip", "netns", "exec", name), shm().environ) for name in names]
        hold("apart", directory, *ranks, SECURITY_WORDS=f"{NOT_SHARED}{MISSING}")


def command_works(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no {command[0]}: {error}")
    if done.returncode:
        pytest.skip(f"no {' '.join(command[:3])}: {done.stderr.strip()}")


@pytest.mark.parametrize("offset", ["--boottime", "--monotonic"])
def test_clocks_of_their_own(directory: Path, offset: str):
    """As in containers that CRIU has restored: one rank's clock is a day ahead."""
    hold("together", directory, Rank(), unshare("--time", offset, "86400"))
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    hold("together", directory, unshare("--time", offset, "86400"), Rank())


def test_a_rank_without_proc(directory: Path):
    """It counts as a host of its own."""
    bare = unshare(mount="mount -t tmpfs tmpfs /proc")
    hold("apart", directory, Rank(), bare, SECURITY_WORDS="the ranks are on 2 hosts")


@pytest.mark.parametrize("namespaces", [PIDS, ["--ipc"], ["--uts"]])
def test_other_namespaces_may_differ(directory: Path, namespaces: Sequence[str]):
    """The ranks share /dev/shm."""
    hold("together", directory, unshare(*namespaces), unshare(*namespaces))


def test_a_death_in_another_pid_namespace_is_noticed_at_the_timeout(directory: Path):
    apart = unshare(*PIDS)
    processes = [start("dies_unseen", directory, rank, 2, apart) for rank in range(2)]  # both have pid 1
    assert outputs(processes) == [(0, "right\n"), (9, "")]


# ---- homes
@needs_root
def test_homes_that_cannot_be_used(directory: Path):
    """Unset, empty, missing, of another user who lets nobody in or only read."""
    closed, readable = directory / "closed", directory / "readable"
    closed.mkdir(mode=0o700)
    readable.mkdir(mode=0o755)
    hold("homes", directory, user(ALICE), SECURITY_HOMES=f"unset||/nonexistent|{closed}|{readable}")


@needs_root
def test_a_home_that_is_read_only(directory: Path):
    """For root, too."""
    home = directory / "home"
    home.mkdir()
    hold("homes", directory, unshare(mount=f"mount -t tmpfs -o ro tmpfs {home}"), SECURITY_HOMES=str(home))


# ---- users
@needs_root
def test_jobs_of_two_users_at_once(directory: Path):
    """Dave looks at all that Carol's job leaves open while it starts, and runs a job of his own."""
    carols, daves = directory / "carol", directory / "dave"
    for path in (carols, daves):
        path.mkdir()
        path.chmod(0o777)
    jobs = [("shown", carols, user(CAROL), 2), ("together", daves, user(DAVE), 2), ("looks", carols, user(DAVE), 1)]
    assert outputs(
        [start(name, path, rank, size, how) for name, path, how, size in jobs for rank in range(size)]
    ) == 5 * [(0, "right\n")]
    assert not {CAROL, DAVE} & owners(Path("/dev/shm"))


def owners(folder: Path) -> set[int]:
    """The users of the files in a folder."""
    found = set()
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another test's, gone meanwhile
            found.add(file.stat().st_uid)
    return found


@needs_root
@pytest.mark.parametrize("first", [ALICE, 0], ids=["another user's", "root's"])
def test_ranks_of_several_users_share_no_memory(directory: Path, first: int):
    ranks = user(first) if first else Rank(), user(BOB)
    hold("apart", directory, *ranks, SECURITY_WORDS=f"{NOT_SHARED}[Errno 13] Permission denied")


@needs_root
def test_root_opens_what_another_user_shares(directory: Path):
    hold("together", directory, user(ALICE), Rank())
