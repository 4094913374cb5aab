"""The description of an expression, what the ranks compare of it, its source, and the arguments of its kernels."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ipcreduce import ArgumentError, Map, UnsupportedError
from ipcreduce.arrays import maps
from ipcreduce.calls.addresses import MapAddresses
from ipcreduce.calls.request import Member, Request
from ipcreduce.cuda import compiler
from ipcreduce.cuda.expressions import Expression, Operand
from ipcreduce.device import arguments, epilogues
from ipcreduce.page.fingerprint import Fingerprint
from tests.tools import machine, sass
from tests.unit.test_kernel_layout import run_program

ROW = Operand("a", "float32", "row")
NUMBER = Operand("s", "float32", "scalar")


# ---- the description
def test_names_of_operands(subtests: pytest.Subtests):
    for name in ("a", "bias_2", "_x", "V", "host_", "expression", "dtype", "Operand", "reduce", "index"):
        with subtests.test(name=name):
            assert [*Map("v", **{name: 1}).operands] == [name]
    for name in (
        "v",
        "class",
        "int",
        "xor_eq",
        "__a",
        "_A",
        "IPCREDUCE_OP",
        "operand_a",
        "OPERAND",
        "KERNEL",
        "é",
        "a b",
    ):
        with subtests.test(name=name), pytest.raises(ArgumentError, match=re.escape(name)):
            Map("v", **{name: 1})


def test_macros_of_the_kernels_are_no_operands(subtests: pytest.Subtests):
    """A macro in place of an operand's name would make another program of the kernel."""
    text = "".join(path.read_text() for path in (machine.ROOT / "kernels").glob("*.cuh"))
    found = {*re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M)} - {"map_packet", "operands_aligned"}
    assert {"DEVICE", "OPERAND", "MAP_ELEMENT"} <= found
    for name in found:
        with subtests.test(name=name), pytest.raises(ArgumentError):
            Map("v", **{name: 1})


def test_what_is_no_description(subtests: pytest.Subtests):
    for given, options, words in (
        ("", {}, "the expression is"), ("  \n", {}, "the expression is"), (3, {}, "the expression is 3"),
        ("v /* \ud800 */", {}, r"/\* \\ud800 \*/', with a NUL or no UTF-8"),
        ("v \0 + 1", {}, r"'v \\x00 \+ 1', with a NUL"),
        ("v", {"host": 3}, "host is an int"), ("v", {f"x{i}": i for i in range(33)}, "at most 32"),
    ):  # fmt: skip
        with subtests.test(words=words), pytest.raises(ArgumentError, match=words):
            Map(given, **options)  # type: ignore[arg-type]


def test_operands_cannot_change():
    """A call that has begun, and later ones, see the same operands."""
    given = {"a": 1}
    then = Map("v + a", **given)
    given["a"] = 2
    assert then.operands == {"a": 1}
    with pytest.raises(TypeError):
        then.operands["a"] = 3  # type: ignore[index]
    assert repr(then) == "Map('v + a', a)"


def plus(v: Any, a: Any, s: Any) -> Any:
    return v + a * s


def test_copies():
    """A program's module that holds one is copied and pickled with it."""
    one = Map("v + a * s", host=plus, a=np.ones(3), s=2)
    module = SimpleNamespace(then=one)
    for other in (copy.copy(one), copy.deepcopy(module).then, pickle.loads(pickle.dumps(module)).then):
        assert (other.expression, other.host, list(other.operands), other.operands["s"]) == (
            "v + a * s", plus, ["a", "s"], 2
        )  # fmt: skip
        assert (other.operands["a"] == 1).all()
        assert other._values == tuple(other.operands.values())
        assert other._key == one._key
    assert other.operands["a"] is not one.operands["a"]


