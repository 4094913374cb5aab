"""The plugins for the servers: inert unless they are asked for; what they change then, in stand-ins."""

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
    """A group of ranks in vLLM."""

    def destroy(self) -> None:
        """End."""


class Communicator:
    """What the group has for GPUs."""


def module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    return made


@pytest.fixture
def reducer(monkeypatch: pytest.MonkeyPatch) -> type:
    """What the servers get in place of a class that needs PyTorch."""
    ours = type("ServingAllReduce", (), {})
    monkeypatch.setitem(sys.modules, "ipcreduce.serving.all_reduce", module("all_reduce", ServingAllReduce=ours))
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
        PLACE: module(
            PLACE, custom_all_reduce=found, cuda_communicator=types.SimpleNamespace(CudaCommunicator=Communicator)
        ),
        found.__name__: found,
    }
    for name, one in tree.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setattr(logging.getLogger("ipcreduce"), "parent", logging.root)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.NOTSET)
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
    assert logging.getLogger("ipcreduce").parent is logging.root


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


def test_vllm_makes_our_class_and_says_so(vllm: types.ModuleType, reducer: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    serving.vllm_plugin()
    assert said == []
    logging.getLogger("vllm").addHandler(handler)  # as vLLM 0.33.0 does behind its plugins, if Python makes the engine
    logging.getLogger("vllm").setLevel(logging.INFO)
    logging.getLogger("ipcreduce.serving").info("later")
    for _ in range(2):  # vLLM loads plugins again in every process
        serving.vllm_plugin()
    assert vllm.CustomAllreduce is reducer
    line = f"IPCREDUCE_ENGINES=1: {vllm.__name__}.CustomAllreduce is now ipcreduce's ServingAllReduce"
    assert said == ["later", line, line]


@pytest.mark.parametrize("text", ["", "0", "1"])
def test_the_fused_pass_is_asked_for(text: str, vllm: types.ModuleType, reducer: type, monkeypatch: pytest.MonkeyPatch):
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
    reducer: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Under VLLM_BATCH_INVARIANT vLLM makes no all-reduce, which is said unless ipcreduce makes one."""
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setenv("IPCREDUCE_BATCH_INVARIANT", str(int(asked)))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    closed, served = [], []
    monkeypatch.setattr(groups, "close_with", closed.append)
    monkeypatch.setattr(groups, "serve", lambda *classes: served.append(classes))
    serving.vllm_plugin()
    assert (closed, served) == ([Group], [(Group, Communicator)])
    told = "vLLM leaves all sums to NCCL. Set IPCREDUCE_BATCH_INVARIANT=1"
    assert caplog.text.count(told) == (invariant == "1" and not asked)


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_flashinfer_does_not_come_first_unnoticed(
    given: str | None,
    vllm: types.ModuleType,
    reducer: type,
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
    vllm: types.ModuleType, reducer: type, monkeypatch: pytest.MonkeyPatch
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
        assert vllm.CustomAllreduce is reducer
        assert os.environ[serving._FLASHINFER] == "0"


def test_a_vllm_that_does_not_fit(vllm: types.ModuleType, reducer: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cuda", lambda: False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, PLACE, None)  # an import would raise, as it may without GPUs
        serving.vllm_plugin()
    assert vllm.CustomAllreduce is Theirs
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cuda", lambda: True)
    del vllm.CustomAllreduce
    with pytest.raises(UnsupportedError, match=r"this vLLM has no .*CustomAllreduce\. Unset IPCREDUCE_ENGINES"):
        serving.vllm_plugin()


@pytest.fixture
def hooks(reducer: type, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, str]]:
    """What is registered in a stand-in for SGLang, which has a tensor-parallel group of two ranks with our class."""
    found: list[tuple[str, Any, str]] = []
    registry = types.SimpleNamespace(register=lambda *hook: found.append(hook))
    kinds = types.SimpleNamespace(REPLACE="replace", AROUND="around", AFTER="after")
    group = types.SimpleNamespace(world_size=2, ca_comm=object.__new__(reducer))
    sizes = types.SimpleNamespace(attn_tp_size=2, moe_ep_size=1, moe_tp_size=2)
    modules = {
        "plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
        "distributed.parallel_state": {"get_tp_group": lambda: group},
        "runtime_context": {"get_parallel": lambda: sizes},
        "layers.flashinfer_comm_fusion": {"can_use_flashinfer_allreduce": None},
        "utils": {"is_cuda": lambda: True},
    }
    serving._is_on_nvidia.cache_clear()
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.distributed", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, module(name))
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module(f"sglang.srt.{name}", **content))
    monkeypatch.setenv("IPCREDUCE_ENGINES", "1")
    return found


def test_sglang_chooses_our_class(
    reducer: type, hooks: list[tuple[str, Any, str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    with caplog.at_level("INFO", "ipcreduce.serving"):
        serving.sglang_plugin()
    assert "Set IPCREDUCE_FUSED=1 to have ours" in caplog.text
    [(target, choose, kind), (made, serve, behind)] = hooks
    assert (made, behind) == ("sglang.srt.distributed.parallel_state.GroupCoordinator.__init__", "after")
    taken: list[Any] = []
    monkeypatch.setattr(groups, "take", lambda *given: taken.append(given))
    monkeypatch.setitem(sys.modules, "ipcreduce.serving.methods", module("methods", SGLangMethods="methods"))
    assert serve(None, "group", "ranks", local_rank=0) is None
    assert taken == [("group", "methods")]
    assert (target, kind) == (
        "sglang.srt.distributed.device_communicators.custom_all_reduce.dispatch_custom_allreduce", "around"
    )  # fmt: skip
    assert choose(Theirs, group=None, device=None) is reducer
    serving._is_on_nvidia.cache_clear()
    monkeypatch.setattr(sys.modules["sglang.srt.utils"], "is_cuda", lambda: False)
    for _ in range(2):
        assert choose(lambda **named: named, group="group", device="cpu") == {"group": "group", "device": "cpu"}
        serve(None, "group")
    assert len(taken) == 1
    assert caplog.text.count("SGLang keeps its own all-reduce") == 1


FUSED_CALL = {"input_tensor": "x", "residual": "r", "weight": "w", "eps": 1e-6, "max_token_num": 2048}


@pytest.fixture
def with_norms(hooks: list[tuple[str, Any, str]], reducer: type, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The further hooks with IPCREDUCE_FUSED=1, by the name of the function. Ours gives "ours" and its arguments."""
    monkeypatch.setenv("IPCREDUCE_FUSED", "1")
    monkeypatch.setattr(reducer, "fused_allreduce_rmsnorm", lambda self, *given: ("ours", *given), raising=False)
    monkeypatch.setattr(reducer, "should_custom_ar", lambda self, tensor: tensor == "x", raising=False)
    compiler = types.SimpleNamespace(is_compiling=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", module("torch", compiler=compiler))
    serving.sglang_plugin()
    assert {target.rpartition(".")[0] for target, _, _ in hooks[2:]} == {"sglang.srt.layers.flashinfer_comm_fusion"}
    assert {kind for _, _, kind in hooks[2:]} == {"around"}
    package = serving.__file__.rpartition("serving")[0]  # whose files torch.compile skips, which fullgraph refuses
    assert not any(hook.__code__.co_filename.startswith(package) for _, hook, _ in hooks[2:])
    return {target.rpartition(".")[2]: hook for target, hook, _ in hooks[2:]}


@pytest.fixture
def fused(with_norms: dict[str, Any]) -> Any:
    """SGLang's fused call with our hook around it. Theirs gives what it was given."""
    hook = with_norms["flashinfer_allreduce_residual_rmsnorm"]
    return lambda **more: hook(lambda **named: named, **FUSED_CALL | more)


@pytest.mark.parametrize(
    ("tensor", "ranks", "compiled", "answer"),
    [("x", 2, False, False), ("declined", 2, False, "theirs"), ("x", 1, False, "theirs"), ("x", 2, True, "theirs")],
)
def test_sglang_asks_us_for_plain_calls(
    with_norms: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tensor: str, ranks: int, compiled: bool, answer: Any
):  # fmt: skip
    """The answer says whether FlashInfer makes the call."""
    monkeypatch.setattr(sys.modules["torch"].compiler, "is_compiling", lambda: compiled)
    hook = with_norms["can_use_flashinfer_allreduce"]
    assert hook(lambda tensor, **named: "theirs", tensor, expected_world_size=ranks, use_attn_tp_group=True) == answer


def test_sglang_without_plain_calls_of_flashinfer(hooks: list[tuple[str, Any, str]], monkeypatch: pytest.MonkeyPatch):
    """0.5.17: a hook on a function that is not there would be an error in its log."""
    monkeypatch.setenv("IPCREDUCE_FUSED", "1")
    del sys.modules["sglang.srt.layers.flashinfer_comm_fusion"].can_use_flashinfer_allreduce
    serving.sglang_plugin()
    assert [target.rpartition(".")[2] for target, _, _ in hooks] == [
        "dispatch_custom_allreduce", "__init__", "flashinfer_allreduce_residual_rmsnorm"
    ]  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"use_attn_tp_group": True}, {"use_attn_tp_group": False}])
