"""NCCL through ``nccl.bindings``, the low layer of NVIDIA's binding nccl4py, which takes addresses.

With the layer above, ``nccl.core``, the host takes 22 to 41 us for a call on arrays (over 2 H200, NCCL 2.28.9).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import CudaError, UnsupportedError, first_line, installing

ID_BYTES = 128
# The codes of nccl.h. NCCL has no 16-bit integers.
DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_SUCCESS, _IN_PROGRESS, TIMEOUT = 0, 7, 8
SUSPENDS = 22907  # the first version with ncclCommSuspend
_MEMORY = 1  # NCCL_SUSPEND_MEM, its flag
MIXING = "NCCL_GRAPH_MIXING_SUPPORT"  # if it is 0, NCCL does not order captured calls


@cache
def load() -> Any:
    """The binding's module. :raises UnsupportedError: if the binding or NCCL is not installed."""
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise UnsupportedError(
            f"NVIDIA's binding of NCCL cannot be loaded ({first_line(error)}): {installing('nccl-cuda13')}, or "
            "[nccl-cuda12] for CUDA 12"
        ) from None
    try:
        nccl.get_version()
    except Exception as error:  # the binding has types of its own for a library that is missing
        raise UnsupportedError(
            f"the NCCL library cannot be loaded ({first_line(error)}): pip install nvidia-nccl-cu13, or "
            "nvidia-nccl-cu12 for CUDA 12"
        ) from None
    return nccl


def version() -> int:
    """NCCL's version, such as 22809 for 2.28.9."""
    return int(load().get_version())


def failure(name: str, error: BaseException) -> BaseException:
    """A CudaError for an error that the binding's function ``name`` has raised; any other error unchanged."""
    if not isinstance(error, load().NCCLError):
        return error
    return CudaError(name, int(getattr(error, "status", -1)), first_line(error))


def _made(name: str, call: Callable[..., Any], *given: Any) -> Any:
    """The result of a call of the binding, whose errors name the function ``name`` of NCCL."""
    try:
        return call(*given)
    except Exception as error:
        raise failure(name, error) from error


def new_id() -> bytes:
    """An identity with which the ranks of a communicator find each other. :raises CudaError: if NCCL has no network."""
    return bytes(_made("ncclGetUniqueId", load().get_unique_id))


def join(n: int, rank: int, identity: bytes) -> Any:
    """A new communicator on the current context's GPU. It waits for all ranks. :raises CudaError: if that fails."""
    return _made("ncclCommInitRank", load().comm_init_rank, n, load().UniqueId.from_buffer(identity), rank)


def abort(comm: Any) -> None:
    """Abort the calls of a communicator, and free it. :raises CudaError: if that fails."""
    _made("ncclCommAbort", load().comm_abort, comm)


def close(comm: Any) -> None:
    """Free a communicator. Collective. :raises CudaError: if that fails."""
    _made("ncclCommDestroy", load().comm_destroy, comm)


def cannot_suspend() -> str | None:
    """The reason why NCCL cannot give memory back; None if it can."""
    found = version()
    if found >= SUSPENDS and hasattr(load(), "comm_suspend"):
        return None
    wanted, has = shown_version(SUSPENDS), shown_version(found)
    return f"NCCL gives memory back from {wanted} on, and with a binding that has ncclCommSuspend; here is NCCL {has}"


def shown_version(number: int) -> str:
    """A version of NCCL, such as 2.28.9 for 22809."""
    return ".".join(str(number // step % 100) for step in (10_000, 100, 1))


def suspend(comm: Any) -> None:
    """Let NCCL give back the memory that it can, of a communicator at rest. :raises CudaError: if that fails."""
    _made("ncclCommSuspend", load().comm_suspend, comm, _MEMORY)


def resume(comm: Any) -> None:
    """Undo :func:`suspend`. It waits for all ranks. :raises CudaError: if that fails."""
    _made("ncclCommResume", load().comm_resume, comm)


def problem(comm: Any) -> str | None:
    """The error that NCCL has met in a communicator; None if there is none."""
    nccl = load()
    try:
        code = int(nccl.comm_get_async_error(comm))
    except Exception as error:
        return first_line(failure("ncclCommGetAsyncError", error))
    return None if code in (_SUCCESS, _IN_PROGRESS) else f"NCCL: {nccl.Result(code).name} ({code})"
