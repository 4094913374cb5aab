"""Every error that ipcreduce raises on purpose. All are under :class:`IpcReduceError`.

A message names the rank, the call (counted from 1 on each communicator), what was expected, what was found, and what
to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Location = tuple[int, tuple[int, ...], str, tuple[int, ...]]  # address, shape, dtype's name, strides in bytes


class IpcReduceError(RuntimeError):
    """Base class of ipcreduce's errors."""


class ArgumentError(IpcReduceError, ValueError):
    """A call's arguments are wrong: type, dtype, shape, device, op, stream, a closed communicator."""


class UnsupportedError(IpcReduceError):
    """This machine, driver or installation cannot do what was asked; the message says what is missing."""


class RankMismatchError(IpcReduceError):
    """The ranks do not make the same call: number, shape, dtype, op or order differ."""


class PeerLostError(IpcReduceError):
    """A rank has gone, or did not come to a resynchronisation. The communicator can only be closed."""


class PeerTimeoutError(IpcReduceError):
    """A rank did not come to a call within the communicator's timeout."""


class PeerFailedError(IpcReduceError):
    """Another rank refused this call or raised in it; the message has that rank's own."""


class GraphStateError(IpcReduceError):
    """A graph cannot do this in its present state."""


class CaptureError(IpcReduceError):
    """A call cannot be part of a stream capture as it stands.

    ``within`` says that it was made on a stream that is being captured. Such a call is not refused on the other ranks,
    since what ends their waits would also spoil the work that is captured here.
    """

    def __init__(self, text: str, *, within: bool = False) -> None:
        super().__init__(text)
        self.within = within


class AddressChangedError(IpcReduceError):
    """A replay's device arrays are not where the recording's were; nothing has been launched.

    ``missing`` and ``added`` are tuples of paths such as ``kwargs["x"].layers[3]``. ``changed`` maps a path to (old,
    new), each (address, shape, name of the dtype, strides in bytes).
    """

    def __init__(
        self,
        message: str,
        missing: Iterable[str] = (),
        added: Iterable[str] = (),
        changed: Mapping[str, tuple[Location, Location]] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing, self.added, self.changed = tuple(missing), tuple(added), dict(changed or {})

    def __reduce__(self) -> tuple[type[AddressChangedError], tuple[object, ...]]:
        return type(self), (str(self), self.missing, self.added, self.changed)


class CudaError(IpcReduceError):
    """A CUDA call failed. ``call`` is its name, ``code`` the CUresult, or the runtime's cudaError_t, as an int."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed: {text} ({code})")
        self.call = call
        self.code = code
        self._text = text

    def __reduce__(self) -> tuple[type[CudaError], tuple[str, int, str]]:
        return type(self), (self.call, self.code, self._text)


def report(rank: int, call: int, *, expected: str, found: str, advice: str) -> str:
    """The one form of a message about a call. ``call`` 0 is the communicator's start-up."""
    where = f"rank {rank}, call {call}" if call else f"rank {rank}, start-up"
    return f"{where}: expected {expected}; found {found}. {advice}"
