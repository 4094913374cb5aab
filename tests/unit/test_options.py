"""Options from environment variables: their names and values."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce import options
from ipcreduce.cuda import compiler
from ipcreduce.errors import ArgumentError, UnsupportedError
from ipcreduce.ipc import plan
from tests.tools.machine import ROOT


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours is set, and none has been warned of."""
    for name in [name for name in os.environ if name.startswith("IPCREDUCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(options, "_warned", set())


def test_the_known_names_are_those_that_are_read():
    code = "".join(path.read_text() for path in (ROOT / "ipcreduce").rglob("*.py"))
    assert set(re.findall(r"(?:environ\.get|environ|is_on)[(\[]\s*\"(IPCREDUCE_\w+)\"", code)) == {*options.VARIABLES}


def test_an_unknown_name_warns_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_SYNCH", "1")
    monkeypatch.setenv("IPCREDUCE_X", "")
    assert list(options.unknown_variables()) == [
        "ipcreduce does not know the environment variable IPCREDUCE_SYNCH, which has no effect. "
        "Did you mean IPCREDUCE_SYNC?",
        "ipcreduce does not know the environment variable IPCREDUCE_X, which has no effect. "
        "There are IPCREDUCE_BACKEND, IPCREDUCE_BATCH_INVARIANT, IPCREDUCE_CACHE_DIR, IPCREDUCE_ENGINES, "
        "IPCREDUCE_FUSED, IPCREDUCE_HOSTID, IPCREDUCE_MEMORY, IPCREDUCE_SYNC, IPCREDUCE_WORKSPACE_MB.",
    ]
    assert not list(options.unknown_variables())


def test_known_names_do_not_warn(monkeypatch: pytest.MonkeyPatch):
    for name in (*options.VARIABLES, "OTHER_IPCREDUCE_NAME"):
        monkeypatch.setenv(name, "1")
    assert not list(options.unknown_variables())


@pytest.mark.parametrize(("text", "meant"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_sync(monkeypatch: pytest.MonkeyPatch, text: str | None, meant: bool):
    if text is not None:
        monkeypatch.setenv("IPCREDUCE_SYNC", text)
    found = options.Options.of(None, 1.0, None)
    assert (found.sync, found.wrong) == (meant, None)


@pytest.mark.parametrize("text", ["yes", "2", " 1", "-1", "on", "no"])
def test_a_wrong_sync_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("IPCREDUCE_SYNC", text)
    with pytest.raises(ArgumentError):
        options.is_on("IPCREDUCE_SYNC")
    assert options.Options.of(None, 1.0, None).wrong == f"IPCREDUCE_SYNC is {text!r}. Set it to 0 or 1"


@pytest.mark.parametrize(("text", "virtual"), [(None, True), ("", True), ("ipc", False), ("vmm", True)])
def test_memory(monkeypatch: pytest.MonkeyPatch, text: str | None, virtual: bool):
    if text is not None:
        monkeypatch.setenv("IPCREDUCE_MEMORY", text)
    found = options.Options.of(None, 1.0, None)
    assert (found.virtual, found.wrong) == (virtual, None)


def test_a_wrong_memory_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_MEMORY", "VMM")
    assert options.Options.of(None, 1.0, None).wrong == "IPCREDUCE_MEMORY is 'VMM'. Set it to vmm or ipc, or unset it"


def test_a_wrong_workspace_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_WORKSPACE_MB", "1G")
    assert options.Options.of(None, 1.0, None).wrong == (
        "IPCREDUCE_WORKSPACE_MB is '1G', which is no whole number from 1 to 1048576. Set it to megabytes, or unset it"
    )


@pytest.mark.parametrize("given", [True, 1.5, "8", 0, (1 << 20) - 1, (1 << 40) + 1])
def test_a_wrong_workspace_argument_is_an_error(given: object):
    assert options.Options.of(None, 1.0, None, None, given).wrong == (
        f"workspace is {given!r}, which is no number of bytes from 1048576 to 1099511627776. "
        "Pass one, or None for 128 MB"
    )


@pytest.mark.parametrize("text", ["", "0", "-1", " 1", "²", "1" * 5000, "\udcff"])
def test_any_wrong_workspace_is_told_in_few_words(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("IPCREDUCE_WORKSPACE_MB", text)
    wrong = options.Options.of(None, 1.0, None).wrong
    assert wrong is not None
    assert "Set it to megabytes" in wrong[:200]


@pytest.mark.parametrize(
    ("given", "ordinal"),
    [
        (None, None), ("auto", "auto"), (2, 2), (np.int64(2), 2), ("cuda:2", 2), ("cuda", None),
        (SimpleNamespace(type="cuda", index=2), 2), (SimpleNamespace(type="cuda", index=None), None),  # PyTorch's
        (SimpleNamespace(id=2), 2), (SimpleNamespace(device_id=2), 2),  # CuPy's and Numba's; cuda.core's
        (SimpleNamespace(platform="gpu", id=5, local_hardware_id=2), 2),  # JAX's, whose id counts all processes' GPUs
    ],
)  # fmt: skip
def test_a_device_of_any_library(given: Any, ordinal: Any):
    found = options.Options.of(given, 1.0, None)
    assert (found.wrong, found.device) == (None, ordinal)


@pytest.mark.parametrize(
    "given",
    [
        True, -1, 1.0, "cpu", "cuda:", "cuda:-1", "cuda:x", "cuda:0:0", "1", (1,), "cuda:" + "1" * 5000,
        SimpleNamespace(type="cpu", index=None), SimpleNamespace(type="cpu", index=0), SimpleNamespace(id="0"),
        SimpleNamespace(platform="cpu", id=0, local_hardware_id=0),
    ],
)  # fmt: skip
def test_what_names_no_gpu_is_refused(given: Any):
    assert re.match("device is .{,60}, which names no GPU. Pass", options.Options.of(given, 1.0, None).wrong or "")


class Raising:
    """A device whose ordinal cannot be read."""

    @property
    def id(self) -> int:
        raise LookupError("gone")


def test_an_option_whose_methods_raise_is_an_error():
    assert options.Options.of(Raising(), 1.0, None).wrong == "options cannot be read: LookupError: gone"


def test_the_workspace_argument_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_WORKSPACE_MB", "3")
    assert options.Options.of(None, 1.0, None).workspace == 3 << 20
    assert options.Options.of(None, 1.0, None, None, (1 << 20) + 5).workspace == (1 << 20) + 5


def test_a_wrong_cache_directory_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", f"{__file__}/cache")
    with pytest.raises(UnsupportedError, match=r"Set IPCREDUCE_CACHE_DIR to a directory of yours$") as caught:
        compiler.cache_directory()
    assert str(caught.value).startswith(f"the kernel cache IPCREDUCE_CACHE_DIR={__file__}/cache cannot be made (")


def test_algorithms_are_those_of_the_plan():
    assert (*plan.ALGORITHMS, plan.BULK, "direct") == options.ALGORITHMS


@pytest.mark.parametrize("variable", [False, True])
def test_mpi_is_no_backend(monkeypatch: pytest.MonkeyPatch, variable: bool):
    """The ranks' launcher is MPI's, and many expect the name."""
    if variable:
        monkeypatch.setenv("IPCREDUCE_BACKEND", "mpi")
    where = "IPCREDUCE_BACKEND" if variable else "backend"
    assert options.Options.of(None, 1.0, None, None if variable else "mpi").wrong == (
        f"{where} is 'mpi', which is unknown. Choose host, as the backend of NumPy arrays is called: on one host they "
        "do not go over MPI"
    )


def test_seconds_are_a_number_of_python_or_numpy():
    for fine in (5, 5.0, np.int64(5), np.float32(5), np.float64(5)):
        found = options.Options.of(None, fine, None)
        assert (found.wrong, found.timeout, type(found.timeout)) == (None, 5.0, float)
    for wrong in (0, -1, True, np.True_, np.float32("nan"), np.int64(0), 10**400, "5", None, np.ones(2)):
        assert "which is no positive number of seconds" in str(options.Options.of(None, wrong, None).wrong)