def test_numbers(subtests: pytest.Subtests):
    """By the dtype of the array: the dtype in the kernel. Those of NumPy keep their own."""
    for value, kind, dtype in (
        (2, "float16", "float32"), (2, "bfloat16", "float32"), (2.5, "float32", "float32"),
        (True, "float64", "float64"),
        (2, "int8", "int64"), (True, "uint64", "int64"), (2.5, "int32", "float64"),
        (np.float16(2), "float64", "float32"), (ml_dtypes.bfloat16(2), "int8", "float32"),
        (np.float64(2), "float32", "float64"), (np.int8(-1), "float32", "int8"), (np.uint64(1 << 63), "int8", "uint64"),
        (np.bool_(True), "float32", "uint8"),
    ):  # fmt: skip
        with subtests.test(value=value, kind=kind):
            found = maps._number("s", value, kind)
            assert (found.dtype.name, found.shape, float(found)) == (dtype, (), float(value))
    for value, kind in ((1 << 63, "int32"), (10**400, "float32")):
        with subtests.test(value=kind), pytest.raises(ArgumentError, match="operand s does not fit into"):
            maps._number("s", value, kind)


def test_shapes(subtests: pytest.Subtests):
    for shape, of, kind in (
        ((2, 3), (2, 3), "full"), ((3,), (2, 3), "row"), ((3,), (3,), "full"), ((), (), "full"), ((0,), (4, 0), "row"),
        ((2,), (2, 3), ""), ((1, 3), (2, 3), ""), ((), (3,), ""), ((3, 2), (2, 3), ""), ((1,), (), ""),
    ):  # fmt: skip
        with subtests.test(shape=shape, of=of):
            if kind:
                assert maps._extent("a", shape, of) == kind
            else:
                with pytest.raises(ArgumentError, match=re.escape(f"operand a has shape {shape}, and array has {of}")):
                    maps._extent("a", shape, of)


# ---- what the ranks compare
def of_map(shape: tuple[int, ...], kind: str, op: str, expression: Expression) -> Fingerprint:
    """The fingerprint of a call with an expression."""
    return Request(op, (Member(shape, kind),), expression).fingerprint


def test_what_the_ranks_compare():
    """Text, names, dtypes and kinds: each alone makes another call. Spaces count, too, as they may be in a literal."""
    expressions = [
        Expression("v + a", (ROW,)), Expression("v  + a", (ROW,)), Expression("v\n+ a", (ROW,)),
        Expression("v + a", (Operand("b", "float32", "row"),)), Expression("v + a", (Operand("a", "float16", "row"),)),
        Expression("v + a", (Operand("a", "float32", "full"),)), Expression("v + a", (ROW, NUMBER)),
        Expression("v + a", (NUMBER, ROW)),
    ]  # fmt: skip
    found = [of_map((3, 4), "float32", "sum", one) for one in expressions]
    assert len({one.crc for one in found}) == len(expressions)
    assert str(found[0]) == "sum of float32 (3, 4), then v + a with a: float32 row"
    same = Expression("v", ())
    assert of_map((3, 4), "float32", "max", same).crc != of_map((3, 4), "float32", "sum", same).crc
    assert of_map((4, 3), "float32", "sum", same).crc != of_map((3, 4), "float32", "sum", same).crc


def host_map(then: Map, array: Any) -> maps.HostMap:
    return maps.HostMap(maps.MapCall(array, "sum", None, then))


def test_the_host_has_the_same_description():
    then = Map("v * s + a", host=lambda v, s, a: v * s + a, s=2, a=np.ones(4, np.float16))
    found = host_map(then, np.ones((3, 4), np.float32)).request.epilogue
    assert found == Expression("v * s + a", (NUMBER, Operand("a", "float16", "row")))
    with pytest.raises(UnsupportedError, match="host="):
        host_map(Map("v"), np.ones(3))
    words = r'dtype is complex64\. Pass array\.view\("float32"\), or tensor\.view\(torch\.float32\)$'
    with pytest.raises(ArgumentError, match=words):
        host_map(Map("v", host=lambda v: v), np.ones(3, np.complex64))
    with pytest.raises(ArgumentError, match=r'array\.view\("uint8"\), .*, with op "max" for "any" and "min"'):
        maps.HostMap(maps.MapCall(np.ones(3, bool), "any", None, then))


