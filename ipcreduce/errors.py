"""The errors that ipcreduce raises deliberately. All derive from :class:`IpcReduceError`.

A message about a call begins with the rank and the number of the call, which counts from 1 on each communicator. Then
it says what happened, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import count
from typing import Any

from .texts import kind_of, printable, text_of

Location = tuple[int, tuple[int, ...], str, tuple[int, ...]]  # address, shape, dtype's name, strides in bytes
new_origin = count(1).__next__  # gives each sequence of calls its number; an id may be that of a dead one
PUBLISHED = False  # True once a package index has this package. Until then pip installs it from a clone


def installing(extra: str) -> str:
    """The command that installs this package with an extra."""
    return f"pip install 'ipcreduce[{extra}]'" if PUBLISHED else f"pip install '.[{extra}]' in a clone of ipcreduce"


INSTALL = f"{installing('cuda13')}, or [cuda12]"  # the remedy if a library for GPUs is missing


class Reach(Enum):
    """The ranks that an error of a call reaches: from this the call sequence knows whether its peers must be told."""

    OWN = "only this rank raises it: the peers are told, and raise PeerFailedError"
    ALL = "every rank raises it, or the fault behind it, without being told"
    CAPTURED = "a call on a stream that is being captured: the peers are not told, as that would end the captured work"
    ENDED = "another fault ended this call, perhaps of the same call on another rank: that one is raised instead"


class IpcReduceError(RuntimeError):
    """Base class of ipcreduce's errors."""

    reach = Reach.OWN
    located = False  # locate() has been called
    origin = 0  # the number of the sequence of calls that has raised it first; 0 for none

    def __init__(self, *args: object, reach: Reach | None = None) -> None:
        super().__init__(*(printable(one) if isinstance(one, str) else one for one in args))
        if reach is not None:
            self.reach = reach

    def __reduce__(self) -> tuple[object, ...]:
        return _copy, (type(self), self.args, vars(self))

    def reach_in(self, origin: int) -> Reach:
        """The ranks that it reaches in the sequence of calls of this number, which raises it.

        A call can run code of the program, which can raise an error of another communicator: its peers are others.
        """
        self.origin = self.origin or origin
        return self.reach if self.origin == origin else Reach.OWN

    def again(self, origin: int) -> IpcReduceError:
        """The same error, for a further call in the sequence of this number."""
        error = type(self)(str(self))
        error.origin = origin
        return error

    def locate(self, rank: int, call: int) -> None:
        """Let the message begin with rank and call. Idempotent. Errors that reach all ranks are made with them."""
        if not self.located and self.reach is not Reach.ALL:
            self.located, self.args = True, (f"{_where(rank, call)}: {text_of(self)}",)


class ArgumentError(IpcReduceError, ValueError):
    """An argument of a call is wrong: type, dtype, shape, device, op or stream; or the communicator is closed."""


@contextmanager
def naming_member(index: int | None) -> Iterator[None]:
    """Add to an :class:`ArgumentError` that the block raises which member of a list it is about; None for no list."""
    try:
        yield
    except ArgumentError as error:
        if index is None:
            raise
        raise ArgumentError(f"member {index} of the list: {text_of(error)}") from error


class reading:
    """A context manager in which an argument's own methods run: an exception of theirs becomes :class:`ArgumentError`.

    Even ``isinstance()`` may raise one, as for a ``weakref.proxy`` whose object is gone.

    :param expected: exceptions that pass unchanged, since the caller handles them.
    """

    __slots__ = ("_name", "_passing", "_value")

    def __init__(self, name: str, value: Any, *expected: type[Exception]) -> None:
        self._name, self._value, self._passing = name, value, (IpcReduceError, MemoryError, *expected)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._passing):
            raise unreadable(self._name, self._value, error) from error


def unreadable(name: str, value: Any, error: Exception) -> ArgumentError:
    """The error for an argument called ``name``, a method of which has raised ``error``."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    return ArgumentError(
        f"{name} is {kind_of(value)}, which cannot be read ({reason}). Pass an object whose methods raise nothing"
    )


class UnsupportedError(IpcReduceError):
    """This machine, driver or installation does not support the request. The message names the missing part."""


class RankMismatchError(IpcReduceError):
    """The ranks' calls differ in number, shape, dtype, op or order; or, at start-up, the ranks' code differs."""

    reach = Reach.ALL


class PeerLostError(IpcReduceError):
    """A rank has died, has closed, or missed a resynchronisation. The communicator can only be closed."""

    reach = Reach.ALL


class PeerTimeoutError(IpcReduceError):
    """A rank did not arrive at a call within the communicator's timeout."""

    reach = Reach.ALL


class PeerFailedError(IpcReduceError):
    """Another rank refused this call or raised in it. The message includes that rank's error message."""

    reach = Reach.ALL


class GraphStateError(IpcReduceError):
    """A graph's present state does not allow the operation."""


class CaptureError(IpcReduceError):
    """A call cannot take part in a stream capture as it was made."""


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


class CudaError(IpcReduceError):
    """A CUDA call failed. ``call`` is its name; ``code`` is the CUresult or the runtime's cudaError_t, as an int."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed: {text} ({code})")
        self.call, self.code = call, code


def _copy(kind: type[IpcReduceError], args: tuple[object, ...], state: dict[str, object]) -> IpcReduceError:
    """An error as it was when it was pickled."""
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


def report(rank: int, call: int, happened: str, advice: str) -> str:
    """Format a message about a call. ``call`` 0 stands for the communicator's start-up.

    :param happened: a sentence without its full stop, or several; ``advice``: what to do, in whole sentences.
    """
    return f"{_where(rank, call)}: {happened}. {advice}"


def _where(rank: int, call: int) -> str:
    return f"rank {rank}, call {call}" if call else f"rank {rank}, start-up"


def first_line(error: BaseException) -> str:
    """The first line of an error of another library. Those of loaders go on with every place that they have tried."""
    return next(iter(text_of(error).strip().splitlines()), type(error).__name__)
