"""Arrays and devices of JAX itself, on two devices that it makes of the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ipcreduce import ArgumentError, Communicator, Map
from ipcreduce.options import Options

ALONE = SimpleNamespace(rank=0, size=1, allgather=lambda data: [data])


@pytest.fixture(scope="module")
def jax() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"):  # which JAX sets
            patched.setenv(name, "")
            patched.delenv(name)
        patched.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
        patched.setenv("JAX_PLATFORMS", "cpu")
        module = pytest.importorskip("jax")
        assert len(module.devices()) == 2
        yield module


@pytest.fixture(scope="module")
def comm(jax: Any) -> Iterator[Communicator]:
    with Communicator(ALONE) as made:
        yield made


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.complex64])
def test_an_array_on_one_device(jax: Any, comm: Communicator, dtype: Any, place: int):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    array = jax.device_put(values, jax.devices()[place])
    for found, due in (
        (comm.allreduce(array), values),
        (comm.allreduce(array.T), values.T),
        (comm.allreduce([array])[0], values),
        (comm.allgather(array, axis=1), values),
        (comm.reduce_scatter(array), values),
    ):
        assert type(found) is np.ndarray
        assert (found.dtype, found.tolist()) == (values.dtype, due.tolist())


def test_they_are_immutable(jax: Any, comm: Communicator):
    array = jax.numpy.arange(3.0) + 1
    for source in (np.zeros(3, np.float32), array):
        with pytest.raises(ArgumentError, match=r"out cannot be written: this ArrayImpl is.*Pass a copy"):
            comm.allreduce(source, out=array)
    assert comm.broadcast(array) is array  # this rank's are the values
    copy = np.array(array)
    assert comm.allreduce(array, out=copy) is copy
    assert (copy.tolist(), array.tolist()) == ([1, 2, 3], [1, 2, 3])


def sharded(jax: Any) -> Any:
    sharding = jax.sharding
    mesh = sharding.Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(np.ones(6, np.float32), sharding.NamedSharding(mesh, sharding.PartitionSpec("x")))


def deleted(jax: Any) -> Any:
    array = jax.numpy.ones(6)
    array.delete()
    return array


def donated(jax: Any) -> Any:
    array = jax.numpy.ones(6)
    jax.jit(lambda values: values + 1, donate_argnums=0)(array).block_until_ready()
    return array


GONE = "does not give its memory: it was deleted, or donated to a function"
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "array": lambda comm, array: comm.allreduce(array),
    "member 0 of the list: array": lambda comm, array: comm.allreduce([array]),
    "out": lambda comm, array: comm.allreduce(np.ones(6, np.float32), out=array),
    "the operand a": lambda comm, array: comm.allreduce(
        np.ones(6, np.float32), then=Map("v + a", host=lambda v, a: v + a, a=array)
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("make", "text"), [(sharded, "does not give its memory: .*unsharded"), (deleted, GONE), (donated, GONE)]
)
def test_an_array_that_gives_no_memory(
    jax: Any, comm: Communicator, name: str, make: Callable[[Any], Any], text: str
):  # fmt: skip
    array = make(jax)
    with pytest.raises(ArgumentError, match=f"call [0-9]+: {name}, an? ArrayImpl, {text}"):
        CALLS[name](comm, array)
    assert comm.allreduce(1) == 1


@pytest.mark.parametrize("split", ["allgather", "reduce_scatter", "broadcast"])
def test_a_deleted_array_in_the_other_calls(jax: Any, comm: Communicator, split: str):
    with pytest.raises(ArgumentError, match=f"array, an? ArrayImpl, {GONE}"):
        getattr(comm, split)(deleted(jax))


def test_bfloat16_by_a_view_of_numpy(jax: Any, comm: Communicator):
    array = jax.numpy.ones(6, jax.numpy.bfloat16)
    with pytest.raises(ArgumentError, match=r"of bfloat16 on the host.*Pass NumPy's view of it"):
        comm.allreduce(array)
    assert comm.allreduce(np.asarray(array)).dtype == ml_dtypes.bfloat16


def test_what_a_function_is_traced_with_is_no_array(jax: Any, comm: Communicator):
    def function(values: Any) -> Any:
        return comm.allreduce(values)

    with pytest.raises(ArgumentError, match="Tracer, which hands on the protocols"):
        jax.jit(function)(jax.numpy.ones(6))
    assert comm.allreduce(1) == 1


def test_a_device_of_the_processor_names_no_gpu(jax: Any):
    """On GPUs its attributes are the same: test_options.py has a stand-in with another platform."""
    device = jax.devices()[1]
    assert (device.platform, device.id, device.local_hardware_id) == ("cpu", 1, 1)
    found = Options.of(device, 1.0, None)
    assert found.wrong is not None
    assert "of type 'cpu', which names no GPU" in found.wrong