def test_the_function_of_the_host():
    """It gets half types as float32; its value is converted once, and must have the shape of v."""
    seen: list[Any] = []

    def function(v: Any, a: Any, s: Any) -> Any:
        seen.append((v.dtype, a.dtype, s))
        return v + a.astype(np.float64) * 2.0**-12

    then = Map("v", host=function, a=np.ones(4, ml_dtypes.bfloat16), s=0.5)
    mapped = host_map(then, np.ones((2, 4), np.float16))
    found = mapped.result([np.ones((2, 4), np.float16)])
    assert found.dtype == np.float16
    assert (found == np.float16(1 + 2.0**-12)).all()
    assert seen == [(np.dtype(np.float32), np.dtype(np.float32), 0.5)]
    with pytest.raises(ArgumentError, match=re.escape("returned shape (4,) for shape (2, 4)")):
        host_map(Map("v", host=lambda v: v[0]), np.ones((2, 4))).result([np.ones((2, 4))])
    for value in ([[1, 2], [3]], ["a"] * 3, {1: 2}, 10**5000):
        with pytest.raises(ArgumentError, match=r"has returned .*\. Let it return an array of the shape of v"):
            host_map(Map("v", host=lambda v, value=value: value), np.ones(3)).result([np.ones(3)])
    kept = np.ones(3)
    assert host_map(Map("v", host=lambda v: kept), np.ones(3)).result([np.ones(3)]) is not kept


# ---- the source
def test_lines_of_messages():
    """NVRTC's form and that of g++, each with the line of the expression; never one beyond its end."""
    expression = Expression("v +\n  missing(a)", (ROW,))
    for log in (
        'one_shot.cu(3): warning: x\nexpression(2): error: identifier "missing" is undefined\n   missing(a)\n   ^\n',
        "x.cu: In function ‘a’:\nexpression:2:3: error: identifier \"missing\" is undefined\n",
        'expression(3): error: identifier "missing" is undefined\n',
    ):  # fmt: skip
        error = expression.error(log)
        assert type(error) is ArgumentError
        assert 'line 2: identifier "missing" is undefined. The expression is v + missing(a) with a: float32' in str(
            error
        )
    for log, words in (
        (
            'expression(2): catastrophic error: cannot open source file "x"\n',
            'compile. line 2: cannot open source file "x"',
        ),
        (
            "expression(3): error: a\ncopy.cu(4): error: b\nAt end of source: error: c\n",
            "compile. line 2: a; b; c. The",
        ),
        ("one_shot.cu(3): warning: x\nsomething else\n\0", "x\nsomething else. The expression is v + missing(a)"),
    ):
        assert words in str(expression.error(log)), log


@pytest.fixture
def nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", str(tmp_path / "cache"))
    compiler._cache.cache_clear()
    yield
    compiler._cache.cache_clear()


@pytest.mark.usefixtures("nvrtc")
def test_expressions_compile(subtests: pytest.Subtests):
    """With operands of every kind, for dtypes of each size, on the oldest architecture and on newer ones."""
    operands = (Operand("a", "bfloat16", "full"), Operand("b", "float64", "row"), Operand("s", "int64", "scalar"))
    for number, (kernel, dtype) in enumerate([
        ("one_shot", "bfloat16"), ("two_shot", "float32"), ("copy", "float64"), ("copy", "int8"), ("one_shot", "int16"),
    ]):  # fmt: skip
        with subtests.test(kernel=kernel, dtype=dtype):
            expression = Expression("fmaxf(v, 0.f) * s\n + a - b", operands)
            given = sass.macros(dtype, n=1 if kernel == "copy" else 3, rank=0)
            cubin = compiler.compile_kernel(kernel, given, [(8, 0), (9, 0), (12, 0)][number % 3], expression)
            assert f".text.{kernel}\0".encode() in cubin


