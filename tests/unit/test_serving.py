"""The plugins for the serving engines: inert unless they are asked for; what they change then, in stand-in engines."""

from __future__ import annotations

import logging
import os
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from typing import Any

import pytest

from ipcreduce import serving
from ipcreduce.errors import ArgumentError, UnsupportedError
from ipcreduce.serving import groups
from tests.tools import machine
from tests.unit.test_imports import python

PLACE = "vllm.distributed.device_communicators"


class Theirs:
    """The class that vLLM makes by itself."""


class Group:
    """A group of ranks in vLLM, or what it has for GPUs."""

    def destroy(self) -> None:
        """End."""


def module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    return made


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> type:
    """What the engines get in place of a class that needs PyTorch."""
    ours = type("EngineAllReduce", (), {})
    monkeypatch.setitem(sys.modules, "ipcreduce.serving.seat", module("seat", EngineAllReduce=ours))
    return ours


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """vLLM's module of the class, in a vLLM on CUDA without FlashInfer. Loggers are as before afterwards."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    serving._come_before_flashinfer.cache_clear()
    found = module(f"{PLACE}.custom_all_reduce", CustomAllreduce=Theirs)
    platform = types.SimpleNamespace(is_cuda=lambda: True)
    tree = {
        "vllm": module("vllm"),
        "vllm.platforms": module("vllm.platforms", current_platform=platform),
        "vllm.distributed": module("vllm.distributed", parallel_state=types.SimpleNamespace(GroupCoordinator=Group)),
        PLACE: module(PLACE, custom_all_reduce=found, cuda_communicator=types.SimpleNamespace(CudaCommunicator=Group)),
        found.__name__: found,
    }
    for name, one in tree.items():
        monkeypatch.setitem(sys.modules, name, one)
    for name in ("ipcreduce", "vllm"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    return found


@pytest.mark.parametrize("text", [None, "", "0"])
def test_inert_unless_asked_for(text: str | None, vllm: types.ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("IPCREDUCE_ENGINES", raising=False)
    if text is not None:
        monkeypatch.setenv("IPCREDUCE_ENGINES", text)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import would raise
    serving.vllm_plugin()
    serving.sglang_plugin()
    assert vllm.CustomAllreduce is Theirs
    assert logging.getLogger("ipcreduce").handlers == []


def test_inert_plugins_import_nothing():
    program = (
        "import sys, ipcreduce; before = set(sys.modules)\n"
        "import ipcreduce.serving as serving; serving.vllm_plugin(); serving.sglang_plugin()\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert python(program).strip() == "['ipcreduce.serving']"


def test_a_wrong_value_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "yes")
    for plugin in (serving.vllm_plugin, serving.sglang_plugin):
        with pytest.raises(ArgumentError, match=r"IPCREDUCE_ENGINES is 'yes'\. Set it to 0 or 1"):
            plugin()


def test_vllm_makes_our_class_and_says_so(vllm: types.ModuleType, seat: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").setLevel(logging.INFO)
    for _ in range(2):  # vLLM loads plugins again in every process
        serving.vllm_plugin()
    assert vllm.CustomAllreduce is seat
    assert said == 2 * [f"IPCREDUCE_ENGINES=1: {vllm.__name__}.CustomAllreduce is now ipcreduce's EngineAllReduce"]
    assert logging.getLogger("ipcreduce").handlers == [handler]


@pytest.mark.parametrize("text", ["", "0", "1"])
def test_the_fused_pass_is_asked_for(text: str, vllm: types.ModuleType, seat: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setenv("IPCREDUCE_FUSED", text)
    platforms: list[Any] = []
    monkeypatch.setattr(serving, "_bring_the_pass", platforms.append)
    serving.vllm_plugin()
    assert platforms == [sys.modules["vllm.platforms"].current_platform] * (text == "1")


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("invariant", ["", "0", "1"])
def test_sums_that_do_not_depend_on_the_batch(
    asked: bool,
    invariant: str,
    vllm: types.ModuleType,
    seat: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Under VLLM_BATCH_INVARIANT vLLM makes no all-reduce, which is said unless ipcreduce makes one."""
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setenv("IPCREDUCE_BATCH_INVARIANT", str(int(asked)))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    closed, made = [], []
    monkeypatch.setattr(groups, "close_with", closed.append)
    monkeypatch.setattr(groups, "make_in", made.append)
    serving.vllm_plugin()
    assert (closed, made) == ([Group], [Group] * asked)
    told = "vLLM leaves all sums to NCCL. Set IPCREDUCE_BATCH_INVARIANT=1"
    assert caplog.text.count(told) == (invariant == "1" and not asked)


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_flashinfer_does_not_come_first_unnoticed(
    given: str | None,
    vllm: types.ModuleType,
    seat: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setitem(sys.modules, "flashinfer", module("flashinfer", __spec__=ModuleSpec("flashinfer", None)))
    monkeypatch.setenv(serving._FLASHINFER, given or "")
    if given is None:
        monkeypatch.delenv(serving._FLASHINFER)
    logging.getLogger("vllm").setLevel(logging.INFO)
    for _ in range(2):
        serving.vllm_plugin()
    assert os.environ[serving._FLASHINFER] == (given or "0")
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [f"{serving._FLASHINFER}=1: vLLM asks FlashInfer first, and seldom ipcreduce. Set it to 0"] * (
        given == "1"
    )
    assert caplog.text.count("fuse_allreduce_rms") == 1


def test_a_stand_in_for_flashinfer_counts_as_flashinfer(
    vllm: types.ModuleType, seat: type, monkeypatch: pytest.MonkeyPatch
):
    """One that another package has put into sys.modules, without what the import system adds."""
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setenv(serving._FLASHINFER, "")
    monkeypatch.delenv(serving._FLASHINFER)
    stand_in = module("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    for spec in (None, ...):
        if spec is ...:
            del stand_in.__spec__
        serving._come_before_flashinfer.cache_clear()
        os.environ.pop(serving._FLASHINFER, None)
        serving.vllm_plugin()
        assert vllm.CustomAllreduce is seat
        assert os.environ[serving._FLASHINFER] == "0"


def test_a_vllm_that_does_not_fit(vllm: types.ModuleType, seat: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cuda", lambda: False)
    serving.vllm_plugin()
    assert vllm.CustomAllreduce is Theirs
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cuda", lambda: True)
    del vllm.CustomAllreduce
    with pytest.raises(UnsupportedError, match=r"this vLLM has no .*CustomAllreduce\. Unset IPCREDUCE_ENGINES"):
        serving.vllm_plugin()


def test_sglang_chooses_our_class(seat: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    hooks: list[tuple[str, Any, str]] = []
    registry = types.SimpleNamespace(register=lambda *hook: hooks.append(hook))
    place = "sglang.srt.plugins.hook_registry"
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, module(name))
    kinds = types.SimpleNamespace(REPLACE="replace")
    monkeypatch.setitem(sys.modules, place, module(place, HookRegistry=registry, HookType=kinds))
    serving.sglang_plugin()
    [(target, choose, kind)] = hooks
    assert (target, kind) == (
        "sglang.srt.distributed.device_communicators.custom_all_reduce.dispatch_custom_allreduce", "replace"
    )  # fmt: skip
    assert choose(group=None, device=None) is seat


def test_the_entry_points_exist():
    """They are in the metadata of an installation, where it is newer than they are, and always in pyproject.toml."""
    text = (machine.ROOT / "pyproject.toml").read_text()
    for group, name in (("vllm.general_plugins", "vllm_plugin"), ("sglang.srt.plugins", "sglang_plugin")):
        assert f'[project.entry-points."{group}"]\nipcreduce = "ipcreduce.serving:{name}"\n' in text
        for one in entry_points(group=group, name="ipcreduce"):
            assert one.value == f"ipcreduce.serving:{name}"
        assert callable(getattr(serving, name))
