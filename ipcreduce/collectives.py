"""The communicator's collectives that split arrays among the ranks: all-gather, reduce-scatter, broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from . import habits
from .arrays.splits import SplitCall, SplitKey
from .calls import call_lock
from .calls.request import BROADCAST, GATHER, SCATTER
from .cuda import cupy_runtime
from .options import checked_sms
from .types import Op

if TYPE_CHECKING:
    from .communicator_state import CommunicatorState

Sizes = Sequence[int] | None
_Function = TypeVar("_Function", bound=Callable[..., Any])


def breaks_trace(operator: str) -> Callable[[_Function], _Function]:
    """Let torch.compile not trace a function, but break its graph there, and name the operator that does not.

    It does as torch.compiler.disable(), without an import.
    """

    def mark(function: _Function) -> _Function:
        setattr(function, "_torchdynamo_disable", True)  # noqa: B010  (a function has no such attribute)
        setattr(function, "_torchdynamo_disable_msg", f"use torch.ops.ipcreduce.{operator}")  # noqa: B010
        return function

    return mark


def traced(function: _Function) -> _Function:
    """Let torch.compile trace a function that a server calls: it skips the files of this package."""
    setattr(function, "__code__", function.__code__.replace(co_filename="ipcreduce_traced"))  # noqa: B010
    return function


class Collectives:
    """The two halves of an all-reduce, and the broadcast. :class:`ipcreduce.Communicator` has them."""

    _state: CommunicatorState
    if not TYPE_CHECKING:  # for a type checker, every name would be one of the class
        __getattr__ = habits.not_in_communicator

    @property
    def rank(self) -> int:
        """This process's number, 0 to ``size`` - 1."""
        return self._state.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._state.ranks.size

    def _call(self, given: Any, stream: Any) -> Any:
        """Make a call of any kind by the slow path."""
        state, on_device = self._state, given.on_device()
        if on_device is None:  # an empty list
            on_device = state.backend is not None
        if on_device:
            return state.device.call(given, stream)
        if stream is not None:
            cupy_runtime.stream_of(stream)  # refused as on GPUs; no work on the host waits for a stream
        return state.host.call(given)

    @breaks_trace("all_gather")
    def allgather(
        self, array: Any, *, axis: int = 0, sizes: Sizes = None, out: Any = None, sms: int | None = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """Every rank's ``array``, one after the other along ``axis``, in the order of the ranks.

        With 2 ranks and arrays of shape (3, 4), the result has shape (6, 4), and with ``axis=1`` shape (3, 8). Bytes
        are moved as they are, whatever they mean.

        :param array: as for :meth:`allreduce`, of any dtype; the same dtype on every rank, and the same shape, but for
            the lengths along ``axis`` that ``sizes`` says. A number, or an array without dimensions, counts as one of
            shape (1,). Or a list of arrays, of any dtypes, which is one call.
        :param axis: from -ndim to ndim - 1; the same on every rank, as ``sizes``.
        :param sizes: the length along ``axis`` of each rank's array, 0 or more; None if they are equal. For a list it
            holds for each of its arrays.
        :param out: the array for the result. ``array`` may be this rank's own place in it, ``out[0:3]`` on rank 0 in
            the example; it shares no other memory with it. For a list, a list of such arrays.
        :param sms: the most blocks that exchange data, as for :meth:`allreduce`. :param stream: as there.
        :returns: ``out``, or a new C-contiguous array of the library of ``array``. For a list a list. For a number an
            array of NumPy.
        :raises ArgumentError: if this rank's arguments are wrong. The other ranks get :class:`PeerFailedError`.
        :raises RankMismatchError: if the ranks' calls differ.
        :raises PeerTimeoutError: if a rank did not come in time. :raises PeerLostError: if a rank has gone.

        What :meth:`allreduce` says of errors holds here, too. Source of the algorithm: kernels/gather.cu.
        """
        return self._split((GATHER, None, axis, sizes, 0, sms), array, out, stream)

    @breaks_trace("reduce_scatter")
    def reduce_scatter(
        self, array: Any, op: Op = "sum", *, axis: int = 0, sizes: Sizes = None, out: Any = None,
        sms: int | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """This rank's part, along ``axis``, of the reduction of every rank's ``array``.

        With 2 ranks and arrays of shape (6, 4), rank 0 gets rows 0 to 2 of ``allreduce(array, op)``, and rank 1 rows 3
        to 5. With backend "ipc" and on the host the bits are those of :meth:`allreduce`.

        :param array: as for :meth:`allreduce`; no number, and no array without dimensions. Or a list of arrays, of any
            shapes and dtypes, which is one call.
        :param op: as for :meth:`allreduce`.
        :param axis: from -ndim to ndim - 1; the same on every rank, as ``sizes``.
        :param sizes: the length along ``axis`` of each rank's part, 0 or more, which make up the array's; None for
            equal parts.
        :param out: the array for the result. It may be this rank's part of ``array``, and shares no other memory with
            it. For a list, a list of such arrays.
        :param sms: the most blocks that exchange data, as for :meth:`allreduce`. :param stream: as there.
        :returns: ``out``, or a new C-contiguous array of the library of ``array``. For a list a list.
        :raises IpcReduceError: as :meth:`allgather` does. ArgumentError also if the ranks do not divide the length, and
            ``sizes`` is None.

        Source of the algorithm: kernels/scatter.cu.
        """
        return self._split((SCATTER, op, axis, sizes, 0, sms), array, out, stream)

    @breaks_trace("broadcast_")
    def broadcast(self, array: Any, root: int = 0, *, sms: int | None = None, stream: Any = None) -> Any:
        """Rank ``root``'s values of ``array`` on every rank, in place.

        :param array: as for :meth:`allgather`, of the same shape and dtype on every rank; no number. On rank ``root``
            it may be read-only. Or a list of arrays, which is one call.
        :param root: the same on every rank.
        :param sms: the most blocks that exchange data, as for :meth:`allreduce`. :param stream: as there.
        :returns: ``array``.
        :raises IpcReduceError: as :meth:`allgather` does.

        Source of the algorithms: kernels/gather.cu; of one long array over more than two ranks kernels/spread.cu.
        """
        return self._split((BROADCAST, None, 0, None, root, sms), array, array, stream)

    def _split(self, key: SplitKey, array: Any, out: Any, stream: Any) -> Any:
        """Make a call. ``key``: its arguments but for the arrays. ``out``: what is written, if it is given."""
        if type(key[3]) is list:  # so that the call can be cached
            key = (*key[:3], tuple(key[3]), *key[4:])
        state = self._state
        fast = state.fast  # once: another thread may close the communicator
        if fast is None:
            return call_lock.make(state.calls, self._split_usual, array, key, out, stream)
        return fast.make(None, self._split_usual, array, key, out, stream, fast.lookup_split)

    def _split_usual(self, array: Any, key: SplitKey, out: Any, stream: Any) -> Any:
        if key[-1] is not None:
            key = (*key[:-1], checked_sms(key[-1]))
        return self._call(SplitCall(array, out, key, self.rank, self.size), stream)