@pytest.mark.usefixtures("nvrtc")
def test_a_wrong_expression_is_named_by_its_lines():
    for text, words in (
        ("v + b", 'line 1: identifier "b" is undefined'), ("v\n+ foo(v)", 'line 2: identifier "foo" is undefined'),
        ("v +", "line 1: expected"), ("v) + (v;", "line 1"), ("v +\n#error no\n1", "line 2: #error directive: no"),
        ("v +\n#include <x.h>\n1", 'line 2: cannot open source file "x.h"'), ("&v", "type"), ("threadIdx", "uint3"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=re.escape(words)):
            compiler.compile_kernel("copy", sass.macros("float32"), (9, 0), Expression(text, (ROW,)))


@pytest.mark.usefixtures("nvrtc")
def test_operands_with_the_names_of_the_compilers_macros():
    names = "linux", "unix", "CUDART_VERSION", "CUDART_CB", "cudaArrayDefault", "warpSize"
    expression = Expression(" + ".join(names), tuple(Operand(name, "float32", "scalar") for name in names))
    assert [*Map(expression.text, **dict.fromkeys(names, 1)).operands] == [*names]
    assert compiler.compile_kernel("copy", sass.macros("float32"), (9, 0), expression)


@pytest.mark.usefixtures("nvrtc")
def test_another_expression_is_another_kernel():
    """In the cache on disk, too: by text, dtype and kind of the operands."""
    expressions = [
        None, Expression("v + a", (ROW,)), Expression("v - a", (ROW,)),
        Expression("v + a", (Operand("a", "int8", "row"),)),
        Expression("v + a", (Operand("a", "float32", "full"),)),
    ]  # fmt: skip
    found = [compiler.compile_kernel("one_shot", sass.macros("float32"), (9, 0), one) for one in expressions]
    assert len({*found}) == len(expressions)
    again = [compiler.compile_kernel("one_shot", sass.macros("float32"), (9, 0), one) for one in expressions]
    assert again == found


# ---- the kernels' arguments
def test_rows_that_kernels_do_not_count():
    """The index of a packet in a row, and of one in a launch beside it, fit into 32 bits together."""
    row, full = Expression("v + a", (ROW,)), Expression("v + a", (Operand("a", "float32", "full"),))
    for columns, expression in (((1 << 32) - 1, row), (1 << 32, full), (1 << 36, full)):
        words = arguments.operand_table((2, columns), (1 << 32) + (1 << 30), expression)
        assert tuple(words[:2]) == (columns, ((1 << 32) + (1 << 30)) % columns)
        assert expression is full or (words[0] // 2 + epilogues._MAP_BYTES // 16 < 1 << 32)
    for columns in (1 << 32, 1 << 36):
        with pytest.raises(ArgumentError, match=f"rows of {columns} elements, and an operand is a row"):
            arguments.operand_table((2, columns), 0, row)


LAYOUT = """
#include <cstddef>
#include <cstdio>
#include <packets.cuh>
int main() {
  std::printf("%zu %zu %zu %zu %zu %zu\\n", offsetof(Args, operands), offsetof(OperandTable, columns),
              offsetof(OperandTable, first), offsetof(OperandTable, operand_a), offsetof(OperandTable, operand_s),
              sizeof(Args));
}
"""


def test_words_of_operands(tmp_path: Path):
    """Each where device/maps.py puts it: arrays go on from launch to launch, rows begin anew."""
    expression = Expression("v * s + a + f", (ROW, NUMBER, Operand("f", "float64", "full")))
    (line,) = run_program(tmp_path, expression.before("program") + LAYOUT, IPCREDUCE_DTYPE="float16")
    at, columns, first, a, s, size = map(int, line.split())
    assert at == 8 * arguments.ARG_WORDS
    assert (columns, first, a, s) == tuple(
        8 * word for word in (arguments._COLUMNS, arguments._FIRST, arguments._OPERANDS, arguments._OPERANDS + 1)
    )
    words = np.concatenate([arguments.empty(0), arguments.operand_table((5, 7), 16, expression)])
    assert words.nbytes == size
    for behind, source in ((False, 1032), (True, 3032)):
        place = arguments.map_setter(words.data, 32, 2, expression, behind=behind)
        place(MapAddresses(1000, 2000, (64, 7, 128), 4000, 3000))
        assert words[:3].tolist() == [source, 2032, 0]
        assert words[arguments.ARG_WORDS :].tolist() == [7, 16 % 7, 64, 7, 128 + 16 * 8]


def test_results_of_the_benchmark():
    """Up to 4 MB a quick expression costs at most 0.3 us, and a second kernel more than the expression."""
    path = machine.ROOT / "benchmarks" / "results" / "maps-h100-x2.json"
    for row in json.loads(path.read_text())["rows"]:
        assert row["mapped"] < row["two"]
        if row["KB"] <= 4096 and "exact" not in row["name"]:
            assert row["mapped"] <= row["plain"] + 0.3
