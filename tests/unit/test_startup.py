"""The names by which ranks know that they share a host, a network, or a clock."""

from __future__ import annotations

import builtins
import errno
import os
from typing import Any

import pytest

from ipcreduce import startup


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


@pytest.mark.parametrize("name", ["a", "h\u00f4te", "x" * 1000, "\udcff"])
def test_names_of_any_length_and_script_fit_and_are_told_apart(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_HOSTID", name)
    first = startup._host()
    monkeypatch.setenv("IPCREDUCE_HOSTID", f"{name}1")
    assert startup._host() != first
    assert len(first) == 64
    assert first.isascii()
