"""The driver's calls over stand-ins for cuda.bindings: what is said where it, the driver or a GPU is missing."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import numpy as np
import pytest

from ipcreduce.cuda import driver, graph, streams
from ipcreduce.errors import CudaError, UnsupportedError


class Bindings(types.ModuleType):
    """Answers each call with what it is told."""

    def __init__(self, **answers: Any) -> None:
        super().__init__("cuda.bindings.driver")
        self.answers = {"cuInit": lambda *_: (0,)} | answers

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("answers", {}):
            raise AttributeError(name)
        return self.answers[name]


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(module: types.ModuleType | None) -> None:
        monkeypatch.setattr(driver, "_bindings", None)
        package = types.ModuleType("cuda.bindings")
        package.driver = module
        monkeypatch.setitem(sys.modules, "cuda.bindings", None if module is None else package)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)

    return use


CALLS = [
    driver.device_count,
    driver.driver_version,
    driver.current_context,
    driver.synchronize,
    streams.create_event,
    lambda: driver.allocate(1 << 20),
    lambda: driver.device_info(0),
    lambda: driver.open_memory(bytes(64)),
    lambda: streams.capture_id(0),
    lambda: driver.Launch(1, 1, 32, np.zeros(17, np.uint64)),
]


@pytest.mark.parametrize("call", CALLS)
def test_no_bindings(bindings: Any, call: Any, monkeypatch: pytest.MonkeyPatch):
    """They are asked for only where there is a driver."""
    bindings(None)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"cuda-python is not installed .*pip install '\.\[cuda13\]'"):
        call()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match=r"^no NVIDIA driver on this machine$"):
        call()


@pytest.mark.parametrize("call", CALLS)
def test_no_driver(bindings: Any, call: Any):
    def fail(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1\ntried here\nand there")

    bindings(Bindings(cuInit=fail))
    with pytest.raises(UnsupportedError, match=r"^no NVIDIA driver on this machine \(.*libcuda\.so\.1\)$"):
        call()


@pytest.mark.parametrize("call", CALLS)
def test_no_gpu(bindings: Any, call: Any):
    bindings(Bindings(cuInit=lambda flags: (100,)))  # CUDA_ERROR_NO_DEVICE
    with pytest.raises(UnsupportedError, match=r"cuInit gave 100\): is a GPU visible\?"):
        call()


def test_a_call_that_fails_is_named(bindings: Any):
    answers = {"cuMemAlloc": lambda nbytes: (2, None), "cuGetErrorString": lambda code: (0, b"out of memory")}
    bindings(Bindings(**answers))
    with pytest.raises(CudaError, match="cuMemAlloc failed: 2, out of memory") as caught:
        driver.allocate(1 << 60)
    assert (caught.value.call, caught.value.code) == ("cuMemAlloc", 2)


def test_an_error_that_the_driver_does_not_know(bindings: Any):
    bindings(Bindings(cuMemFree=lambda address: (9999,), cuGetErrorString=lambda code: (1, None)))
    with pytest.raises(CudaError, match="unknown error"):
        driver.free(1)


@pytest.mark.parametrize("failing", ["", "cuGraphAddKernelNode", "cuGraphInstantiate"])
def test_a_launch_as_a_graph_of_its_own(bindings: Any, failing: str):
    """With the launch's shape and arguments; its template is given back in any case; destroyed, it has no handle."""
    calls: list[tuple[Any, ...]] = []

    def answer(name: str, *results: Any) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            calls.append((name, *arguments))
            return (999, *[None] * len(results)) if name == failing else (0, *results)

        return call

    bindings(
        Bindings(
            CUlaunchConfig=types.SimpleNamespace, CUfunction=int, CUstream=int, cuLaunchKernelEx=None,
            CUDA_KERNEL_NODE_PARAMS=types.SimpleNamespace,
            cuGetErrorString=lambda code: (0, b"why"), cuGraphCreate=answer("cuGraphCreate", 5),
            cuGraphAddKernelNode=answer("cuGraphAddKernelNode", 6), cuGraphInstantiate=answer("cuGraphInstantiate", 7),
            cuGraphDestroy=answer("cuGraphDestroy"), cuGraphExecDestroy=answer("cuGraphExecDestroy"),
        )
    )  # fmt: skip
    args = np.arange(25, dtype=np.uint64)
    launch = driver.Launch(77, 3, 64, args)
    if failing:
        with pytest.raises(CudaError, match=failing):
            graph.executable_of(launch)
        assert calls[-1] == ("cuGraphDestroy", 5)
        return
    executable = graph.executable_of(launch)
    assert [name for name, *_ in calls] == [
        "cuGraphCreate", "cuGraphAddKernelNode", "cuGraphInstantiate", "cuGraphDestroy",
    ]  # fmt: skip
    params = calls[1][-1]
    assert (params.func, params.gridDimX, params.gridDimY, params.blockDimX, params.blockDimZ) == (77, 3, 1, 64, 1)
    pointer = ctypes.cast(params.kernelParams, ctypes.POINTER(ctypes.c_uint64))[0]
    assert np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64)), (25,)).tolist() == args.tolist()
    assert executable.handle == 7
    executable.close()
    assert calls[-1] == ("cuGraphExecDestroy", 7)
    assert not executable.handle, "which is an error to launch"


@pytest.mark.parametrize("types_of_edges", [[], [0], [1], [0, 0, 1], [0, 0, 0]])
def test_edges_are_read_where_the_driver_wrote_them(
    bindings: Any, monkeypatch: pytest.MonkeyPatch, types_of_edges: Any
):
    """Some bindings give edges in memory that they have freed."""

    def query(node: ctypes.c_void_p, nodes: ctypes.c_void_p, edges: ctypes.c_void_p, count: Any) -> int:
        assert (node.value, count._obj.value) == (7, len(types_of_edges))
        for place, kind in enumerate(types_of_edges):
            ctypes.memmove(edges.value + 8 * place, bytes([1, 1, kind, 1, 1, 1, 1, 1]), 8)
        ctypes.memset(nodes.value, 1, 8 * len(types_of_edges))
        return failing

    failing = 0
    monkeypatch.setattr(graph, "_dependent_nodes", lambda: query)
    answers = {"cuGraphNodeGetDependentNodes": lambda node: (0, None, None, len(types_of_edges)), "CUgraphNode": int}
    bindings(Bindings(**answers, CUresult=int, cuGetErrorString=lambda code: (0, b"bad node")))
    assert graph.lets_start_early(7) == (1 in types_of_edges)
    failing = 1
    with pytest.raises(CudaError, match=r"cuGraphNodeGetDependentNodes_v2.*bad node"):
        graph.lets_start_early(7)
