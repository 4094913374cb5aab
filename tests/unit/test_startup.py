"""The names by which ranks know that they share a host, a network, or a clock."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import ipcreduce
from ipcreduce import communicator, process, startup
from ipcreduce.errors import UnsupportedError
from tests.tools.machine import ROOT


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """refused(number): opening any file fails by that error from then on."""

    def refuse(number: int) -> None:
        def fail(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(builtins, "open", fail)

    return refuse


def test_a_process_that_can_open_no_file_is_on_no_other_host(refused: Any):
    """Its peers read the kernel's name, and it would go by another one."""
    refused(errno.EMFILE)
    for name in (startup._host, startup._network, startup._clock):
        with pytest.raises(OSError, match="Too many open files"):
            name()


def test_without_proc_the_host_has_its_name_and_the_clock_none(refused: Any, monkeypatch: pytest.MonkeyPatch):
    refused(errno.ENOENT)
    monkeypatch.setattr(startup.socket, "gethostname", lambda: "one")
    first = startup._host()
    monkeypatch.setattr(startup.socket, "gethostname", lambda: "other")
    assert startup._host() != first
    assert startup._clock() == "", "compared with no other one"


def test_any_other_module_kernel_or_version_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a tree of sources and in an installed package they are the same."""
    build, mine = startup._build.__wrapped__, startup._build()
    assert build() == mine
    package, kernels = (Path(shutil.copytree(ROOT / name, tmp_path / name)) for name in ("ipcreduce", "kernels"))
    monkeypatch.setattr(startup, "_FOLDER", package)
    monkeypatch.setattr(startup, "kernel_directory", lambda: kernels)
    assert build() == mine
    (package / "further.pyc").write_bytes(b"x")
    kernels = kernels.rename(package / "kernels")  # as in a wheel
    assert build() == mine
    found = {mine}
    for path in (package / "dtypes.py", package / "host" / "shared.py", kernels / "reduce.cuh", kernels / "copy.cu"):
        path.write_text(path.read_text() + "\n")
        found.add(build())
    monkeypatch.setattr(ipcreduce, "__version__", "0.1.1")
    assert build().startswith("0.1.1, code ")
    assert len(found) == 5
    assert all(len(one) <= 64 for one in found)


def test_without_kernels_there_is_a_build():
    """Ranks with host arrays only need none."""
    missing = mock.patch.object(startup, "kernel_directory", side_effect=UnsupportedError("missing"))
    with missing:
        assert startup._build.__wrapped__() != startup._build()


@pytest.mark.parametrize("name", ["a", "h\u00f4te", "x" * 1000, "\udcff"])
def test_names_of_any_length_and_script_fit_and_are_told_apart(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_HOSTID", name)
    first = startup._host()
    monkeypatch.setenv("IPCREDUCE_HOSTID", f"{name}1")
    assert startup._host() != first
    assert len(first) == 64
    assert first.isascii()


def test_a_communicator_that_is_not_made_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """Here because a warning at its end is an error."""
    monkeypatch.setattr(communicator, "unknown_variables", lambda: ["a warning"])
    before = [*process.live]
    monkeypatch.setattr(communicator.warnings, "warn", mock.Mock(side_effect=RuntimeWarning("a warning")))
    with pytest.raises(RuntimeWarning, match="a warning"):
        ipcreduce.Communicator(SimpleNamespace(rank=0, size=1, allgather=lambda data: [data]))
    assert process.live == before
