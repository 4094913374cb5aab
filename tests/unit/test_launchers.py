"""Launchers by their environment variables, and those whose ranks MPI does not see."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import ipcreduce
from ipcreduce.errors import ArgumentError, UnsupportedError
from ipcreduce.ranks import groups, launchers, mpi
from ipcreduce.ranks.launchers import Launch

VARIABLES = [name for _, *names in launchers._LAUNCHERS for name in names]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*VARIABLES, "TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("name", "rank", "size"), launchers._LAUNCHERS)
def test_launchers(bare: pytest.MonkeyPatch, name: str, rank: str, size: str):
    assert Launch.seen() == Launch("", 0, 1, ())
    bare.setenv(rank, "3")
    assert Launch.seen() == Launch()
    bare.setenv(size, "4")
    assert Launch.seen() == Launch(name, 3, 4, (rank, size))
    for text in ("x", "²", "1" * 5000):
        bare.setenv(rank, text)
        assert Launch.seen() == Launch()


@pytest.mark.parametrize("name", mpi._LOCAL_RANKS)
def test_the_number_on_a_host(monkeypatch: pytest.MonkeyPatch, name: str):
    for other in mpi._LOCAL_RANKS:
        monkeypatch.delenv(other, raising=False)
    ranks = mpi.MpiRanks.of(MPI.COMM_SELF)
    for text, local in ("3", 3), ("", 0), ("²", 0), ("1" * 5000, 0):
        monkeypatch.setenv(name, text)
        assert ranks.local_rank([]) == local


def test_a_batch_script_is_no_rank(bare: pytest.MonkeyPatch):
    """Slurm sets these in it, though it started one process only."""
    bare.setenv("SLURM_PROCID", "0")
    bare.setenv("SLURM_NTASKS", "4")
    assert Launch.seen() == Launch()
    assert groups.of(None).size == 1


def test_mpirun_within_a_slurm_step(bare: pytest.MonkeyPatch):
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "2", "PMI_SIZE": "4"}.items():
        bare.setenv(name, value)
    assert Launch.seen() == Launch("MPICH or Intel MPI", 2, 4, ("PMI_RANK", "PMI_SIZE"))


# ---- ranks that MPI does not see: pytest runs under no launcher, so that MPI knows this process alone
def started(patch: pytest.MonkeyPatch, rank: str, size: str, ranks: int) -> None:
    patch.setenv(rank, str(ranks - 1))
    patch.setenv(size, str(ranks))


@pytest.mark.parametrize(("name", "rank", "size"), launchers._LAUNCHERS)
def test_ranks_that_mpi_does_not_see_are_refused(bare: pytest.MonkeyPatch, name: str, rank: str, size: str):
    """Each would be alone, and every sum wrong without a word."""
    started(bare, rank, size, 4)
    for group in (None, MPI.COMM_WORLD):
        with pytest.raises(UnsupportedError) as caught:
            ipcreduce.Communicator(group)
        text = str(caught.value)
        assert f"started 4 ranks ({size}=4, of {name})" in text
        assert f"mpi4py uses {launchers.library()}" in text
        assert "make Communicator(MPI.COMM_SELF)" in text
        assert f"inherits {rank} and {size}: unset them" in text
    bare.setattr(ipcreduce.default, "_default", None)
    for default in (ipcreduce.get_communicator, lambda: ipcreduce.allreduce(1.0)):
        with pytest.raises(UnsupportedError, match="launcher and mpi4py use different MPI libraries"):
            default()


def test_a_group_of_one_is_meant_to_be_one(bare: pytest.MonkeyPatch):
    started(bare, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", 4)
    part = MPI.COMM_WORLD.Split(0)
    for group in (MPI.COMM_SELF, part):
        with ipcreduce.Communicator(group) as comm:
            assert comm.allreduce(3.0) == 3.0
    part.Free()


@pytest.mark.parametrize(("_", "rank", "size"), launchers._LAUNCHERS)
def test_a_launcher_of_one_rank_is_right(bare: pytest.MonkeyPatch, _: str, rank: str, size: str):
    started(bare, rank, size, 1)
    for group in (None, MPI.COMM_WORLD):
        assert groups.of(group).size == 1


def test_torchruns_processes_are_not_mpis(bare: pytest.MonkeyPatch):
    """MPI.COMM_WORLD would be a communicator of one rank in each of them."""
    bare.setenv("TORCHELASTIC_RUN_ID", "x")
    bare.setenv("WORLD_SIZE", "4")
    for group in (None, MPI.COMM_WORLD):
        with pytest.raises(ArgumentError, match=r"4 processes, but MPI knows this one only, .* Call init_process"):
            groups.of(group)
    assert groups.of(MPI.COMM_SELF).size == 1
    bare.setenv("WORLD_SIZE", "1")
    assert groups.of(None).size == 1
