"""A table of wrong calls: what each raises on the ranks that make it and on the others, and that all works after.

tests/mpi runs it on NumPy arrays, tests/sim and tests/gpu on device arrays. The array module is handed in, as in
tests/shared/sweep.py.
"""

from __future__ import annotations

import array
import fractions
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import ArgumentError, PeerFailedError, RankMismatchError, UnsupportedError, texts
from tests.shared.capsules import capsule_of
from tests.shared.world import WORLD

Call = Callable[[Any, Any], Any]  # of the array module and the communicator


# ---- right calls
def ours(module: Any, values: Any, dtype: Any = np.float32) -> Any:
    """An array of the module's kind with these values."""
    host = np.array(values, dtype, order="C")
    raw = np.frombuffer(host.tobytes() or b"\0", np.uint8)
    return module.view(module.buffer(raw), 0, host.shape, host.dtype, None)


def strided(module: Any, step: int) -> Any:
    """Six float32 values, ``step`` bytes from one to the next."""
    return module.view(module.buffer(np.zeros(40, np.uint8)), 20, (6,), np.dtype(np.float32), (step,))


def mine(module: Any, comm: Any, shape: Any = 6, dtype: Any = np.float32) -> Any:
    """This rank's array: rank + 1 everywhere."""
    return ours(module, np.full(shape, comm.rank + 1), dtype)


def good(module: Any, comm: Any) -> Any:
    """The call that a wrong one stands for or differs from."""
    return comm.allreduce(mine(module, comm))


def eight_calls(module: Any, comm: Any, extra: int = 0, left_out: int = 0) -> None:
    """Calls on 1 to 8 elements; one of them twice, or not at all."""
    for count in range(1, 9):
        for _ in range(0 if count == left_out else 2 if count == extra else 1):
            comm.allreduce(mine(module, comm, count))


def after_nothing(module: Any, comm: Any, op: str, seconds: float = 0.0) -> None:
    """Two calls on no elements, some time later, and then one on six."""
    time.sleep(seconds)
    comm.allreduce(mine(module, comm, 0))
    comm.allreduce(mine(module, comm, 0))
    comm.allreduce(mine(module, comm), op)


# ---- wrong calls
@dataclass(frozen=True)
class Row:
    """A wrong call, made by all ranks and then by one of them, while the others make a right one."""

    name: str
    call: Call
    words: tuple[str, ...]  # of the message, on the ranks that make the call and on the others
    error: type[Exception] = ArgumentError
    others: type[Exception] = PeerFailedError
    who: tuple[str, ...] = ("all", "one")
    right: Call = good  # what the others call
    on: str = "any"  # "host" or "device": only for arrays of that kind
    placed: bool = True  # the message begins with rank and call
    waits: bool = True  # False: a call on no elements, which waits for nobody; its error comes once all have called


class OnDevice:
    """An array of another library; ``changes`` are made to what it shows."""

    def __init__(self, base: Any = None, **changes: Any) -> None:
        interface = {"shape": (6,), "typestr": "<f4", "data": (0, False), "version": 3, "stream": None}
        self.__cuda_array_interface__ = interface | getattr(base, "__cuda_array_interface__", {}) | changes


class WithUnit(np.ndarray):
    """Whose memory is not its whole value."""

    __array_ufunc__ = None


class HandsOn:
    """The protocols are those of an array that it holds."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np.ones(6), name)


class ByDlpack:
    """Says where it is, and does not give its memory."""

    def __init__(self, device_type: int) -> None:
        self.device_type = device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        if not self.device_type:
            raise RuntimeError("lost its device")
        return self.device_type, 0

    def __dlpack__(self, **_: Any) -> None:
        raise BufferError("not exported today")


class HostTensor:
    """An array of another library on the host, with DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class OldTensor(HostTensor):
    """Its capsules are of a version of DLPack that has no flags."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()


class NoMemory(HostTensor):
    """Six elements at address 0."""

    def __dlpack__(self, **_: Any) -> Any:
        return capsule_of(0, (6,), device=1)


class Unreadable:
    """Raises for every attribute, its class among them: even isinstance() does."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no attribute today")


