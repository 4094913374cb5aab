"""The default communicator, and the function that uses it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from . import clock, habits, process
from .arrays import lists, views
from .arrays.maps import Map
from .arrays.norms import FP8
from .communicator import Communicator
from .cuda import cupy_runtime
from .errors import ArgumentError, UnsupportedError
from .graphs.session import provide_default
from .originals import RLock, identifier
from .texts import kind_of
from .types import Array, DType, Number, Op, Out, OutList, Shape

_MAX_SECONDS = 300.0  # for another thread's start-up: its timeout counts twice, and after an error it closes

_default: Communicator | None = None
_making = RLock()  # held while the default communicator is made, and not to find it
_maker = 0  # the thread that makes it


def get_communicator() -> Communicator:
    """The default communicator, over ``MPI.COMM_WORLD`` and on CuPy's current device. The first call is collective.

    Without an MPI library and without a launcher it has this process only.
    """
    return _default_for(None)


def _default_for(array: Any) -> Communicator:
    """The default communicator. :param array: on whose GPU it is made; None for the current GPU."""
    comm = _default
    if comm is None or process.resources_of(comm) is None:
        return _make_default(array)
    return comm


def _make_default(array: Any) -> Communicator:
    """Make the default communicator, unless another thread makes it meanwhile.

    :raises UnsupportedError: within start-up of the same thread, in a forked child, or if the other thread never ends.
    """
    global _default, _maker
    process.check_not_forked()  # before the lock, which a thread of the parent may have held
    thread = identifier()
    if _maker == thread:
        raise UnsupportedError(
            "a signal handler, a finaliser or a log handler has made this call while the same thread makes the default "
            "communicator. Let it set a flag, and make the call where the program looks at that flag"
        )
    try:
        if not clock.wait(lambda seconds: _making.acquire(timeout=seconds), _MAX_SECONDS):
            raise UnsupportedError(
                f"another thread has been making the default communicator for {_MAX_SECONDS:.0f} s. Look for what "
                "that thread waits for: for this one, perhaps"
            )
        _maker = thread
        if _default is None or process.resources_of(_default) is None:
            device = None
            with suppress(Exception):  # allreduce() raises the error, when it can also tell the other ranks
                if lists.is_list(array):
                    array = next(iter(array), None)
                if array is not None and not isinstance(array, np.ndarray) and views.is_device(array):
                    device = views.device_of(views.view(array, cupy_runtime.stream_of()[0]))
            _default = Communicator(device=device)
        return _default
    finally:
        if _maker == thread:
            _maker = 0
        try:  # noqa: SIM105 - see call_lock.make
            _making.release()
        except RuntimeError:  # this thread does not have it
            pass


@overload
def allreduce(
    array: Number, op: Op = ..., *, out: None = ..., then: Map | None = ..., sms: int | None = ...,
    comm: Communicator | None = ..., stream: Any = ...,
) -> Number: ...  # fmt: skip
@overload
def allreduce(
    array: list[Any] | tuple[Any, ...], op: Op = ..., *, out: None = ..., then: None = ..., sms: int | None = ...,
    comm: Communicator | None = ..., stream: Any = ...,
) -> list[Any]: ...  # fmt: skip
@overload
def allreduce(
    array: list[Any] | tuple[Any, ...], op: Op = ..., *, out: OutList, then: None = ..., sms: int | None = ...,
    comm: Communicator | None = ..., stream: Any = ...,
) -> OutList: ...  # fmt: skip
@overload
def allreduce(
    array: np.ndarray[Shape, DType], op: Op = ..., *, out: None = ..., then: Map | None = ..., sms: int | None = ...,
    comm: Communicator | None = ..., stream: Any = ...,
) -> np.ndarray[Shape, DType]: ...  # fmt: skip
@overload
def allreduce(
    array: Array, op: Op = ..., *, out: None = ..., then: Map | None = ..., sms: int | None = ...,
    comm: Communicator | None = ..., stream: Any = ...,
) -> Any: ...  # fmt: skip
@overload
def allreduce(
    array: Array, op: Op = ..., *, out: Out, then: Map | None = ..., sms: int | None = ...,
    comm: Communicator | None = ..., stream: Any = ...,
) -> Out: ...  # fmt: skip
def allreduce(
    array: Any, op: Any = "sum", *more: Any, out: Any = None, then: Any = None, sms: Any = None,
    comm: Communicator | None = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Reduce an array, a number or a list of arrays over all ranks. See :meth:`Communicator.allreduce`.

    :param comm: None for the default communicator, which the first call makes on the array's GPU.
    """
    if more:
        raise TypeError(habits.BY_POSITION)
    if type(comm) is not Communicator:
        comm = _chosen(comm, array)
    if then is not None or sms is not None:
        return comm.allreduce(array, op, out=out, then=then, sms=sms, stream=stream)
    return comm.allreduce(array, op, out=out, stream=stream)


