"""The installed cuda.bindings have all that ipcreduce/cuda/ takes from them. Run with those of CUDA 12.9 and of 13."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipcreduce.cuda import driver, virtual_memory
from ipcreduce.errors import CudaError
from tests.shared.bindings import Reader
from tests.tools import machine

bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
SOURCES = sorted((machine.ROOT / "ipcreduce" / "cuda").glob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_name_and_member_is_there(path: Path):
    """With as many arguments as a call takes there, and as many results as are expected."""
    assert not Reader(bindings, path.read_text()).problems


def test_what_is_looked_up():
    """Some of each kind, so that the test above cannot pass by seeing nothing."""
    found = set.union(*(Reader(bindings, path.read_text()).found for path in SOURCES))
    assert found >= {
        "cuInit", "cuIpcGetMemHandle", "CUipcMemHandle", "CUipcMemHandle.getPtr", "CUuuid.bytes", "cuEventQuery",
        "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", "CUlaunchConfig.attrs",
        "CUlaunchAttributeValue.programmaticStreamSerializationAllowed", "CUDA_KERNEL_NODE_PARAMS.kernelParams",
        "cuLaunchKernelEx", "cuStreamBeginCapture", "CUDA_MEMCPY3D.WidthInBytes", "cuGetErrorString",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("call('cuNoSuchCall')", "no cuNoSuchCall in"),
        ("_is_done('cuNoSuchQuery', 1)", "no cuNoSuchQuery in"),
        ("load().CUnoStruct()", "no CUnoStruct in"),
        ("mode = load().CUstreamCaptureMode\ncall('cuStreamBeginCapture', 1, mode.CU_OTHER)", "Mode.CU_OTHER in"),
        ("call('cuIpcGetMemHandle', 1).content", "no CUipcMemHandle.content in"),
        ("handle = driver.load().CUipcMemHandle()\nhandle.content = b''", "no CUipcMemHandle.content in"),
        ("a = _bindings.CUlaunchAttribute()\na.value.other = 1", "no CUlaunchAttributeValue.other in"),
        (
            "class A:\n def f(self): self.c = load().CUlaunchConfig()\n def g(self): self.c.gridDim = 1",
            "Config.gridDim in",
        ),
        ("call('cuGraphMemcpyNodeGetParams', 1).bytes", r"no CUDA_MEMCPY3D\w*.bytes in"),
        ("call('cuMemAlloc')", "cuMemAlloc takes 1 arguments in these bindings, 0 are given"),
        ("load().cuMemAlloc(1, 2)", "cuMemAlloc takes 1 arguments in these bindings, 2 are given"),
        ("call('cuMemAlloc', *x)", "cuMemAlloc: its arguments are not understood"),
        ("more = (1, 2)\ncall('cuMemAlloc', *more)", "cuMemAlloc takes 1 arguments in these bindings, 2 are given"),
        ("found = False\nif found: call('cuNoSuchCall')", "no cuNoSuchCall in"),
        ("call('cuMemGetInfo')[2]", "result 2 expected, there are 2"),
        ("free, total, more = call('cuMemGetInfo')", "3 results expected, there are 2"),
        ("def f(x): call(f'cu{x}', 1)", "the name is not understood"),
        ("def f(x): getattr(load(), x)(1)", "the name is not understood"),
        ("def f(given): given.CUipcMemHandle()", "CUipcMemHandle is not understood"),
        ("other('cuMemAlloc', 1)", "cuMemAlloc is not understood"),
        ("if hasattr(load(), 'cuInit'): call('cuInit')\nelse: call('cuNever')", "cuInit takes 1 arguments"),
        ("def load():\n from cuda.bindings import driver\n return driver\nload().cuNoSuchCall()", "no cuNoSuchCall in"),
        ("call(newest('cuNoSuchCall'))", "no cuNoSuchCall in"),
        ("call(newest('cuMemAlloc', 9))", "cuMemAlloc takes 1 arguments"),
        ("def load(): return cupy\ndriver.load().cuNoSuchCall()", "no cuNoSuchCall in"),
        ("def load(): return cupy\nload().cuMemAlloc(1)", "cuMemAlloc is not understood"),
        ("other.cupy.CUDARuntimeError", "CUDARuntimeError is not understood"),
        ("later = None\ndef f(): later(load().CUnoStruct())", "no CUnoStruct in"),
        ("later = None\ndef f(): later(call('cuMemAlloc'))", "cuMemAlloc takes 1 arguments"),
        ("later = None\ndef f(): later.cuMemAlloc(1)", "cuMemAlloc is not understood"),
        ("later = None\ndef f(): call(later, 1)", "the name is not understood"),
        ("later = None\nlater = load().cuMemAlloc\nlater(1, 2)", "cuMemAlloc takes 1 arguments"),
    ],
)
def test_what_is_missing_is_found(code: str, problem: str):
    found = Reader(bindings, code).problems
    assert found
    assert re.search(problem, " ".join(found))


@pytest.mark.parametrize(
    "code",
    [
        "x = call('cuMemAlloc', 1)",
        "name = 'cuNever' if hasattr(load(), 'cuNever') else 'cuInit'\ncall(name, 0)",
        "if hasattr(load(), 'cuNever'): call('cuNever')\nelse: call('cuInit', 0)",
        "n, more = ('cuNever', ()) if hasattr(load(), 'cuNever') else ('cuMemAlloc', (1,))\ncall(n, *more)",
        "call(newest('cuMemAlloc', 9), 1)",
        "i = 0\ni += 1\nfree, total = call('cuMemGetInfo')",
        "def f(b=load()): return [int(n) for n in call('cuGraphGetNodes', 1)[0]]",
        "later = None\ndef f(x): return later(x).bytes",
        "def load(): return cupy\nload().get_default_memory_pool()",
        "cupy = None\ndef f(x): return isinstance(x, cupy.cuda.runtime.CUDARuntimeError)",
    ],
)
def test_what_is_there_is_not(code: str):
    assert not Reader(bindings, code).problems


# ---- values, as these bindings keep them
@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers to driver calls, by name; all else is the installed bindings'."""
    answers: dict[str, Any] = {}

    class WithoutDriver:
        def __getattr__(self, name: str) -> Any:
            return answers[name] if name in answers else getattr(bindings, name)

    monkeypatch.setattr(driver, "_bindings", WithoutDriver())
    return answers


