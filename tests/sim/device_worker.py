"""The simulated device behaves as CUDA does, in what the library relies on. Run under mpirun with 2 ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from tests import simulated

rank = MPI.COMM_WORLD.rank
os.environ["SIM_DEVICES"], os.environ["SIM_NO_P2P"] = "3", "1-2"
os.environ["SIM_BROKEN_P2P"] = "0-2"
simulated.install()
import cupy  # noqa: E402

from ipcreduce.cuda import compiler, virtual_memory  # noqa: E402
from ipcreduce.errors import CudaError, UnsupportedError  # noqa: E402
from tests.simulated import driver, driver_streams, machine, machine_streams  # noqa: E402


def code(call: Callable[..., Any], *args: Any) -> int:
    """Of the CudaError that a call raises; 0 if it raises none."""
    try:
        call(*args)
    except (CudaError, machine.Fault) as error:
        return error.code
    return 0


def on_host(address: int, count: int) -> np.ndarray:
    data = np.empty(count, np.uint8)
    driver.copy_to_host(data, address)
    return data


def with_visible(value: str, function: Callable[[], Any]) -> Any:
    """As a process with this CUDA_VISIBLE_DEVICES would see it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    machine.gpus.cache_clear()
    try:
        return function()
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        machine.gpus.cache_clear()


def devices() -> None:
    infos = [driver.device_info(ordinal) for ordinal in range(driver.device_count())]
    assert len({info.uuid for info in infos}) == len(infos) == 3
    assert code(driver.device_info, 3) == 101
    assert not driver.can_access_peer(0, 0)
    assert driver.can_access_peer(0, 1)
    assert not driver.can_access_peer(2, 1)

    def uuids() -> list[bytes]:
        return [driver.device_info(ordinal).uuid for ordinal in range(driver.device_count())]

    text = machine.gpus()[2].uuid_text
    assert with_visible("1,0", uuids) == [infos[1].uuid, infos[0].uuid]
    assert with_visible(f"{text},{text[:12]},1", uuids) == [infos[2].uuid, infos[2].uuid, infos[1].uuid]
    assert with_visible("1,7,0", uuids) == [infos[1].uuid]
    try:
        with_visible("", driver.device_count)
    except UnsupportedError:
        return
    raise AssertionError("no GPU is visible")


def contexts() -> None:
    codes = []

    def elsewhere() -> None:
        assert driver.current_context() == 0
        codes.extend(
            [code(driver.allocate, 64), code(driver_streams.create_event), code(driver_streams.synchronize_stream, 0)]
        )
        driver.set_context(context)
        codes.append(code(driver.synchronize))

    context = driver.current_context()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert codes == [201, 201, 201, 0]
    other = driver.retain_context(1 - rank)
    assert driver.current_context() == other != context
    driver.release_context(1 - rank)
    assert code(driver.allocate, 64) == 201
    driver.set_context(context)


def memory() -> None:
    a, b = driver.allocate(100), driver.allocate(5000)
    assert a % 256 == b % 256 == 0
    assert (on_host(a, 100) == machine.NEW).all()
    driver.fill(a, 7, 50)
    assert on_host(a, 100).tolist() == [7] * 50 + [machine.NEW] * 50
    assert driver.export_memory(b + 4999) == driver.export_memory(b) != driver.export_memory(a)
    assert code(driver.export_memory, b + 5000) == 1
    assert code(driver.fill, a, 0, 101) == 1
    assert code(driver.allocate, 0) == 1
    assert code(driver.allocate, machine.memory_info()[0] + 1) == 2
    assert code(driver.free, a + 1) == 1
    driver.free(a)
    assert code(driver.free, a) == 1
    assert driver.allocate(100) == a  # the lowest gap that fits
    driver.free(a)
    driver.free(b)


