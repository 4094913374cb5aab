"""Calls with a user's expression: their launches, and the kernel that applies an expression to a reduced array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..calls.fingerprint import Fingerprint, of_map
from ..cuda import compiler, driver
from ..cuda.contexts import using_relaxed
from ..cuda.expressions import Expression
from ..dtypes import DTYPES, kind_name, op_name
from ..errors import ArgumentError
from ..types import Stream
from .known_calls import Prepared, keep

ARGUMENT_WORDS = 24  # of struct Args before the table of operands (packets.cuh)
_IN, _OUT, _BYTES = 0, 1, 2  # words of struct Args
_COLUMNS, _FIRST, _OPERANDS = 0, 1, 2  # words of struct OperandTable (map.cuh)
_MOST = 1024  # prepared calls
_LAUNCH_BYTES = 1 << 30  # the most of one launch: kernels count bytes in 32 bits
_TOO_LONG = 1 << 32  # elements of a row, whose packets are counted in 32 bits, beside those of a launch
_BLOCK, _BLOCKS = 256, 1056  # threads of a block, and the most blocks, which take further packets in turns
_PACKET_BYTES = 16
_ITEMSIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


def table(array: Any, offset: int, expression: Expression) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The words of struct OperandTable for the launch that begins at byte ``offset`` of ``array``.

    :raises ArgumentError: if a row is longer than kernels count.
    """
    words = np.zeros(_OPERANDS + len(expression.operands), np.uint64)
    columns = max(1, array.shape[-1] if array.shape else 1)
    if columns >= _TOO_LONG and any(one.kind == "row" for one in expression.operands):
        raise ArgumentError(
            f"array has rows of {columns} elements, and an operand is a row. On a GPU a row then has up to "
            f"{_TOO_LONG - 1} elements. Pass an operand of the shape of array"
        )
    words[_COLUMNS], words[_FIRST] = columns, offset // array.itemsize % columns
    return words


class MapLaunch:
    """One launch with an expression. :meth:`set` sets the addresses and the numbers in its arguments.

    :param args: the words of struct Args, with its table.
    :param offset: of the launch in the message, in bytes.
    """

    def __init__(
        self, launch: driver.Launch, args: np.ndarray[Any, Any], offset: int, itemsize: int, expression: Expression
    ) -> None:  # fmt: skip
        self.launch, self._words, self._offset = launch, args.data, offset
        self._steps = [
            offset // itemsize * _ITEMSIZES[one.dtype] if one.kind == "full" else 0 for one in expression.operands
        ]

    def set(self, source: int, target: int, operands: Sequence[int]) -> None:
        """Set the arguments. ``operands``: addresses of arrays, and bits of numbers."""
        words, at = self._words, ARGUMENT_WORDS + _OPERANDS
        words[_IN], words[_OUT] = source + self._offset, target + self._offset
        for index, (word, step) in enumerate(zip(operands, self._steps, strict=True), at):
            words[index] = word + step


@dataclass(frozen=True, kw_only=True)
class PreparedMap:
    """All that a backend knows of an all-reduce with an expression before addresses and numbers are given.

    :ivar first: the all-reduce that comes before, for which the launches apply the expression; None if they are all.
    """

    what: Fingerprint
    by: str
    nbytes: int
    first: Prepared | None
    launches: tuple[MapLaunch, ...]

    def run(self, source: int, target: int, operands: Sequence[int], stream: Stream) -> None:
        """Put the launches on ``stream``. See :meth:`MapLaunch.set`."""
        for one in self.launches:
            one.set(source, target, operands)
            one.launch.run(stream)


class MapKernels:
    """The kernels of one backend that apply an expression to an array, without an exchange.

    :param before_loading: waits for the calls in flight, since loading waits for the device.
    """

    def __init__(self, context: int, capability: tuple[int, int], before_loading: Callable[[], object]) -> None:
        self._context, self._capability, self._before_loading = context, capability, before_loading
        self._loaded: dict[tuple[str, Expression], tuple[int, int]] = {}  # module and function
        self._prepared: dict[tuple[Any, ...], PreparedMap] = {}

    def prepare(self, array: Any, op: Any, expression: Expression, first: Prepared | None) -> PreparedMap:
        """The call on an array. :param first: see :class:`PreparedMap`. :raises ArgumentError: see compile_kernel()."""
        name = op_name(op, array.dtype)
        key = array.shape, array.dtype, name, expression
        found = self._prepared.get(key)
        if found is None:
            kind = kind_name(array.dtype, name)
            function = self._function(kind, expression)
            launches = [self._launch(function, array, at, expression) for at in range(0, array.nbytes, _LAUNCH_BYTES)]
            by = "map" if first is None else f"{first.by}, map"
            what = of_map(array.shape, kind, name, str(expression), expression.text)
            found = PreparedMap(what=what, by=by, nbytes=array.nbytes, first=first, launches=tuple(launches))
            keep(self._prepared, key, found, _MOST)
        return found

    def _launch(self, function: int, array: Any, offset: int, expression: Expression) -> MapLaunch:
        args = np.concatenate([np.zeros(ARGUMENT_WORDS, np.uint64), table(array, offset, expression)])
        args[_BYTES] = nbytes = min(_LAUNCH_BYTES, array.nbytes - offset)
        grid = min(_BLOCKS, -(-nbytes // (_PACKET_BYTES * _BLOCK)))
        launch = driver.Launch(function, grid, _BLOCK, args, programmatic=self._capability >= (9, 0))
        return MapLaunch(launch, args, offset, array.itemsize, expression)

    def _function(self, dtype: str, expression: Expression) -> int:
        found = self._loaded.get((dtype, expression))
        if found is None:
            macros = {"RANKS": "1", "RANK": "0", "DTYPE": dtype, "OP": "sum", "DEPTH": "1", "WHOLE_PACKETS": "1"}
            given = {f"IPCREDUCE_{name}": value for name, value in macros.items()}
            cubin = compiler.compile_kernel("map", given, self._capability, expression)
            self._before_loading()
            with using_relaxed(self._context):
                module = driver.load_module(cubin)
                try:
                    found = module, driver.get_function(module, "map")
                except BaseException:
                    driver.close_module(module)
                    raise
            self._loaded[dtype, expression] = found
        return found[1]

    def close_actions(self) -> list[Callable[[], None]]:
        """Actions that unload the kernels."""
        loaded, self._loaded, self._prepared = self._loaded, {}, {}
        return [partial(driver.close_module, module) for module, _ in loaded.values()]
