"""The errors that ipcreduce raises deliberately. All derive from :class:`IpcReduceError`.

A message about a call names the rank, the call number (from 1 on each communicator), the expected and the found
values, and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .texts import text_of

Location = tuple[int, tuple[int, ...], str, tuple[int, ...]]  # address, shape, dtype's name, strides in bytes


class IpcReduceError(RuntimeError):
    """Base class of ipcreduce's errors."""


class ArgumentError(IpcReduceError, ValueError):
    """An argument of a call is wrong: type, dtype, shape, device, op or stream; or the communicator is closed."""


class UnsupportedError(IpcReduceError):
    """This machine, driver or installation does not support the request. The message names the missing part."""


class RankMismatchError(IpcReduceError):
    """The ranks made different calls: call number, shape, dtype, op or order differ."""


class PeerLostError(IpcReduceError):
    """A rank has died, has closed, or missed a resynchronisation. The communicator can only be closed."""


class PeerTimeoutError(IpcReduceError):
    """A rank did not arrive at a call within the communicator's timeout."""


class PeerFailedError(IpcReduceError):
    """Another rank refused this call or raised in it. The message includes that rank's error message."""


class GraphStateError(IpcReduceError):
    """A graph's present state does not allow the operation.

    ``everywhere`` is True if every rank's call raises it, so that no rank has to be told.
    """

    def __init__(self, text: str, *, everywhere: bool = False) -> None:
        super().__init__(text)
        self.everywhere = everywhere


class CaptureError(IpcReduceError):
    """A call cannot take part in a stream capture as it was made.

    ``within`` is True for a call on a stream that is being captured. The other ranks are not told of such an error:
    the abort word that ends their waits would also spoil the work captured here.
    """

    def __init__(self, text: str, *, within: bool = False) -> None:
        super().__init__(text)
        self.within = within


class AddressChangedError(IpcReduceError):
    """The device arrays of a replay differ from the recording's in address or layout. Nothing has been launched.

    ``missing`` and ``added`` are tuples of paths such as ``kwargs["x"].layers[3]``. ``changed`` maps a path to (old,
    new), each (address, shape, dtype name, strides in bytes).
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
    """A CUDA call failed. ``call`` is its name; ``code`` is the CUresult or the runtime's cudaError_t, as an int.

    ``ended`` is True for a call that was ended because of a fault, also of the same call on another rank. The error
    behind that fault is raised in its place.
    """

    ended = False

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed: {text} ({code})")
        self.call = call
        self.code = code
        self._text = text

    def __reduce__(self) -> tuple[type[CudaError], tuple[str, int, str]]:
        return type(self), (self.call, self.code, self._text)


def report(
    rank: int, call: int, happened: str = "", advice: str = "", *, expected: str = "", found: str = ""
) -> str:  # fmt: skip
    """Format a message about a call. ``call`` 0 stands for the communicator's start-up.

    :param happened: a sentence without its full stop, or several; ``advice``: what to do, in whole sentences.
    """
    where = f"rank {rank}, call {call}" if call else f"rank {rank}, start-up"
    return f"{where}: {happened or f'expected {expected}; found {found}'}. {advice}"


def first_line(error: BaseException) -> str:
    """The first line of an error of another library. Those of loaders go on with every place that they have tried."""
    return next(iter(text_of(error).strip().splitlines()), type(error).__name__)
