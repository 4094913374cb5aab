"""The types in signatures: arguments and results of calls, and CUDA handles, which are ints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol, TypeVar, Union

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

OpName = Literal["sum", "prod", "min", "max", "avg", "mean", "product", "any", "all"]


class EnumOp(Protocol):
    """A member of torch.distributed.ReduceOp."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> Any: ...


Op = Union[OpName, EnumOp, "MPI.Op"]

Number = TypeVar("Number", bound=complex | np.generic)  # to type checkers, bool, int and float are complex, too
Shape = TypeVar("Shape", bound="tuple[Any, ...]")
DType = TypeVar("DType", bound="np.dtype[Any]")


class DLPackArray(Protocol):
    """An array with DLPack, as those of PyTorch, CuPy, JAX and NumPy."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class CudaArray(Protocol):
    """A device array with ``__cuda_array_interface__``, as those of other libraries."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Array = DLPackArray | CudaArray
Out = TypeVar("Out", bound=Array)
OutList = TypeVar("OutList", list[Any], tuple[Any, ...])

Stream = NewType("Stream", int)  # a cudaStream_t; 0 and 1 are the legacy default stream, 2 the per-thread one
Event = NewType("Event", int)  # a cudaEvent_t
DEFAULT_STREAM = Stream(0)