def handles() -> None:
    """Each rank maps the other's memory, and goes on seeing it when it is freed."""
    world, peer = MPI.COMM_WORLD, 1 - rank
    mine = driver.allocate(64)
    driver.fill(mine, rank + 1, 64)
    handle = driver.export_memory(mine + 10)
    assert code(driver.open_memory, handle) == 201
    assert code(driver.open_memory, bytes(64)) == 400
    theirs = world.allgather(handle)[peer]
    mapped = driver.open_memory(theirs)
    assert driver.open_memory(theirs) == mapped
    assert (on_host(mapped, 64) == peer + 1).all()
    assert code(driver.export_memory, mapped) == 1
    world.barrier()
    driver.fill(mapped, 10, 64)
    world.barrier()
    assert (on_host(mine, 64) == 10).all()
    driver.close_memory(mapped)
    world.barrier()
    driver.free(mine)
    world.barrier()
    assert (on_host(mapped, 64) == machine.FREED).all()
    driver.close_memory(mapped)
    assert code(driver.close_memory, mapped) == 1
    again = driver.allocate(64)
    assert again == mine
    world.barrier()
    assert code(driver.open_memory, theirs) == 205  # the same address, but not the same memory
    world.barrier()
    driver.free(again)


def links() -> None:
    """Rank 0 has memory on GPU 2: rank 1 cannot map it from GPU 1, and loses what it writes from GPU 0."""
    world = MPI.COMM_WORLD
    if rank == 0:
        driver.retain_context(2)
        mine = driver.allocate(64)
        driver.fill(mine, 1, 64)
    handle = world.bcast(driver.export_memory(mine) if rank == 0 else None)
    if rank == 1:
        assert code(driver.open_memory, handle) == 217
        driver.release_context(1)
        driver.retain_context(0)
        mapped = driver.open_memory(handle)
        driver.fill(mapped, 2, 64)
        driver.close_memory(mapped)
        driver.release_context(0)
        driver.retain_context(1)
    world.barrier()
    if rank == 0:
        assert (on_host(mine, 64) == 1).all()
        driver.free(mine)
        driver.release_context(2)
        driver.release_context(0)
        driver.retain_context(0)


def order() -> None:
    """Streams run side by side; events and the legacy stream order them."""
    seen: list[str] = []
    gate = threading.Event()
    first, second, apart = (cupy.cuda.Stream(non_blocking=free) for free in (False, False, True))
    event = driver_streams.create_event()
    machine_streams.submit(first.ptr, gate.wait)
    machine_streams.submit(first.ptr, lambda: seen.append("first"))
    driver_streams.record_event(event, first.ptr)
    driver_streams.wait_event(second.ptr, event)
    machine_streams.submit(second.ptr, lambda: seen.append("second"))
    machine_streams.submit(0, lambda: seen.append("legacy"))
    machine_streams.submit(first.ptr, lambda: seen.append("after legacy"))
    machine_streams.submit(apart.ptr, lambda: seen.append("apart"))
    driver_streams.synchronize_stream(apart.ptr)
    assert seen == ["apart"]
    gate.set()
    driver.synchronize()
    assert seen == ["apart", "first", "second", "legacy", "after legacy"]
    driver_streams.close_event(event)