def test_sglang_asks_us_for_rows(fused: Any, more: dict[str, bool]):
    assert fused(**more) == ("ours", "x", "r", "w", 1e-6)


def of_other_sizes(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    context = sys.modules["sglang.srt.runtime_context"]
    monkeypatch.setattr(context, "get_parallel", lambda: types.SimpleNamespace(**sizes))


@pytest.mark.parametrize("reason", ["declined", "compiled", "attention", "experts", "tensor experts", "another class"])
def test_sglang_asks_flashinfer_for_the_rest(fused: Any, reducer: type, monkeypatch: pytest.MonkeyPatch, reason: str):
    more: dict[str, bool] = {}
    if reason == "declined":
        monkeypatch.setattr(reducer, "fused_allreduce_rmsnorm", lambda self, *given: None)
    elif reason == "compiled":
        monkeypatch.setattr(sys.modules["torch"].compiler, "is_compiling", lambda: True)
    elif reason == "attention":
        of_other_sizes(monkeypatch, attn_tp_size=1, moe_ep_size=1, moe_tp_size=2)
    elif reason == "experts":
        more = {"use_attn_tp_group": False}
        of_other_sizes(monkeypatch, attn_tp_size=2, moe_ep_size=4, moe_tp_size=2)
    elif reason == "tensor experts":
        more = {"use_attn_tp_group": False}
        of_other_sizes(monkeypatch, attn_tp_size=2, moe_ep_size=1, moe_tp_size=1)
    else:
        sys.modules["sglang.srt.distributed.parallel_state"].get_tp_group().ca_comm = object()
    assert fused(**more) == FUSED_CALL | more


def test_the_entry_points_exist():
    """They are in the metadata of an installation, where it is newer than they are, and always in pyproject.toml."""
    text = (machine.ROOT / "pyproject.toml").read_text()
    for group, name in (("vllm.general_plugins", "vllm_plugin"), ("sglang.srt.plugins", "sglang_plugin")):
        assert f'[project.entry-points."{group}"]\nipcreduce = "ipcreduce.serving:{name}"\n' in text
        for one in entry_points(group=group, name="ipcreduce"):
            assert one.value == f"ipcreduce.serving:{name}"
        assert callable(getattr(serving, name))