class Lazy:
    """Raises for attributes that it does not have, as an object that is not loaded yet."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not loaded yet")


class OddInt(int):
    """Its methods raise."""

    def _fails(self, *_: Any) -> Any:
        raise RuntimeError("no number today")

    __index__ = __int__ = __float__ = __ge__ = __le__ = __gt__ = __lt__ = __eq__ = _fails
    __hash__ = int.__hash__


class OddIndex:
    def __index__(self) -> int:
        raise RuntimeError("no number today")


class OddList(list):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no member today")


class OddStream:
    """:param shown: what it has as ``__cuda_stream__``."""

    def __init__(self, shown: Any) -> None:
        self.__cuda_stream__ = shown


def dead() -> Any:
    """A proxy whose object is gone."""
    return weakref.proxy(Convertible())


UNREADABLE: dict[str, tuple[Callable[[], Any], str]] = {  # with what their exceptions say
    "a dead proxy": (dead, "weakly-referenced object no longer exists"),
    "without attributes": (Unreadable, "no attribute today"),
}


class Convertible:
    def __array__(self, *_: Any) -> np.ndarray:
        return np.ones(6, np.float32)


NO_ARRAYS = {
    "None": None,
    "a str": "ones",
    "a dict": {"x": np.ones(2)},
    "bytes": b"1234",
    "a memoryview": memoryview(b"1234"),
    "an array.array": array.array("f", [1.0]),
    "the class of arrays": np.ndarray,
    "a generator": (x for x in [1.0]),
    "an object with __array__": Convertible(),
    "MPI.IN_PLACE": MPI.IN_PLACE,
    "MPI.FLOAT": MPI.FLOAT,
    "a fraction": fractions.Fraction(1, 2),
}
ADVICE = {  # the generic one for the rest
    "None": "A rank that has nothing to add passes zeros",
    "a dict": "Pass a list of its values, in the same order on every rank",
    "bytes": "Pass numpy.frombuffer(it, dtype)",
    "a generator": "Pass numpy.asarray(list(it))",
    "MPI.IN_PLACE": "allreduce(x, out=x)",
    "MPI.FLOAT": "Pass the array alone, which knows its dtype: allreduce(x, out=y)",
    "a fraction": "Pass float(it)",
}
NO_OPS = {
    "of another name": "mode",
    "with a space": "sum ",
    "empty": "",
    "None": None,
    "bytes": b"sum",
    "a number": 0,
}
OPS_OF_OTHER_TYPES = {  # of which only the type is shown
    "a list": (["sum"], "Pass one of these"),
    "a function": (np.add, 'Pass "sum"'),
    "an array and its type": ([np.ones(6), MPI.DOUBLE], "allreduce(x, out=y)"),
    "MPI.IN_PLACE": (MPI.IN_PLACE, "allreduce(x, out=x)"),
}
NO_HOST_DTYPES = [">c8", "O", "f4,i4", "M8[s]", "m8[s]", ">f4", ">i8", "g", "S4", "U1", "V2", ml_dtypes.float8_e4m3fn]


def bad_arrays() -> Iterator[Row]:
    for name, thing in NO_ARRAYS.items():
        words = (
            "array is a ",
            "has neither __dlpack__",
            type(thing).__qualname__,
            ADVICE.get(name, "Pass numpy.asarray(it)"),
        )
        yield Row(f"array: {name}", lambda m, c, thing=thing: c.allreduce(thing), words)
    for sms in (0, -1, True, 2.0, "8", None.__class__, 1 << 31, 10**5000):
        yield Row(
            f"sms: {texts.shown(sms)}", lambda m, c, sms=sms: c.allreduce(mine(m, c), sms=sms), "Pass how many blocks"
        )
    words = ("ByDlpack, lies on DLPack device type 10", "Move it to")
    yield Row("array: on another maker's GPU", lambda m, c: c.allreduce(ByDlpack(10)), words)
    words = ("array, a ByDlpack, does not give its memory: not exported today",)
    yield Row("array: no export from the host", lambda m, c: c.allreduce(ByDlpack(1)), words)
    words = ("an int of 64 bits does not fit into int64",)
    yield Row("array: a large int", lambda m, c: c.allreduce(1 << 63), words)
    words = ("dtype <U1 cannot be reduced. The dtypes are ",)
    yield Row("array: a NumPy str", lambda m, c: c.allreduce(np.str_("1")), words)
    words = ("ByDlpack, does not give its memory: lost its device. Pass an array that does",)
    yield Row("array: raises", lambda m, c: c.allreduce(ByDlpack(0)), words)
    yield Row("out: raises", lambda m, c: c.allreduce(mine(m, c), out=ByDlpack(0)), words)
    odd = {
        **UNREADABLE,
        "not loaded": (Lazy, "not loaded yet"),
        "an odd list": (lambda: OddList([1]), "no member today"),
    }
    for name, (make, text) in odd.items():
        yield Row(f"array: {name}", lambda m, c, make=make: c.allreduce(make()), ("array", text))
        yield Row(f"out: {name}", lambda m, c, make=make: c.allreduce(mine(m, c), out=make()), ("out", text))
    yield Row("array: an odd int", lambda m, c: c.allreduce(OddInt(1)), ("array is a OddInt", "no number today"))
    for name, (make, text) in (UNREADABLE | {"an odd int": (lambda: OddInt(1), "no number today")}).items():
        words = (f"sms is {texts.kind_of(make())}, which cannot be read (", text)
        yield Row(f"sms: {name}", lambda m, c, make=make: c.allreduce(mine(m, c), sms=make()), words)
    words = ("array is a masked array",)
    yield Row("array: masked", lambda m, c: c.allreduce(np.ma.masked_less([1.0, 2.0], 2)), words, on="host")
    words = ("WithUnit, whose __array_ufunc__ is not ndarray's",)
    yield Row("array: with a unit", lambda m, c: c.allreduce(np.ones(6).view(WithUnit)), words, on="host")
    words = ("HandsOn, which hands on the protocols of an array that it holds",)
    yield Row("array: handed on", lambda m, c: c.allreduce(HandsOn()), words)
    words = ("device arrays need backend",)
    yield Row("array: needs a GPU", lambda m, c: c.allreduce(OnDevice()), words, UnsupportedError, on="host")
    yield Row(
        "array: masked on the device", lambda m, c: c.allreduce(OnDevice(mask=1)), ("array has a mask",), on="device"
    )
    words = ("does not give its memory: its elements have address 0, where nothing lies. Pass the array that holds",)
    for on, kind in (("host", lambda: NoMemory(np.zeros(6))), ("device", OnDevice)):
        yield Row("array: without memory", lambda m, c, kind=kind: c.allreduce(kind()), words, on=on)
        yield Row("out: without memory", lambda m, c, kind=kind: c.allreduce(mine(m, c), out=kind()), words, on=on)
    yield Row("array: no export", lambda m, c: c.allreduce(ByDlpack(2)), ("not exported today",), on="device")


def three(module: Any, comm: Any) -> list[Any]:
    """A list of arrays."""
    return [mine(module, comm, count) for count in (6, 3, 1)]


def bad_lists() -> Iterator[Row]:
    """Lists of arrays: what is wrong is named by its index."""

    def lists(name: str, make: Call, *words: str, on: str = "any") -> Row:
        return Row(f"list: {name}", lambda m, c: c.allreduce(make(m, c)), words, on=on)

    for name, (make, text) in UNREADABLE.items():
        yield lists(f"with {name}", lambda m, c, make=make: [mine(m, c), make()], "member 1 of the list: array, ", text)
    words = ("out is a OddList, which cannot be read (RuntimeError: no member today)",)
    yield Row("list: out an odd list", lambda m, c: c.allreduce(three(m, c), out=OddList(three(m, c))), words)
    alone, whole = "Pass the array alone, which knows its dtype", "If the list stands for one array, pass numpy.array("
    for name, thing, words in (
        ("a number", 1.0, ("it is a float, and no array. Pass numpy.array(it)",)),
        ("a NumPy number", np.float32(1), ("it is a float32, and no array. Pass numpy.array(it)",)),
        ("None", None, ("it is None, as the gradient of an unused parameter is. Leave it out on every rank",)),
        ("a list", [np.ones(2)], ("it is a list, and no array. Pass all arrays in one list",)),
        ("MPI's type", MPI.FLOAT, ("array is a mpi4py.MPI.Datatype, which has neither", alone)),
        ("a letter", "f", ("it is a str, and no array.", alone)),
        ("an object", object(), ("array is a builtins.object, which has neither", "Pass numpy.asarray(it)")),
    ):
        words = ("member 2 of the list: ", *words)
        yield lists(f"with {name}", lambda m, c, thing=thing: [*three(m, c)[:2], thing, mine(m, c)], *words)
    yield lists("of numbers", lambda m, c: [1.0, 2.0], "member 0 of the list: it is a float, and no array. " + whole)
    yield lists(
        "of rows", lambda m, c: [[1.0, 2.0], [3.0]], "member 0 of the list: it is a list, and no array. " + whole
    )
    yield lists(
        "with a count and a type", lambda m, c: [mine(m, c), 6, MPI.FLOAT], "member 1 of the list: it is an int", alone
    )
    words = (
        "member 0 of the list lies on the GPU, but member 3 on the host. Make a call for those on the GPU, and one",
    )
    yield lists("of both kinds", lambda m, c: [*three(m, c), np.ones(2)], *words, on="device")
    yield lists(
        "with a dtype", lambda m, c: [mine(m, c), np.ones(2, "M8[s]")], "member 1 of the list: dtype ", on="host"
    )
    for op, words in (("mode", ("there is no op 'mode'",)), ("any", ("member 0 of the list: ", "takes bool"))):
        yield Row(f"list: op {op}", lambda m, c, op=op: c.allreduce(three(m, c), op), words)
    for name, out, words in (
        ("an array", lambda m, a: a[0], ("a list of 3 arrays, but out is a", "Pass a list of 3 arrays as out")),
        ("shorter", lambda m, a: a[:2], ("of 3 arrays, but out is a list of 2. Pass an output for each",)),
        ("longer", lambda m, a: (*a, a[0]), ("array is a list of 3 arrays, but out is a list of 4.",)),
        ("in another order", lambda m, a: a[::-1], ("member 0 of the list: out has shape (1,)",)),
        ("a number", lambda m, a: [*a[:2], 1.0], ("member 2 of the list: ", "but out is a float")),
        ("None", lambda m, a: [a[0], None, a[2]], ("member 1 of the list: out is None",)),
        ("one twice", lambda m, a: [a[0], *[ours(m, [0] * 3)] * 2], ("member 2 of the list: out has shape (3,)",)),
    ):  # fmt: skip
        words = tuple(words)
        yield Row(f"list: out {name}", lambda m, c, out=out: c.allreduce(a := three(m, c), out=out(m, a)), words)
    of_list = "of the list shares memory with the"
    words = (f"the output of member 0 {of_list} output of member 2",)
    yield Row("list: one array twice, in place", twice, words)
    words = (
        "the output of member ",
        f" {of_list} array of member ",
        "Pass outputs that share no memory with anything but",
    )
    yield Row("list: an output over an input", crossed, words)


def twice(module: Any, comm: Any) -> Any:
    """Its result would depend on who writes first."""
    array = mine(module, comm)
    arrays = [array, mine(module, comm), array]
    return comm.allreduce(arrays, out=arrays)


def crossed(module: Any, comm: Any) -> Any:
    """Two arrays of which each is to have the sum of the other."""
    arrays = [mine(module, comm), mine(module, comm)]
    return comm.allreduce(arrays, out=arrays[::-1])


def bad_dtypes() -> Iterator[Row]:
    for dtype in NO_HOST_DTYPES:
        name = str(np.dtype(dtype))
        yield Row(
            f"dtype {name}",
            lambda m, c, dtype=dtype: c.allreduce(ours(m, np.zeros(6, dtype), dtype)),
            (f"dtype {name} cannot be reduced. The dtypes are float16, bfloat16,", "Convert"),
            on="host",
        )


def bad_ops() -> Iterator[Row]:
    for name, op in NO_OPS.items():
        words = (f"there is no op {op!r}. The ops are sum, prod, min, max, avg, mean, product, any, all, and", "Pass ")
        yield Row(f"op: {name}", lambda m, c, op=op: c.allreduce(mine(m, c), op), words)
    for name, (op, advice) in OPS_OF_OTHER_TYPES.items():
        words = (f"there is no op {type(op).__qualname__}. ", advice)
        yield Row(f"op: {name}", lambda m, c, op=op: c.allreduce(mine(m, c), op), words)
    words = ("The array for the result is the argument out=: allreduce(x, out=y)", "there is no op ")
    yield Row("op: an array", lambda m, c: c.allreduce(mine(m, c, (60, 60)), mine(m, c, (60, 60))), words)
    for op in ("any", "all", MPI.LOR, MPI.LAND):
        for dtype in ("f4", "u1", "F"):
            words = (f"takes bool, and the array's dtype is {np.dtype(dtype)}. Pass array != 0",)
            name = f"op: {op!r:.14} of {dtype}"
            yield Row(name, lambda m, c, dtype=dtype, op=op: c.allreduce(mine(m, c, 6, dtype), op), words)
    for name in ("LXOR", "BXOR", "MAXLOC"):
        op, words = getattr(MPI, name), (f"there is no op MPI.{name}. ", "Pass one of these")
        yield Row(f"op: MPI.{name}", lambda m, c, op=op: c.allreduce(mine(m, c), op), words)
    for dtype, ops, lacks, advice in (
        ("?", ("sum", "prod", "avg", MPI.SUM), "bool has no", 'Pass "any" or "all"; to count, pass ints'),
        ("F", ("min", "max"), "complex64 has no", "Reduce array.real and array.imag"),
        ("D", ("min", MPI.MAX), "complex128 has no", "Reduce array.real and array.imag"),
        ("F", ("prod",), "complex64 has no", "numpy.exp of the sum of numpy.log"),
        ("D", (MPI.PROD,), "complex128 has no", "numpy.exp of the sum of numpy.log"),
    ):
        words = (f"dtype {lacks}", advice)
        for op in ops:
            name = f"op: {op!r:.14} of {lacks.split()[0]}"
            yield Row(name, lambda m, c, dtype=dtype, op=op: c.allreduce(mine(m, c, 6, dtype), op), words)
    for name, (make, text) in (UNREADABLE | {"an odd list": (lambda: OddList([1]), "no member today")}).items():
        words = (f"op is {texts.kind_of(make())}, which cannot be read (", text)
        yield Row(f"op: {name}", lambda m, c, make=make: c.allreduce(mine(m, c), make()), words)
    # Calls that wait for nobody let a rank be behind when another refuses a later call.
    ahead, behind = (lambda m, c: after_nothing(m, c, "mode")), (lambda m, c: after_nothing(m, c, "sum", 0.05))
    yield Row("op: after calls on nothing", ahead, ("there is no op",), right=behind)


def bad_outs() -> Iterator[Row]:
    def out(name: str, make: Call, *words: str, on: str = "any") -> Row:
        return Row(f"out {name}", lambda m, c: c.allreduce(mine(m, c), out=make(m, c)), ("out", *words), on=on)

    yield out("a list", lambda m, c: [0.0] * 6, "list")
    yield out("a bool", lambda m, c: True, "bool")
    yield out("a tuple, as of ufuncs", lambda m, c: (mine(m, c),), "tuple", "Pass the array alone")
    yield out("MPI.IN_PLACE", lambda m, c: MPI.IN_PLACE, "InPlaceType", "allreduce(x, out=x)")
    yield out("an array and its type", lambda m, c: [mine(m, c), MPI.FLOAT], "list", "Pass the array alone")
    for shape in (5, 7, (6, 1), (1, 6), (2, 3), (), 0, (6, 6)):
        found = f"out has shape {np.empty(shape).shape} and"
        yield out(f"of shape {shape}", lambda m, c, s=shape: mine(m, c, s), "array has shape (6,)", found)
    for dtype in (np.int32, np.uint32, np.float64, np.float16):
        found = f"out has shape (6,) and dtype {dtype.__name__},"
        yield out(f"of {dtype.__name__}", lambda m, c, dtype=dtype: mine(m, c, 6, dtype), "dtype float32", found)
    yield out("big-endian", lambda m, c: np.zeros(6, ">f4"), "out has shape (6,) and dtype >f4,", on="host")
    yield out(
        "read-only",
        lambda m, c: np.frombuffer(bytes(24), "f4"),
        "cannot be written: this array is read-only",
        on="host",
    )
    yield out("broadcast", lambda m, c: np.broadcast_to(np.float32(0), 6), "cannot be written", on="host")
    yield out("masked", lambda m, c: np.ma.zeros(6, np.float32), "is a masked array", on="host")
    yield out("on the device", lambda m, c: OnDevice(), "array lies on the host, but out is a OnDevice", on="host")
    yield out("a number", lambda m, c: 0.0, "out is a float", on="any")
    words = ("which cannot go into out, an ndarray", "numpy.asarray(it)")
    yield Row("out for a number", lambda m, c: c.allreduce(1.0, out=np.zeros(())), words)
    yield out(
        "on the host", lambda m, c: np.zeros(6, np.float32), "array lies on the GPU, but out is an ndarray", on="device"
    )
    yield out("a host tensor", lambda m, c: HostTensor(np.zeros(6, "f4")), "but out is a HostTensor", on="device")
    yield out(
        "a read-only tensor", lambda m, c: HostTensor(np.frombuffer(bytes(24), "f4")), "cannot be written", on="host"
    )
    yield out(
        "an old tensor", lambda m, c: OldTensor(np.zeros(6, "f4")), "cannot be written", "by DLPack 1.0", on="host"
    )
    yield out("a tensor of another dtype", lambda m, c: HostTensor(np.zeros(6)), "dtype float64,", on="host")
    yield out("read-only on the device", lambda m, c: read_only(mine(m, c)), "cannot be written", on="device")
    for step in (0, 2, -3):
        words = ("elements of out share memory", f"its strides are ({step},)")
        yield out(f"with stride {step}", lambda m, c, s=step: strided(m, s), *words)
    yield Row(
        "out with stride 0, in place",
        lambda m, c: c.allreduce(array := strided(m, 0), out=array),
        ("elements of out share memory",),
    )
    yield Row(
        "out read-only, in place",
        lambda m, c: c.allreduce(array := read_only(mine(m, c)), out=array),
        ("out cannot be written",),
        on="device",
    )


def bad_streams() -> Iterator[Row]:
    for stream in (-1, "0", 1.5, True, np.float32(0), [0], object()):
        words = (f"stream is {texts.kind_of(stream)}, which is no stream",)
        yield Row(f"stream {stream!r:.20}", lambda m, c, s=stream: c.allreduce(mine(m, c), stream=s), words)
    for shown in ((0, -1), (0, 1 << 64)):
        words = ("stream is a OddStream, which is no stream",)
        yield Row(f"stream {shown}", lambda m, c, s=shown: c.allreduce(mine(m, c), stream=OddStream(s)), words)
    for name, (make, text) in {
        **UNREADABLE, "not loaded": (Lazy, "not loaded yet"), "an odd int": (lambda: OddInt(1), "no number today"),
        "a str for a handle": (lambda: OddStream((0, "x")), "invalid literal for int()"),
        "no pair": (lambda: OddStream(0), "is not subscriptable"),
    }.items():  # fmt: skip
        words = (f"stream is {texts.kind_of(make())}, which cannot be read (", text)
        yield Row(f"stream: {name}", lambda m, c, make=make: c.allreduce(mine(m, c), stream=make()), words)


def differences() -> Iterator[Row]:
    """Calls that are right by themselves, but not those of the other ranks."""

    def differs(name: str, call: Call, *words: str, right: Call = good, waits: bool = True) -> Row:
        error = RankMismatchError
        return Row(f"{name} on one rank", call, words, error, error, ("one",), right, waits=waits)

    theirs = "sum of float32 (6,)"
    for shape in (5, 7, (2, 3), (6, 1), (1, 6), (), 0, (0, 6), 40000):
        found = np.empty(shape).shape
        what = f"sum of float32 {found}"
        yield differs(what, lambda m, c, s=shape: c.allreduce(mine(m, c, s)), theirs, what, waits=0 not in found)
    for dtype, count in ((np.int32, 6), (np.uint32, 6), (np.float64, 3), (np.float16, 12), (np.float64, 6)):
        what = f"sum of {dtype.__name__} ({count},)"
        yield differs(what, lambda m, c, d=dtype, n=count: c.allreduce(mine(m, c, n, d)), theirs, what)
    for one, other, op in (("?", "u1", "max"), ("F", "f4", "sum"), ("D", "F", "avg"), ("D", "f8", "avg")):
        names = tuple(f"{op} of {np.dtype(dtype).name} (6,)" for dtype in (one, other))
        first, second = (
            lambda m, c, dtype=dtype, op=op: c.allreduce(mine(m, c, 6, dtype), op) for dtype in (one, other)
        )
        yield differs(" for ".join(names), first, *names, right=second)
    for op in ("max", "avg", "mean"):
        what = f"{'avg' if op == 'mean' else op} of float32 (6,)"
        yield differs(what, lambda m, c, op=op: c.allreduce(mine(m, c), op), theirs, what)
    more, less = (lambda m, c: eight_calls(m, c, extra=7)), (lambda m, c: eight_calls(m, c, left_out=3))
    yield differs("one call more", more, "float32 (7,)", "float32 (8,)", right=eight_calls)
    yield differs("one call less", less, "float32 (3,)", "float32 (4,)", right=eight_calls)


def bad_communicators() -> Iterator[Row]:
    """Made by all ranks: no other rank hears of a call on no communicator."""
    for name, call, word in (
        ("a closed communicator", use_closed, "the communicator is closed: make a new one"),
        (
            "MPI's communicator",
            lambda m, c: ipcreduce.allreduce(mine(m, c), comm=MPI.COMM_WORLD),
            "comm is a Intracomm",
        ),
        ("the rank", lambda m, c: ipcreduce.allreduce(mine(m, c), comm=c.rank + 1), "comm is an int"),
    ):
        yield Row(name, call, (word,), who=("all",), placed=False)
    for name, (make, text) in UNREADABLE.items():
        for what, call in (
            ("comm", lambda m, c, make=make: ipcreduce.Graph(make())),
            ("dtype", lambda m, c, make=make: c.empty(3, make())),
            ("shape", lambda m, c, make=make: c.empty((3, make()))),
            ("timeout", lambda m, c, make=make: c.suspend(timeout=make())),
        ):
            asks_the_type = what == "shape" and make is Unreadable  # and not the object
            said = "cannot be interpreted as an integer" if asks_the_type else text
            yield Row(f"{what}: {name}", call, (what, said), who=("all",), placed=False)
        call = lambda m, c, make=make: ipcreduce.allreduce(mine(m, c), comm=make())  # noqa: E731
        yield Row(f"comm of a call: {name}", call, ("comm is ", "which is no ipcreduce"), who=("all",), placed=False)


def rows() -> list[Row]:
    """The table."""
    groups = (bad_arrays, bad_lists, bad_dtypes, bad_ops, bad_outs, bad_streams, differences, bad_communicators)
    return [row for group in groups for row in group()]


def read_only(array: Any) -> OnDevice:
    """A device array whose owner forbids writing."""
    return OnDevice(array, data=(array.__cuda_array_interface__["data"][0], True))


def use_closed(module: Any, comm: Any) -> None:
    closed = ipcreduce.Communicator()
    good(module, closed)
    closed.close()
    closed.close()
    good(module, closed)


# ---- making them
def run(module: Any, comm: Any, table: Iterable[Row] | None = None) -> int:
    """Makes every wrong call of a table that this kind of array can make; collective over ``MPI.COMM_WORLD``.

    :param table: None for the one above.
    :returns: how many rows were run. :raises AssertionError: at the first that does not end as the table says.
    """
    host = isinstance(module.buffer(np.zeros(1, np.uint8)), np.ndarray)
    right_after(module, comm, "the first")
    count = 0
    for number, row in enumerate(rows() if table is None else table):
        if row.on == ("device" if host else "host"):
            continue
        for who in row.who:
            one = number % comm.size
            if who == "all" or comm.size > 1:
                check(module, comm, row, None if who == "all" else one)
            right_after(module, comm, f"{row.name!r}, made by {who}")
        count += 1
    return count


def check(module: Any, comm: Any, row: Row, one: int | None) -> None:
    """Rank ``one``, or every rank, makes the wrong call; the others the right one. All must get their errors."""
    is_wrong = one in (None, comm.rank)
    call = row.call if is_wrong else row.right
    expected, words = row.error, list(row.words)
    if not is_wrong:
        expected = row.others
        words.append(f"rank {one}")
    where = f"{row.name!r}, made by {'all ranks' if one is None else f'rank {one}'}: rank {comm.rank}"
    error = outcome(module, comm, call, row.waits)
    assert type(error) is expected, f"{where} got {error!r}, not {expected.__name__}"
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{where}: {missing} are not in {str(error)!r}"
    assert "\n" not in str(error), where
    if row.placed or not is_wrong:
        assert re.match(rf"rank {comm.rank}, call \d+: ", str(error)), f"{where}: no place in {str(error)!r}"


def outcome(module: Any, comm: Any, call: Call, waits: bool) -> Exception | None:
    """What a call ends in, if it is an error."""
    try:
        try:
            call(module, comm)
        finally:
            if not waits:
                WORLD.Barrier()
        comm.synchronize()  # calls on the device return before they are done
    except Exception as error:
        return error
    return None


def right_after(module: Any, comm: Any, what: str) -> None:
    """The communicator works, on every rank."""
    try:
        found = good(module, comm)
        comm.synchronize()
    except Exception as error:
        raise AssertionError(f"rank {comm.rank}: after {what} a right call fails") from error
    total = comm.size * (comm.size + 1) // 2
    assert module.read(found).tolist() == [total] * 6, f"rank {comm.rank}: after {what} a right call gives {found}"


CONSTRUCTOR: list[tuple[dict[str, Any], str]] = [
    ({"timeout": 0}, "timeout is 0, which is no positive number of seconds"),
    ({"timeout": -1.0}, "which is no positive number of seconds"),
    ({"timeout": float("nan")}, "which is no positive number of seconds"),
    ({"timeout": float("inf")}, "which is no positive number of seconds"),
    ({"timeout": "30"}, "timeout is '30', which is no positive number of seconds"),
    ({"timeout": None}, "which is no positive number of seconds"),
    ({"timeout": True}, "which is no positive number of seconds"),
    ({"algorithm": "three_shot"}, "which is unknown. Pass one_shot, two_shot, bulk, direct or None"),
    ({"algorithm": "ONE_SHOT"}, "which is unknown. Pass one_shot, two_shot, bulk, direct or None"),
    ({"algorithm": ""}, "which is unknown. Pass one_shot, two_shot, bulk, direct or None"),
    ({"algorithm": 1}, "which is unknown. Pass one_shot, two_shot, bulk, direct or None"),
    ({"algorithm": ["one_shot"]}, "which is unknown. Pass one_shot, two_shot, bulk, direct or None"),
    *(
        ({"device": device}, "which names no GPU. Pass the ordinal of a visible GPU, from 0, or 'auto'")
        for device in (-1, "cpu:0", "AUTO", 0.0, True, [0])
    ),
    ({"backend": "gloo"}, "backend is 'gloo', which is unknown. Choose ipc, nccl, host, or none for the best"),
    ({"backend": "mpi"}, "backend is 'mpi', which is unknown. Choose host, as the backend of NumPy arrays is called"),
    ({"timeout": np.ones(6)}, "timeout is ndarray, which is no positive number of seconds"),
    (
        {"group": MPI.COMM_NULL},
        "group is MPI.COMM_NULL, which Split() and Create() give to ranks that are not in the new group. Make the",
    ),
    ({"group": MPI.Intercomm(MPI.COMM_NULL)}, "group is MPI.COMM_NULL"),
    *(
        ({"group": group}, "Pass an mpi4py intracommunicator, a torch.distributed process group, or an object")
        for group in (MPI.INFO_NULL, MPI, 0, "world", [0, 1], np.ones((30, 30)))
    ),
]
DEVICE_CONSTRUCTOR: list[tuple[dict[str, Any], str]] = [
    ({"device": 99}, "GPUs that this process sees"),
]


def run_constructors(*, device: bool) -> int:
    """Makes every wrong communicator, on all ranks. :returns: how many. :raises AssertionError: as :func:`run`."""
    table = CONSTRUCTOR + (DEVICE_CONSTRUCTOR if device else [])
    for arguments, words in table:
        try:
            comm = ipcreduce.Communicator(**arguments)
        except ArgumentError as error:
            found = str(error)
        else:
            raise AssertionError(f"Communicator({arguments}) is taken: {comm.describe()}")
        assert words in found, f"Communicator({arguments}): {words!r} is not in {found!r}"
    if MPI.COMM_WORLD.size > 1:  # wrong on one rank only: no other goes on without it
        last = MPI.COMM_WORLD.size - 1
        for name, value in [("timeout", 0), ("algorithm", "best")] + ([("device", 99)] if device else []):
            here = MPI.COMM_WORLD.rank == last
            try:
                comm = ipcreduce.Communicator(**{name: value} if here else {})
            except ArgumentError as error:
                found = str(error)
            else:
                raise AssertionError(f"taken, though the last rank's {name} is wrong: {comm.describe()}")
            where = f"rank {MPI.COMM_WORLD.rank}, start-up: " + ("" if here else f"rank {last}'s ")
            assert found.startswith(f"{where}{name} "), found
    return len(table)
