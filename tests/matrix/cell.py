"""A cell of the matrix: a kind of calls on a backend. What the ways use is here: arrays, results, errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ipcreduce import Communicator, IpcReduceError
from tests.matrix.kind import Kind, Values
from tests.matrix.kinds import KINDS
from tests.shared import clock, reference
from tests.shared.bounds import until

POISON = 7
FORMS = "new", "own", "in place"  # results: new arrays, own ones, or arguments themselves where these can be
REAL_TIMEOUT = 5.0  # seconds, where nobody moves the clock


class Host:
    """NumPy's arrays."""

    @staticmethod
    def new(values: np.ndarray, offset: int = 0) -> Any:
        """An array for such values, which begins ``offset`` elements behind the beginning of its memory."""
        return np.zeros(values.size + offset, values.dtype)[offset:].reshape(values.shape)

    @staticmethod
    def fill(array: Any, values: Any) -> None:
        array[...] = values

    @staticmethod
    def read(array: Any) -> np.ndarray:
        return np.asarray(array)

    @staticmethod
    def current() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Gpu:
    """CuPy's arrays on the GPU of a rank."""

    def __init__(self, rank: int) -> None:
        self.cupy = importlib.import_module("cupy")
        self.device = rank % self.cupy.cuda.runtime.getDeviceCount()
        self.cupy.cuda.Device(self.device).use()

    def new(self, values: np.ndarray, offset: int = 0) -> Any:
        dtype = np.uint8 if values.dtype.name.startswith("float8") else values.dtype
        return self.cupy.zeros(values.size + offset, dtype)[offset:].reshape(values.shape)

    def fill(self, array: Any, values: Any) -> None:
        array[...] = self.cupy.asarray(values) if isinstance(values, np.ndarray) else values

    def read(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(array)

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make that GPU the current one of another thread."""
        return self.cupy.cuda.Device(self.device)


def each(function: Callable[..., Any], *values: Any) -> Any:
    """``function`` of arrays, or of the members of lists of arrays."""
    if isinstance(values[0], list):
        return [function(*members) for members in zip(*values, strict=True)]
    return function(*values)


@functools.cache
def due_in(kind: Kind, turn: int, rank: int) -> Values:
    """The results of a kind in a turn on a rank."""
    return kind.results_of(turn, rank)


def error_of(comm: Communicator, call: Callable[[], Any]) -> IpcReduceError:
    """The error of a call, which it raises itself, or which comes behind it."""

    def error(start: Callable[[], Any]) -> IpcReduceError | None:
        try:
            start()
        except IpcReduceError as found:
            return found.with_traceback(None)
        return None

    found: IpcReduceError = error(call) or until(lambda: error(comm.synchronize), "an error")
    return found


@dataclass
class Cell:
    """A kind on a backend.

    :ivar comm: used by all cells of the backend. :ivar make: makes another communicator.
    :ivar moves: the clock can be moved, which the GPUs' cannot.
    """

    backend: str
    kind: Kind
    comm: Communicator
    make: Callable[..., Communicator]
    place: Any
    world: Any
    moves: bool

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def last(self) -> int:
        return self.comm.size - 1

    def call(self, form: str, number: int = 0, offset: int = 0, *, kind: Kind | None = None) -> Call:
        """A call with arrays of its own, of this kind or of another one."""
        return Call(self.place, self.rank, replace(kind or self.kind, number=number), form, offset)

    def differing(self) -> list[tuple[Kind, str]]:
        """The kind's variants and another kind, with words by which an error describes them."""
        other = KINDS[KINDS.index(type(self.kind)) - 1](size=self.comm.size)
        return [*((replace(self.kind, **change), words) for change, words in self.kind.variants), (other, other.words)]

    def expect(self, kind: type[IpcReduceError], error: IpcReduceError, *words: str) -> None:
        """Check that an error is of this very class, and has these words."""
        text = str(error)
        assert type(error) is kind and all(one in text for one in words), (  # noqa: PT018
            f"rank {self.rank}: {error!r} where {kind.__name__} with {words} was due"
        )

    def time_is_up(self) -> contextlib.AbstractContextManager[None]:
        """In the block a wait of 120 s ends soon."""
        return clock.passing(121.0) if self.moves else contextlib.nullcontext()


class Call:
    """A call of a kind on this rank, with arrays of its own."""

    def __init__(self, place: Any, rank: int, kind: Kind, form: str, offset: int = 0) -> None:
        self.place, self.rank, self.kind = place, rank, kind

        def new(values: np.ndarray) -> Any:
            return place.new(values, offset)

        self.inputs: Values = {name: each(new, values) for name, values in kind.inputs(0, rank).items()}
        self.outs: Values = {}
        for name, values in due_in(kind, 0, rank).items() if form != "new" and kind.has_outs else ():
            itself = kind.in_place.get(name) if form == "in place" else None
            self.outs[name] = self.inputs[itself] if itself in self.inputs else each(new, values)
        if form == "in place":
            kind.overlap(self.inputs, self.outs, rank)
        self.found: Values = {}

    def with_another(self, name: str) -> Call:
        """The same call, with another array in the place of one."""
        other, fresh = copy.copy(self), Call(self.place, self.rank, self.kind, "own")
        other.found = {}
        if name in self.inputs:
            other.inputs = self.inputs | {name: fresh.inputs[name]}
        else:
            other.outs = self.outs | {name: fresh.outs[name]}
        return other

    def fill(self, turn: int) -> None:
        """Give the arguments their values of a turn, and the results others than the right ones."""
        for array in (*self.outs.values(), *self.found.values()):
            each(lambda one: self.place.fill(one, POISON), array)
        for name, values in self.kind.inputs(turn, self.rank).items():
            each(self.place.fill, self.inputs[name], values)

    def start(self, comm: Communicator, stream: Any = None, **change: Any) -> None:
        """Make the call."""
        self.found = self.kind.call(comm, self.inputs | self.outs | change, stream)
        for name, array in self.outs.items():
            assert self.found[name] is array, f"rank {self.rank}: {name} is not what was passed"

    def check(self, turn: int) -> None:
        """Compare all results with those of a turn."""
        for name, array in self.found.items():
            each(
                lambda found, due, name=name: self._check(name, found, due),
                array,
                due_in(self.kind, turn, self.rank)[name],
            )

    def _check(self, name: str, array: Any, due: np.ndarray) -> None:
        found = self.place.read(array)
        if due.dtype.name.startswith("float8"):
            found, due = found.view(np.uint8), due.view(np.uint8)
        assert reference.same(found, due), f"rank {self.rank}: {name} of {self.kind} is {found}, not {due}"

    def make(self, comm: Communicator, turn: int) -> None:
        """Make the call with the values of a turn, and check it."""
        self.fill(turn)
        self.start(comm)
        self.check(turn)

    def is_untouched(self, turn: int) -> bool:
        """True if nothing has been written to results and arguments since :meth:`fill`."""
        found: list[bool] = []
        for array in self.outs.values():
            each(lambda one: found.append((self.place.read(one).astype(np.float64) == POISON).all()), array)
        for name, values in self.kind.inputs(turn, self.rank).items():
            each(lambda one, due: found.append(reference.same(self.place.read(one), due)), self.inputs[name], values)
        return all(found)

    def lacks_data(self) -> bool:
        """True if all that others have part in holds what stands for missing data: NaN, or bytes 0xFF in integers."""
        found: list[bool] = []

        def look(array: Any, due: np.ndarray) -> None:
            values = self.kind.from_others(self.place.read(array).view(due.dtype), self.rank)
            missing = values.view(np.uint8) == 0xFF if due.dtype.kind in "iu" else np.isnan(values.astype(np.float64))
            found.append(missing.all())

        for name, array in self.found.items():
            each(look, array, due_in(self.kind, 0, self.rank)[name])
        return all(found)