def captures() -> None:
    stream, side = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    values = cupy.zeros(4, np.int32)
    event = cupy.cuda.Event()

    assert driver_streams.capture_id(stream.ptr) == 0
    stream.begin_capture()
    assert driver_streams.capture_id(stream.ptr) != 0 == driver_streams.capture_id(side.ptr)
    with stream:
        values[:1] = 5
        event.record(stream)
        side.wait_event(event)
        assert driver_streams.capture_id(side.ptr) == driver_streams.capture_id(stream.ptr)
        with side:
            values[1:2] = values[:1]
        stream.wait_event(side.record())
        values[2:3] = values[1:2]
    graph = stream.end_capture()
    assert driver_streams.capture_id(stream.ptr) == driver_streams.capture_id(side.ptr) == 0
    assert values.get().tolist() == [0, 0, 0, 0]
    graph.launch(stream)
    stream.synchronize()
    assert values.get().tolist() == [5, 5, 5, 0]

    def failing(mode: str, body: Callable[[], Any]) -> tuple[int, int]:
        """The codes of what is done in a capture, and of its end."""
        stream.begin_capture(mode)
        return code(body), code(stream.end_capture)

    def fork() -> None:
        event.record(stream)
        side.wait_event(event)
        machine_streams.submit(side.ptr, lambda: None)

    def outside() -> None:
        event.record(side)
        stream.wait_event(event)

    address = driver.allocate(64)
    assert failing("global", lambda: driver.allocate(64)) == (900, 901)
    assert failing("relaxed", lambda: driver.fill(address, 0, 64)) == (0, 0)
    assert failing("relaxed", stream.synchronize) == (900, 901)
    assert failing("global", lambda: driver.free(driver.allocate(64))) == (900, 901)
    assert failing("global", driver.synchronize) == (0, 0)  # it says that it is relaxed
    spare = driver.allocate(64)
    assert failing("thread_local", lambda: driver.free(spare)) == (900, 901)
    with driver.relaxed():
        assert failing("global", lambda: driver.free(spare)) == (0, 0)
        assert failing("global", stream.synchronize) == (900, 901)
    assert failing("relaxed", outside) == (905, 901)
    assert failing("relaxed", fork) == (0, 904)
    stream = cupy.cuda.Stream()
    assert failing("relaxed", lambda: driver.copy_to_host(np.zeros(64, np.uint8), address)) == (906, 901)
    driver.free(address)


def kernels() -> None:
    """A world of one, so that nothing is exchanged: what comes out is what went in."""
    macros = {"RANKS": "1", "RANK": "0", "DTYPE": "float32", "OP": "sum", "DEPTH": "1", "WHOLE_PACKETS": "1"}
    cubin = compiler.compile_kernel("one_shot", {f"IPCREDUCE_{key}": value for key, value in macros.items()}, (9, 0))
    assert code(driver.load_module, b"\x7fELF") == 200
    module = driver.load_module(cubin)
    assert code(driver.get_function, module, "no_such_kernel") == 500
    function = driver.get_function(module, "one_shot")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        source, target = cupy.arange(8, dtype=np.float32), cupy.zeros(8, np.float32)
        workspace = cupy.full(1 << 14, 0, np.uint8)
    args = np.zeros(24, np.uint64)
    args[:4] = source.data.ptr, target.data.ptr, 32, workspace.data.ptr + 8192
    args[12], args[13] = workspace.data.ptr, workspace.data.ptr + 8000
    launch = driver.Launch(function, 1, 32, args, programmatic=True)
    stream.begin_capture()
    launch.run(stream.ptr)
    graph = stream.end_capture()
    args[2] = 16  # the graph has kept the 32
    launch.run(stream.ptr)
    with stream:
        assert target.get().tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
        graph.launch(stream)
        assert target.get().tolist() == list(range(8))
    assert code(driver.Launch(function, 1, 2048, args).run, stream.ptr) == 1
    assert code(driver.Launch(function, 1, 32, args[:16].copy()).run, stream.ptr) == 1
    driver.close_module(module)
    assert code(driver.close_module, module) == 400


def faults() -> None:
    before = driver.calls()
    driver.fault_at(2)
    assert driver.device_count() == 3
    assert code(driver.device_count) == 999
    assert driver.device_count() == 3
    assert driver.calls() == before + 3
    assert driver.leaks() == {"contexts": 1}
    address, event = driver.allocate(1), driver_streams.create_event()
    assert driver.leaks() == {"contexts": 1, "allocations": 1, "events": 1}
    driver.free(address)
    driver_streams.close_event(event)


MB2 = 2 << 20