def test_ipc_handles_go_through_as_they_are(calls: dict[str, Any]):
    content = bytes(range(64, 128))
    opened: list[tuple[bytes, int]] = []

    def give(address: int) -> tuple[int, Any]:
        handle = bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), content, 64)
        return 0, handle

    def take(handle: Any, flags: int) -> tuple[int, int]:
        opened.append((ctypes.string_at(handle.getPtr(), 64), flags))
        return 0, 4096

    calls.update(cuIpcGetMemHandle=give, cuIpcOpenMemHandle=take)
    assert driver.export_memory(1 << 20) == content
    assert driver.open_memory(content) == 4096
    assert opened == [(content, 1)]


def test_a_launch_is_filled_in(calls: dict[str, Any]):
    """Eagerly, and as a node of a graph."""
    seen: list[tuple[Any, ...]] = []
    calls["cuLaunchKernelEx"] = lambda *given: seen.append(given) or (0,)
    args = np.arange(25, dtype=np.uint64)
    launch = driver.Launch(0x7000, 3, 64, args, programmatic=True)
    launch.run(0x50)
    [(config, function, params, extra)] = seen
    assert [config.gridDimX, config.gridDimY, config.gridDimZ] == [3, 1, 1]
    assert [config.blockDimX, config.blockDimY, config.blockDimZ] == [64, 1, 1]
    assert (config.sharedMemBytes, int(config.hStream), config.numAttrs, int(function), extra) == (
        0,
        0x50,
        1,
        0x7000,
        0,
    )
    [attribute] = config.attrs
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    node = launch.node_params()
    assert [node.gridDimX, node.gridDimY, node.gridDimZ] == [3, 1, 1]
    assert [node.blockDimX, node.blockDimY, node.blockDimZ] == [64, 1, 1]
    assert (int(node.func), int(node.kernelParams), node.sharedMemBytes) == (0x7000, params, 0)
    assert ctypes.c_uint64.from_address(params).value == args.ctypes.data