def _chosen(comm: Communicator | None, array: Any) -> Communicator:
    """The communicator of a call on ``array``. :raises ArgumentError: if ``comm`` is not a communicator."""
    if comm is None:
        return _default_for(array)
    if not issubclass(type(comm), Communicator):
        raise ArgumentError(f"comm is {kind_of(comm)}, which is no ipcreduce.Communicator. Make one: Communicator(it)")
    return comm


@overload
def allreduce_rmsnorm(
    x: np.ndarray[Shape, DType], weight: Any, eps: float = ..., *, quantize: None = ...,
    out: np.ndarray[Shape, DType] | None = ..., residual_out: np.ndarray[Shape, DType] | None = ...,
    comm: Communicator | None = ..., **further: Any,
) -> tuple[np.ndarray[Shape, DType], np.ndarray[Shape, DType]]: ...  # fmt: skip
@overload
def allreduce_rmsnorm(
    x: Array, weight: Any, eps: float = ..., *, quantize: None = ..., comm: Communicator | None = ..., **further: Any
) -> tuple[Any, Any]: ...
@overload
def allreduce_rmsnorm(
    x: Array, weight: Any, eps: float = ..., *, quantize: FP8, comm: Communicator | None = ..., **further: Any
) -> tuple[Any, Any, Any]: ...
def allreduce_rmsnorm(
    x: Any, weight: Any, eps: float = 1e-6, *, comm: Communicator | None = None, **further: Any
) -> tuple[Any, ...]:
    """Sum ``x`` over all ranks, add a residual, and normalise the rows. See :meth:`Communicator.allreduce_rmsnorm`.

    :param comm: None for the default communicator, which the first call makes on the array's GPU.
    :param further: the other arguments of that method.
    """
    made: tuple[Any, ...] = _chosen(comm, x).allreduce_rmsnorm(x, weight, eps, **further)
    return made


def allgather(array: Any, *, comm: Communicator | None = None, **further: Any) -> Any:
    """Put every rank's array one after the other along ``axis``, on every rank. See :meth:`Communicator.allgather`.

    :param comm: None for the default communicator, which the first call makes on the array's GPU.
    :param further: the other arguments of that method.
    """
    return _chosen(comm, array).allgather(array, **further)


def reduce_scatter(array: Any, op: Op = "sum", *, comm: Communicator | None = None, **further: Any) -> Any:
    """Reduce an array over all ranks, and return this rank's part of it. See :meth:`Communicator.reduce_scatter`.

    :param comm: None for the default communicator, which the first call makes on the array's GPU.
    :param further: the other arguments of that method.
    """
    return _chosen(comm, array).reduce_scatter(array, op, **further)


def broadcast(array: Any, root: int = 0, *, comm: Communicator | None = None, **further: Any) -> Any:
    """Copy the values of rank ``root`` into the array of every rank. See :meth:`Communicator.broadcast`.

    :param comm: None for the default communicator, which the first call makes on the array's GPU.
    :param further: the other arguments of that method.
    """
    return _chosen(comm, array).broadcast(array, root, **further)


provide_default(get_communicator)


if TYPE_CHECKING:

    def _agree(comm: Communicator) -> None:
        """Refused by mypy if a method takes what its function does not take, or returns something else."""
        comm.allreduce = allreduce  # type: ignore[method-assign]
        comm.allreduce_rmsnorm = allreduce_rmsnorm  # type: ignore[method-assign]
        comm.allgather = allgather  # type: ignore[method-assign]
        comm.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
        comm.broadcast = broadcast  # type: ignore[method-assign]
