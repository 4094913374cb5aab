"""The class for the servers against the newest releases of these: ``make serving`` fetches their Python files.

They are read, and with PyTorch their groups are run with our collectives, by tests/programs/real_servers.py. The reader
is tried on a small engine of ours each time.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ipcreduce.serving import sleep
from tests.tools import serving_sources
from tests.tools.machine import ROOT

asked_for = pytest.mark.skipif(
    not os.environ.get("TEST_SERVING"), reason="fetches releases of vLLM and SGLang: make serving"
)


class Reducer:
    """The interface of ServingAllReduce, from its source: importing it needs PyTorch."""

    def __init__(self) -> None:
        tree = serving_sources.definition(ROOT / "ipcreduce" / "serving" / "all_reduce.py", "ServingAllReduce")
        self.methods = {node.name: signature(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
        stored = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
        constants = {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
        self.members = self.methods.keys() | stored | constants

    def problems(self, uses: Iterable[serving_sources.Use]) -> list[str]:
        """The uses that do not fit."""
        found = []
        for use in uses:
            if use.member not in self.members:
                found += [] if use.asked else [f"{use.where}: no {use.member}"]
            elif use.call is not None and (problem := misfit(self.methods[use.member], use.call)):
                found.append(f"{use.where}: {use.member}: {problem}")
        return found


def signature(function: ast.FunctionDef) -> inspect.Signature:
    """The signature of a method, without self; its defaults and annotations do not count."""
    args = ast.unparse(function.args)
    scope: dict = {}
    stripped = ast.parse(f"def f({args}): pass").body[0]
    assert isinstance(stripped, ast.FunctionDef)
    for arg in [*stripped.args.args, *stripped.args.kwonlyargs]:
        arg.annotation = None
    stripped.args.defaults = [ast.Constant(None) for _ in stripped.args.defaults]
    stripped.args.kw_defaults = [one and ast.Constant(None) for one in stripped.args.kw_defaults]
    exec(ast.unparse(stripped), scope)
    bound = types.MethodType(scope["f"], object()) if "self" in args else scope["f"]
    return inspect.signature(bound)


def misfit(wanted: inspect.Signature, call: ast.Call) -> str:
    """The reason for which a call does not fit a signature; "" if it does."""
    try:
        wanted.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})
    except TypeError as error:
        return str(error)
    return ""


def test_the_reader_sees_what_is_missing(tmp_path: Path):
    package = tmp_path / "engine"
    package.mkdir()
    (package / "state.py").write_text(
        "class Group:\n"
        "    def reduce(self, x):\n"
        "        comm = self.ca_comm\n"
        "        if comm is not None and not comm.disabled and comm.should_custom_ar(x):\n"
        "            return comm.custom_all_reduce(x, stream=3)\n"
        "        if hasattr(comm, 'fused'): return comm.fused(x)\n"
        "    def gather(self, x):\n"
        "        comm = getattr(self, 'ca_comm', None)\n"
        "        return comm.magic(x) if comm else self.ca_comm.custom_all_gather()\n"
        "    def own(self):\n"
        "        comm = self.ca_comm if self.x else None\n"
        "        return isinstance(comm, Theirs) and comm.their_secret\n"
    )
    uses = list(serving_sources.uses(package))
    assert [use.member for use in uses] == [
        "disabled", "should_custom_ar", "custom_all_reduce", "fused", "magic", "custom_all_gather"
    ]  # fmt: skip
    assert Reducer().problems(uses) == [
        "engine/state.py:5: custom_all_reduce: got an unexpected keyword argument 'stream'",
        "engine/state.py:9: no magic",
        "engine/state.py:9: custom_all_gather: missing a required argument: 'inp'",
    ]


def checked(package: Path, at_least: set[str]) -> None:
    """Every use fits, and among them are those that make the all-reduce."""
    uses = list(serving_sources.uses(package))
    assert at_least <= {use.member for use in uses}
    assert Reducer().problems(uses) == []


@asked_for
def test_vllm(tmp_path: Path, mpirun: Callable[..., Any]):
    version, package = serving_sources.fetch("vllm", tmp_path)
    print(f"vLLM {version}")
    communicators = package / "distributed" / "device_communicators"
    serving_sources.definition(communicators / "custom_all_reduce.py", "CustomAllreduce")
    made = serving_sources.calls_of(communicators / "cuda_communicator.py", "CustomAllreduce")
    assert made
    assert [misfit(Reducer().methods["__init__"], call) for call in made] == [""] * len(made)
    maker = serving_sources.definition(communicators / "cuda_communicator.py", "CudaCommunicator.__init__")
    assert any(  # when it is called: so the plugin's change is seen
        isinstance(node, ast.ImportFrom)
        and node.module == "vllm.distributed.device_communicators.custom_all_reduce"
        and [alias.name for alias in node.names] == ["CustomAllreduce"]
        for node in ast.walk(maker)
    )
    assert '"vllm.general_plugins"' in (package / "plugins" / "__init__.py").read_text()
    for name in ("Platform.is_cuda", "Platform.get_pass_manager_cls"):
        serving_sources.definition(package / "platforms" / "interface.py", name)
    check_what_groups_need(package)
    check_sleep(package)
    check_what_methods_need_of_vllm(package)
    check_what_the_pass_needs(package)
    checked(package, {"disabled", "fully_connected", "should_custom_ar", "custom_all_reduce", "capture"})
    check_groups("vllm", tmp_path, mpirun)


def check_what_groups_need(package: Path) -> None:
    """A group's communicator has these members when our all-reduce is made, and holds it when the group ends."""
    distributed = package / "distributed"
    ends = ast.unparse(serving_sources.definition(distributed / "parallel_state.py", "GroupCoordinator.destroy"))
    assert "self.device_communicator" in ends
    files = distributed / "device_communicators"
    makes = ast.unparse(serving_sources.definition(files / "cuda_communicator.py", "CudaCommunicator.__init__"))
    assert "self.ca_comm" in makes
    base = ast.unparse(
        serving_sources.definition(files / "base_device_communicator.py", "DeviceCommunicatorBase.__init__")
    )
    for member in ("cpu_group", "device", "unique_name", "world_size"):
        assert f"self.{member} = " in base, member


