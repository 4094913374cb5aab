"""The arguments of an all-reduce with RMSNorm, checked: the same checks for arrays on the host and on the GPU.

The error messages here name neither rank nor call: the communicator adds both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from ctypes import c_float
from typing import Any, NamedTuple

import numpy as np

from ..calls.request import GROUP, ITEMSIZES, NormShape
from ..dtypes import DTYPES, FLOAT8
from ..errors import ArgumentError, reading
from ..texts import kind_of, shown
from . import lists, views
from .operands import check_own_elements, check_writable

_IN_PLACE = {"out": "x", "residual_out": "residual"}  # an output, and the input that it may be
OUTPUTS = "out", "residual_out", "quant_out", "scales_out"
_BYTES = FLOAT8, np.dtype(np.uint8)


class FP8:
    """A quantisation to e4m3, numbers of 8 bits: by a given scale, or by scales of the results' own values.

    It cannot be changed. It can be copied and pickled, with its scale.

    :param scale: an array of one float32, which lies where the other arrays do: q = y / scale.
    :param per: "token" for a scale for each row, or 128 for one for each 128 elements of a row.
    :param column_major: the scales for each 128 elements lie by columns in memory, as DeepGEMM takes them. Each column
        begins at a multiple of 16 bytes.
    :raises ArgumentError: unless just one of ``scale`` and ``per`` is given, and is one of these.
    """

    __slots__ = "_column_major", "_per", "_scale"

    def __init__(self, scale: Any = None, per: Any = None, column_major: bool = False) -> None:
        if (scale is None) == (per is None):
            raise ArgumentError('FP8 takes either a scale or per. Pass FP8(scale=array), FP8(per="token") or per=128')
        if per is not None and not (per == "token" if isinstance(per, str) else type(per) is int and per == GROUP):
            raise ArgumentError(f'FP8 has no scales per {shown(per)}. Pass per="token" or per={GROUP}')
        if issubclass(type(scale), (str, list, tuple, *views.NUMBERS)):
            raise ArgumentError(
                f"the scale of FP8 is {kind_of(scale)}, and no array. Pass an array of one float32, on the "
                "GPU if the other arrays are"
            )
        if not isinstance(column_major, bool):
            raise ArgumentError(f"column_major is {shown(column_major)}. Pass True or False")
        if column_major and per != GROUP:
            raise ArgumentError(f"only scales per {GROUP} elements can be column-major. Leave column_major= away")
        self._scale, self._per, self._column_major = scale, per, column_major

    @property
    def scale(self) -> Any:
        """The given scale, or None."""
        return self._scale

    @property
    def per(self) -> Any:
        """The elements that share a scale: "token" or 128; None with a given one."""
        return self._per

    @property
    def column_major(self) -> bool:
        """True if the scales lie by columns in memory."""
        return self._column_major

    def __repr__(self) -> str:
        if self._per is None:
            return f"FP8(scale={shown(self._scale)})"
        return f"FP8(per={self._per!r}{', column_major=True' * self._column_major})"


_SCALES = {None: "given", "token": "token", GROUP: "group"}  # by FP8.per, the words of NormShape


class NormCall(NamedTuple):
    """The arguments of ``allreduce_rmsnorm``, as the program gave them."""

    x: Any
    weight: Any
    eps: Any
    residual: Any
    out: Any
    residual_out: Any
    weight_bias: Any
    quantize: Any
    quant_out: Any
    scales_out: Any

    @property
    def scale(self) -> Any:
        """The given scale, or None."""
        return None if self.quantize is None else self.quantize.scale

    def arrays(self) -> dict[str, Any]:
        """The arrays among them by name: x and weight, those that are given, and the given scale."""
        given = {"x": self.x, "weight": self.weight}
        for name, array in (
            ("residual", self.residual), ("out", self.out), ("residual_out", self.residual_out),
            ("quant_out", self.quant_out), ("scales_out", self.scales_out), ("scale", self.scale),
        ):  # fmt: skip
            if array is not None:
                given[name] = array
        return given

    @property
    def first(self) -> Any:
        """The array whose library decides the current stream."""
        return self.x

    def on_device(self) -> bool:
        """True if all arrays lie on a GPU, False if all lie on the host. :func:`on_device` has the errors."""
        return on_device(self)

    def check_streams(self) -> None:
        """Check that the arrays' libraries have one current stream. :raises ArgumentError: if not."""
        lists.check_streams([*self.arrays().values()], "the arguments are")


def on_device(given: NormCall) -> bool:
    """True if all arrays lie on a GPU, False if all lie on the host.

    :raises ArgumentError: if an argument is no array, or if some lie on a GPU and some on the host; or if ``quantize``
        is not a :class:`FP8`, or is missing although there are outputs for it.
    """
    if given.quantize is not None and not issubclass(type(given.quantize), FP8):
        raise ArgumentError(
            f"quantize is {shown(given.quantize)}. Pass an ipcreduce.FP8, or leave quantize= away for no quantisation"
        )
    for name in ("quant_out", "scales_out"):
        if getattr(given, name) is not None and given.quantize is None:
            raise ArgumentError(f"{name} is given, but quantize is not. Pass quantize=, or leave {name}= away")
    if given.scales_out is not None and given.scale is not None:
        raise ArgumentError("scales_out is given beside a given scale, which is returned. Leave scales_out= away")
    places: dict[str, bool] = {}
    for name, array in given.arrays().items():
        if issubclass(type(array), views.NUMBERS):
            raise ArgumentError(f"{name} is {kind_of(array)}, and no array. Pass an array")
        places[name] = views.is_device(array, name)
        if places[name] != places["x"]:
            here, there = ("on the GPU", "on the host") if places["x"] else ("on the host", "on the GPU")
            raise ArgumentError(f"x lies {here}, but {name} {there}. Pass arrays that all lie {here}")
    return places["x"]