def _attached(nbytes: int = MB2) -> tuple[virtual_memory.Range, int]:
    """A range with new memory, and a descriptor of it."""
    there = virtual_memory.Range(rank, nbytes)
    there.attach(virtual_memory.create(rank, nbytes))
    return there, there.export()


def virtual() -> None:
    """As the library calls it; a descriptor is valid in this process, too."""
    assert virtual_memory.missing(rank) is None
    assert virtual_memory.rounded(rank, 1) == virtual_memory.rounded(rank, MB2) == MB2
    free = machine.memory_info()[0]
    there, descriptor = _attached(2 * MB2)
    assert machine.memory_info()[0] == free - 2 * MB2
    assert (on_host(there.address, 2 * MB2) == machine.NEW).all()
    assert code(machine.export, there.address) == code(driver.free, there.address) == 1
    again = virtual_memory.Range(rank, 2 * MB2)
    again.attach(virtual_memory.import_descriptor(descriptor))
    os.close(descriptor)  # the imported memory does not need it
    driver.fill(there.address + MB2, 7, MB2)
    assert (on_host(again.address + MB2, MB2) == 7).all()
    address = there.address
    there.detach()
    there.detach()
    assert code(driver.fill, address, 0, 1) == 1, "nothing is there"
    assert machine.memory_info()[0] == free - 2 * MB2, "it is still mapped elsewhere"
    there.attach(virtual_memory.create(rank, 2 * MB2))
    assert there.address == address
    assert (on_host(address, MB2) == machine.NEW).all()
    there.close()
    again.close()
    again.close()
    assert machine.memory_info()[0] == free
    assert driver.leaks() == {"contexts": 1}


def virtual_misused() -> None:
    """Each wrong use has the error of the driver, and changes nothing."""
    call, model = driver.call, driver.load()
    there, descriptor = _attached(2 * MB2)
    at, properties = there.address, virtual_memory._properties(rank)
    empty, other = virtual_memory.Range(rank, 2 * MB2), virtual_memory.create(rank, MB2)
    access, far = virtual_memory._access(rank), virtual_memory._access(3)
    wrong: list[tuple[Any, ...]] = [
        ("cuMemMap", at, MB2, 0, other, 0),  # something is there
        ("cuMemMap", at + MB2, MB2, 0, other, 0),
        ("cuMemMap", empty.address, 2 * MB2, 0, other, 0),  # more than there is
        ("cuMemMap", empty.address, MB2, MB2, other, 0),
        ("cuMemMap", empty.address + 4096, MB2, 0, other, 0),
        ("cuMemMap", empty.address + 2 * MB2, MB2, 0, other, 0),  # not reserved
        ("cuMemMap", empty.address, MB2, 0, 99, 0),
        ("cuMemUnmap", at, MB2),  # a part
        ("cuMemUnmap", empty.address, MB2),
        ("cuMemSetAccess", empty.address, MB2, [access], 1),  # nothing is there
        ("cuMemSetAccess", at, MB2, [access], 1),
        ("cuMemSetAccess", at, 2 * MB2, [access], 2),
        ("cuMemSetAccess", at, 2 * MB2, [model.CUmemAccessDesc()], 1),
        ("cuMemAddressFree", at, 2 * MB2),  # something is there
        ("cuMemAddressFree", empty.address, MB2),  # a part
        ("cuMemAddressReserve", 4096, 0, 0, 0),
        ("cuMemCreate", 4096, properties, 0),
        ("cuMemCreate", MB2, model.CUmemAllocationProp(), 0),
        ("cuMemRelease", 99),
        ("cuMemExportToShareableHandle", other, model.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE, 0),
        ("cuMemImportFromShareableHandle", 0, virtual_memory._descriptor()),
    ]
    before = driver.leaks()
    for arguments in wrong:
        assert code(call, *arguments) == 1, arguments
    assert code(call, "cuMemSetAccess", at, 2 * MB2, [far], 1) == 101
    assert code(call, "cuMemCreate", 1 << 40, properties, 0) == 2
    assert driver.leaks() == before
    driver.fill(at, 1, 2 * MB2)
    os.close(descriptor)
    virtual_memory.release(other)
    assert code(virtual_memory.release, other) == 1
    there.close()
    empty.close()
    _virtual_that_is_missing()
    assert driver.leaks() == {"contexts": 1}