def check_sleep(package: Path) -> None:
    """One of the places that we look for has its methods."""
    for module, kind, methods in sleep._PLACES:
        file = (package.parent / module.replace(".", "/")).with_suffix(".py")
        if file.exists():
            for method in methods:
                serving_sources.definition(file, f"{kind}.{method}")
            return
    raise AssertionError("none is there")


def check_methods(file: Path, group: str, ours: str, at_least: set[str]) -> None:
    """Every method that we give to an object of the server is one of its own, with the same parameters."""
    methods = serving_sources.definition(ROOT / "ipcreduce" / "serving" / "methods.py", ours)
    found = set()
    for node in methods.body:
        if isinstance(node, ast.FunctionDef) and node.name != "ca_comm":
            try:
                theirs = serving_sources.definition(file, f"{group}.{node.name}")
            except LookupError:
                continue
            assert isinstance(theirs, ast.FunctionDef)
            found.add(node.name)
            assert [one.arg for one in node.args.args] == [one.arg for one in theirs.args.args], node.name
            assert list(map(ast.unparse, node.args.defaults)) == list(map(ast.unparse, theirs.args.defaults)), node.name
    assert found >= at_least


def check_what_methods_need_of_vllm(package: Path) -> None:
    distributed = package / "distributed"
    cuda = distributed / "device_communicators" / "cuda_communicator.py"
    names = {"all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "broadcast"}
    check_methods(cuda, "CudaCommunicator", "CommunicatorMethods", names)
    state = distributed / "parallel_state.py"
    check_methods(state, "GroupCoordinator", "VllmGroupMethods", {"broadcast"})
    assert "self.pynccl_comm" in cuda.read_text()
    for name in ("all_gather", "reduce_scatter"):  # an operator, which finds the communicator when it runs
        way = ast.unparse(serving_sources.definition(state, f"GroupCoordinator._{name}_out_place"))
        assert f"self.device_communicator.{name}(" in way
    made = ast.unparse(
        serving_sources.definition(distributed / "device_communicators" / "pynccl.py", "PyNcclCommunicator.__init__")
    )
    assert "envs.VLLM_DISABLE_PYNCCL" in made


def check_what_methods_need_of_sglang(state: Path) -> None:
    names = {
        "all_gather", "_all_gather_into_tensor", "all_gatherv", "_reduce_scatter_tensor", "reduce_scatter_tensor",
        "reduce_scatterv", "broadcast",
    }  # fmt: skip
    check_methods(state, "GroupCoordinator", "SGLangMethods", names)
    makes = ast.unparse(serving_sources.definition(state, "GroupCoordinator.__init__"))
    for member in ("cpu_group", "device", "unique_name", "world_size", "ca_comm"):
        assert f"self.{member}" in makes, member
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        operator = ast.unparse(serving_sources.definition(state, f"reg_{name}"))
        assert f"group._{name}(output, input)" in operator


def check_what_the_pass_needs(package: Path) -> None:
    passes = package / "compilation" / "passes"
    assert "current_platform.get_pass_manager_cls()" in (package / "compilation" / "backends.py").read_text()
    configure = serving_sources.definition(passes / "pass_manager.py", "PostGradPassManager.configure")
    assert [arg.arg for arg in configure.args.args] == ["self", "config"]
    added = [ast.unparse(node.value) for node in ast.walk(configure) if isinstance(node, ast.AugAssign)]
    assert added[0] == "[NoOpEliminationPass(config)]", "ours is the second, or the first where this is off"
    serving_sources.definition(passes / "inductor_pass.py", "InductorPass.uuid")
    serving_sources.definition(package / "config" / "vllm.py", "VllmConfig.compute_hash")
    state = package / "distributed" / "parallel_state.py"
    serving_sources.definition(state, "get_tp_group")
    reduced = serving_sources.definition(state, "all_reduce")
    assert [arg.arg for arg in reduced.args.args] == ["tensor", "group_name"]
    assert "_groups[group_name]()" in ast.unparse(reduced)
    for name, wanted in (
        ("rms_norm", ["x", "weight", "epsilon", "variance_size"]),
        ("fused_add_rms_norm", ["x", "x_residual", "weight", "epsilon", "variance_size"]),
    ):
        operator = serving_sources.definition(package / "ir" / "ops" / "layernorm.py", name)
        assert [arg.arg for arg in operator.args.args] == wanted
    called = (package / "_custom_ops.py").read_text()
    assert "torch.ops._C.static_scaled_fp8_quant(output, input, scale, group_shape)" in called
    quant = serving_sources.definition(
        package / "model_executor" / "layers" / "quantization" / "input_quant_fp8.py", "QuantFP8.forward_native"
    )
    for step in (".reciprocal()", "out.clamp(_FP8_MIN, _FP8_MAX).to(_FP8_DTYPE)"):
        assert step in ast.unparse(quant)


def check_groups(server: str, place: Path, mpirun: Callable[..., Any]) -> None:
    """The server's own groups, run with our collectives."""
    if importlib.util.find_spec("torch") is None:
        print(f"{server}'s groups are read only, and not run: PyTorch is not installed")
        return
    output = mpirun("tests.programs.real_servers", 2, server, place, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert output.count("right\n") == 2, output


NAMED = {"input_tensor", "residual", "weight", "eps"}  # what our hook reads of SGLang's fused call


@asked_for
def test_sglang(tmp_path: Path, mpirun: Callable[..., Any]):
    version, package = serving_sources.fetch("sglang", tmp_path)
    print(f"SGLang {version}")
    communicators = package / "srt" / "distributed" / "device_communicators"
    chooser = serving_sources.definition(communicators / "custom_all_reduce.py", "dispatch_custom_allreduce")
    assert [arg.arg for arg in chooser.args.args] == ["group", "device"]
    state = package / "srt" / "distributed" / "parallel_state.py"
    for name, wanted in (("dispatch_custom_allreduce", signature(chooser)), ("CAClass", Reducer().methods["__init__"])):
        calls = serving_sources.calls_of(state, name)
        assert [misfit(wanted, call) for call in calls] == [""]
        assert not calls[0].args, "ours hands the names on"
    assert "\ndef is_cuda()" in (package / "srt" / "utils" / "common.py").read_text()
    check_what_methods_need_of_sglang(state)
    check_sleep(package)
    steps = ast.unparse(serving_sources.definition(package / "srt" / "managers" / "scheduler.py", "Scheduler.__init__"))
    made, kept = (steps.index(f"self.init_{what}()") for what in ("model_worker", "request_dispatcher"))
    assert made < kept, "the dispatcher keeps the methods, which are wrapped when the first all-reduce is made"
    plugins = package / "srt" / "plugins"
    assert '"sglang.srt.plugins"' in (plugins / "__init__.py").read_text()
    register = serving_sources.definition(plugins / "hook_registry.py", "HookRegistry.register")
    assert [arg.arg for arg in register.args.args][:4] == ["cls", "target", "hook", "hook_type"]
    kinds = serving_sources.definition(plugins / "hook_registry.py", "HookType")
    assert all(kind in ast.unparse(kinds) for kind in ("REPLACE = 'replace'", "AROUND = 'around'", "AFTER = 'after'"))
    fused = serving_sources.definition(
        package / "srt" / "layers" / "flashinfer_comm_fusion.py", "flashinfer_allreduce_residual_rmsnorm"
    )
    assert {"use_attn_tp_group", *NAMED} <= {arg.arg for arg in fused.args.args}
    plain = serving_sources.definition(
        package / "srt" / "layers" / "flashinfer_comm_fusion.py", "can_use_flashinfer_allreduce"
    )
    assert [arg.arg for arg in plain.args.args] == ["input_"]
    calls = serving_sources.calls_of(state, "can_use_flashinfer_allreduce")
    assert calls
    assert all(len(call.args) == 1 and "expected_world_size" in {one.arg for one in call.keywords} for call in calls)
    norms = package / "srt" / "layers" / "layernorm.py"
    calls = serving_sources.calls_of(norms, "flashinfer_allreduce_residual_rmsnorm")
    assert calls
    assert all(not call.args and {one.arg for one in call.keywords} >= NAMED for call in calls)
    sizes = ast.unparse(serving_sources.definition(norms, "_forward_with_allreduce_fusion"))
    for size in ("attn_tp_size", "moe_ep_size", "moe_tp_size"):
        assert f"get_parallel().{size}" in sizes
    assert "from sglang.srt.runtime_context import" in norms.read_text()
    assert not serving_sources.definition(state, "get_tp_group").args.args
    wanted = {"disabled", "should_custom_ar", "custom_all_reduce", "capture", "close", "fused_allreduce_rmsnorm"}
    checked(package, wanted)
    check_groups("sglang", tmp_path, mpirun)