@pytest.fixture
def virtual(calls: dict[str, Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """The virtual memory calls, with their arguments, and the waits for all work (cuMemFree)."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def answer(name: str, *results: Any) -> None:
        calls[name] = lambda *given: seen.append((name, given)) or (0, *results)

    answer("cuMemGetAllocationGranularity", 2 << 20)
    answer("cuMemAddressReserve", bindings.CUdeviceptr(64 << 20))
    answer("cuMemCreate", bindings.CUmemGenericAllocationHandle(77))
    answer("cuMemImportFromShareableHandle", bindings.CUmemGenericAllocationHandle(78))
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(descriptor, True)  # as the driver's may be
    answer("cuMemExportToShareableHandle", descriptor)
    answer("cuMemAlloc", bindings.CUdeviceptr(1))
    answer("cuThreadExchangeStreamCaptureMode", bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    for name in ("Map", "Unmap", "SetAccess", "Release", "AddressFree", "Free"):
        answer(f"cuMem{name}")
    return seen


def test_virtual_memory_is_asked_for(virtual: list[tuple[str, tuple[Any, ...]]]):
    """Of the right GPU, for other processes, readable and writable; unmapped once all work has ended."""
    nbytes = virtual_memory.rounded(3, (2 << 20) + 1)
    assert nbytes == 4 << 20
    there = virtual_memory.Range(3, nbytes)
    there.attach(virtual_memory.create(3, nbytes))
    descriptor = there.export()
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    there.close()
    given = dict(virtual)
    size, properties, flags = given["cuMemCreate"]
    assert (size, flags, properties.location.id, int(properties.location.type), int(properties.type)) == (
        nbytes, 0, 3, 1, 1,
    )  # fmt: skip
    assert int(properties.requestedHandleTypes) == 1
    address, size, [access], count = given["cuMemSetAccess"]
    assert (address, size, access.location.id, int(access.location.type), int(access.flags), count) == (
        64 << 20, nbytes, 3, 1, 3, 1,
    )  # fmt: skip
    assert given["cuMemMap"] == (64 << 20, nbytes, 0, 77, 0)
    assert given["cuMemExportToShareableHandle"] == (77, 1, 0)
    ends = [name for name, _ in virtual if name != "cuThreadExchangeStreamCaptureMode"]
    assert ends[-4:] == ["cuMemFree", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    assert virtual_memory.import_descriptor(5) == 78
    assert virtual[-1] == ("cuMemImportFromShareableHandle", (5, 1))


def test_addresses_are_covered(virtual: list[tuple[str, tuple[Any, ...]]]):
    """By one piece that stays the caller's; each of its mappings is taken away by itself."""
    there, piece = virtual_memory.Range(3, 4 << 20), 2 << 20
    there.cover(77, piece)
    maps = [(64 << 20, piece, 0, 77, 0), (66 << 20, piece, 0, 77, 0)]
    assert [given for name, given in virtual if name == "cuMemMap"] == maps
    [(address, size, *_)] = [given for name, given in virtual if name == "cuMemSetAccess"]
    assert (address, size) == (64 << 20, 4 << 20)
    there.close()
    assert sorted(given for name, given in virtual if name == "cuMemUnmap") == [one[:2] for one in maps]
    assert "cuMemRelease" not in dict(virtual)
    assert dict(virtual)["cuMemAddressFree"] == (64 << 20, 4 << 20)


@pytest.mark.parametrize("failing", ["cuMemMap", "cuMemSetAccess", "cuMemAlloc", "cuMemUnmap", "cuMemRelease"])
def test_virtual_memory_is_given_back_whatever_fails(
    virtual: list[tuple[str, tuple[Any, ...]]], calls: dict[str, Any], failing: str
):
    """Each of the calls that give it back is tried once, in their order; the first error of attach() is raised."""
    calls[failing] = lambda *given: virtual.append((failing, given)) or (1, None)
    calls["cuGetErrorString"] = lambda code: (0, b"why")
    there = virtual_memory.Range(0, 2 << 20)

    def live() -> None:
        there.attach(77)
        there.close()

    with pytest.raises(CudaError, match=failing):
        live()
    there.close()
    there.close()
    found = [name for name, _ in virtual if name in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree")]
    assert found == ["cuMemUnmap"] * (failing != "cuMemMap") + ["cuMemRelease", "cuMemAddressFree"]