def shape_of(given: NormCall, x: Any) -> NormShape:
    """The part of a call that the ranks compare, from the arguments and the array ``x``, of CuPy or NumPy.

    :raises ArgumentError: if x cannot be normalised, or a number is wrong.
    """
    name = DTYPES.get(x.dtype)
    if name not in ITEMSIZES:
        raise ArgumentError(
            f"x has dtype {x.dtype}, which cannot be normalised. The dtypes are {', '.join(ITEMSIZES)}. Convert x: "
            "x.astype(numpy.float32)"
        )
    if x.ndim == 0:
        raise ArgumentError("x has no dimensions, and so no rows. Pass an array of shape (..., hidden)")
    hidden = x.shape[-1]
    if hidden == 0:
        raise ArgumentError(f"x has shape {x.shape}: a row without elements has no mean. Pass rows of 1 or more")
    scales = "" if given.quantize is None else _SCALES[given.quantize.per]
    if scales == "group" and hidden % GROUP:
        raise ArgumentError(
            f'x has rows of {hidden} elements, no multiple of {GROUP}. Pass FP8(per="token"), or a scale'
        )
    return NormShape(
        rows=math.prod(x.shape[:-1]),
        hidden=hidden,
        dtype=name,
        eps=_number(given.eps, "eps", least=0.0),
        weight_bias=_number(given.weight_bias, "weight_bias"),
        residual=given.residual is not None,
        scales=scales,
        column_major=scales == "group" and given.quantize.column_major,
        keeps_y=not scales or given.out is not None,
    )


def _number(value: Any, name: str, least: float = -math.inf) -> float:
    """The number, rounded to float32. -0 becomes 0, since Python takes the two for equal when it looks up a call."""
    if type(value) is bool or not issubclass(type(value), (int, float, np.floating, np.integer)):
        raise ArgumentError(f"{name} is {kind_of(value)}. Pass a number: float(it)")
    if type(value) is float:
        rounded = c_float(value).value  # a tenth of the time that NumPy takes with its warnings off
    else:
        try:
            with reading(name, value, OverflowError), np.errstate(all="ignore"):
                rounded = float(np.float32(value))
        except OverflowError:  # an int that is not a float64 either
            rounded = math.inf
    if not math.isfinite(rounded) or rounded < least:
        wanted = "a finite float32" + (", 0 or more" if least == 0 else "")
        raise ArgumentError(f"{name} is {shown(value) if isinstance(value, int) else value}. Pass {wanted}")
    return rounded + 0.0


def scales_shape(shape: NormShape, of: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of an array of shape ``of``."""
    return (*of[:-1], 1 if shape.scales == "token" else shape.hidden // GROUP)


def check(shape: NormShape, arrays: Mapping[str, Any]) -> None:
    """Check the arrays of a call, of CuPy or of NumPy, by name: shapes, dtypes, and what they share.

    :raises ArgumentError: if one does not fit x, or if outputs share memory that they may not share.
    """
    x = arrays["x"]
    float32 = np.dtype(np.float32)
    wanted: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = dict.fromkeys(
        ("residual", "out", "residual_out"), (x.shape, (x.dtype,))
    )
    wanted |= {"weight": ((shape.hidden,), (x.dtype,)), "quant_out": (x.shape, _BYTES)}
    if shape.scales and shape.scales != "given":
        wanted["scales_out"] = scales_shape(shape, x.shape), (float32,)
    for name, array in arrays.items():
        if name == "scale":
            if array.size != 1 or array.dtype != float32:
                raise ArgumentError(
                    f"the scale of FP8 has shape {array.shape} and dtype {array.dtype}. Pass an array of one float32"
                )
        elif name != "x":
            form, dtypes = wanted[name]
            if array.shape != form or array.dtype not in dtypes:
                raise ArgumentError(
                    f"{name} has shape {array.shape} and dtype {array.dtype}, but x has shape {x.shape} and dtype "
                    f"{x.dtype}. Pass {name} with shape {form} and dtype {dtypes[0]}"
                )
    _check_apart(arrays)


def check_outputs(given: NormCall, arrays: Mapping[str, Any]) -> None:
    """Check that the outputs can be written. :raises ArgumentError: if one is read-only, or repeats its elements."""
    for name in OUTPUTS:
        if name in arrays:
            argument = getattr(given, name)
            on_gpu = not isinstance(arrays[name], np.ndarray)  # a view there does not say what its library allows
            check_writable(argument if on_gpu else arrays[name], argument, name)
            check_own_elements(arrays[name], name)


def _check_apart(arrays: Mapping[str, Any]) -> None:
    outputs = [name for name in OUTPUTS if name in arrays]
    for output in outputs:
        for name, array in arrays.items():
            if name == output or (name in outputs and outputs.index(name) < outputs.index(output)):
                continue
            written = arrays[output]
            if not views.share_memory(written, array):
                continue
            if _IN_PLACE.get(output) != name:
                raise ArgumentError(
                    f"{output} shares memory with {name}. Pass outputs that share memory with no other argument: only "
                    "out may be x itself, and residual_out the residual itself"
                )
            if not views.same_elements(written, array):
                raise ArgumentError(
                    f"{output} shares a part of the memory of {name}. Pass {name} itself as {output}, or memory apart"
                )