def _virtual_that_is_missing() -> None:
    for value, words in (("1", "no virtual memory"), ("descriptors", "exports no memory")):
        os.environ["SIM_NO_VMM"] = value
        assert words in str(virtual_memory.missing(rank))
        assert code(virtual_memory.create, rank, MB2) == 801
    del os.environ["SIM_NO_VMM"]


@contextmanager
def on_gpu(ordinal: int) -> Iterator[None]:
    before = driver.current_context()
    driver.retain_context(ordinal)
    yield
    driver.set_context(before)
    driver.release_context(ordinal)


def virtual_of_a_peer() -> None:
    """Over a link that loses data, one without access, and one that is well."""
    for owner, user, refusal, arrives in ((0, 2, 0, False), (1, 2, 101, False), (0, 1, 0, True), (2, 0, 0, False)):
        memory = virtual_memory.create(owner, MB2)
        descriptor = virtual_memory.export(memory)
        with on_gpu(user):
            there = virtual_memory.Range(user, MB2)
            assert code(there.attach, virtual_memory.import_descriptor(descriptor)) == refusal
            if not refusal:
                driver.fill(there.address, 7, MB2)
            there.close()
        with on_gpu(owner):
            there = virtual_memory.Range(owner, MB2)
            there.attach(virtual_memory.import_descriptor(descriptor))
            assert (on_host(there.address, MB2) == (7 if arrives else machine.NEW)).all()
            there.close()
        os.close(descriptor)
        virtual_memory.release(memory)
    assert driver.leaks() == {"contexts": 1}


def arrays() -> None:
    host = np.arange(24, dtype=np.int16).reshape(4, 6)
    array = cupy.asarray(host)
    for view in (
        lambda a: a[1:, ::-2],
        lambda a: a.T,
        lambda a: a[:, 3],
        lambda a: a[2, 3, ...],
        lambda a: a[::-1, None],
    ):
        found, expected = view(array), view(host)
        assert found.shape == expected.shape
        assert found.strides == expected.strides
        assert found.flags.c_contiguous == expected.flags.c_contiguous
        assert found.data.ptr - array.data.ptr == expected.ctypes.data - host.ctypes.data
        assert (found.get() == expected).all()
        assert (found.copy().get() == expected).all()
        owner = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, array)
        pointer = cupy.cuda.MemoryPointer(owner, found.data.ptr - array.data.ptr)
        assert (cupy.ndarray(found.shape, found.dtype, pointer, found.strides).get() == expected).all()
    assert (array[2, 3].shape, int(array[2, 3].get())) == ((), 15)
    array[1:3, ::2] = 7
    host[1:3, ::2] = 7
    assert (array.get() == host).all()
    assert array.reshape(-1)[5:].data.ptr == array.data.ptr + 10
    assert cupy.empty((0, 3), np.float32).nbytes == 0
    interface = array[::2].__cuda_array_interface__
    assert (interface["data"], interface["strides"]) == ((array.data.ptr, False), (24, 2))
    address = array.data.ptr
    del array, owner, pointer, found
    assert cupy.empty((4, 6), np.int16).data.ptr == address  # the pool gives it out again
    assert driver.leaks() == {"contexts": 1}


driver.retain_context(rank)
for check in (
    devices, contexts, memory, handles, links, order, captures, kernels, faults, virtual, virtual_misused,
    virtual_of_a_peer, arrays,
):  # fmt: skip
    check()
driver.release_context(rank)
assert driver.leaks() == {}
print("done")
