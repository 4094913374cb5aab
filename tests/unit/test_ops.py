"""Names of kinds and ops: what may be written, and what is said of the rest."""

from __future__ import annotations

import enum
import subprocess
import sys
import typing
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from ipcreduce import dtypes, types
from ipcreduce.dtypes import DTYPES, KIND_NAMES, OPS, VIEWS
from ipcreduce.errors import ArgumentError
from tests.tools import machine


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_its_own_name(op: str):
    assert dtypes.op_name(op) is OPS[OPS.index(op)]
    assert type(dtypes.op_name(np.str_(op))) is str, "canonical: it is compared between ranks"


def test_other_names_of_ops():
    assert dtypes.op_name("mean") == "avg"
    assert dtypes.op_name("product") == "prod"
    names = {op: dtypes.op_name(getattr(MPI, op)) for op in ("SUM", "PROD", "MIN", "MAX")}
    assert names == {"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max"}


@pytest.mark.parametrize(("op", "name"), [("any", "max"), ("all", "min"), (MPI.LOR, "max"), (MPI.LAND, "min")])
def test_ops_of_truth_values(op: Any, name: str):
    """Of other dtypes min and max are numbers, and not truth values."""
    assert dtypes.op_name(op, np.dtype(bool)) == dtypes.op_name(op) == name
    for dtype in ("u1", "f4", "F"):
        with pytest.raises(
            ArgumentError, match=rf"takes bool, and the array's dtype is {np.dtype(dtype)}\. Pass array"
        ):
            dtypes.op_name(op, np.dtype(dtype))


class Member(enum.Enum):  # as a member of pybind11's enum
    SUM, PRODUCT, MIN, MAX, AVG, BAND = range(6)


class ReduceOp:
    """As torch.distributed's: its members are of another type, and an instance equals the member it is made of."""

    RedOpType = Member
    SUM, PRODUCT, MIN, MAX, AVG, BAND = Member

    def __init__(self, member: Member, factor: float = 1.0) -> None:
        self.member, self.factor = member, factor

    def __eq__(self, other: object) -> bool:
        return self.factor == 1.0 and other is self.member

    __hash__ = None  # type: ignore[assignment]


def test_ops_of_pytorch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(ReduceOp=ReduceOp))  # type: ignore[arg-type]
    for given in (lambda one: one, ReduceOp):
        names = [dtypes.op_name(given(member)) for member in Member if member is not Member.BAND]
        assert names == ["sum", "prod", "min", "max", "avg"]
    for wrong, found in (
        (Member.BAND, "no op ReduceOp.BAND| Pass one of these"),
        (ReduceOp(Member.BAND), "no op ReduceOp.BAND| Pass one of these"),
        (ReduceOp(Member.SUM, 2.0), "no op like this op of ReduceOp, which the program has made| Pass one of these"),
    ):
        with pytest.raises(ArgumentError) as caught:
            dtypes.op_name(wrong)
        start, end = found.split("| ")
        assert f"there is {start}. " in str(caught.value)
        assert str(caught.value).endswith(end)
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace())  # type: ignore[arg-type]
    assert dtypes.op_name(MPI.SUM) == "sum", "a PyTorch that was built without"


def test_names_of_ops_in_any_case():
    assert [dtypes.op_name(name) for name in ("SUM", "Mean", "PRODUCT")] == ["sum", "avg", "prod"]


def test_type_checkers_know_the_same_names():
    names = typing.get_args(types.OpName)
    assert {dtypes.op_name(name) for name in names} == set(OPS)
    with pytest.raises(ArgumentError) as caught:
        dtypes.op_name(None)
    due = f"there is no op None. The ops are {', '.join(names)}, and such ops of MPI and torch.distributed. Pass one of"
    assert due in str(caught.value)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("sun", "no op 'sun'| Pass one of these"),
        (" mean", "no op ' mean'| Pass \"mean\""),
        (b"sum", "no op b'sum'| Pass one of these"),
        (["sum"], "no op list| Pass one of these"),
        (np.add, 'no op ufunc| Pass "sum"'),
        (max, 'no op builtin_function_or_method| Pass "max"'),
        (np.zeros((30, 30)), "no op ndarray| The array for the result is the argument out=: allreduce(x, out=y)"),
        ([np.zeros(3), MPI.DOUBLE], "no op list| The array for the result is the argument out=: allreduce(x, out=y)"),
        (MPI.IN_PLACE, "no op InPlaceType| In place is out=x, with the array itself: allreduce(x, out=x)"),
        ("x" * 999, "no op 'xxxxxxxxxxxx...xxxxxxxxxxxxx'| Pass one of these"),
        pytest.param(10**5000, "no op int| Pass one of these", id="a very long one"),
        (SimpleNamespace(name="SUM"), 'Pass "sum"'),  # as torch.distributed's ReduceOp.SUM
        (MPI.LXOR, "no op MPI.LXOR| Pass one of these"),
        (MPI.OP_NULL, "no op MPI.OP_NULL| Pass one of these"),
    ],
)
def test_what_is_no_op(op: Any, words: str):
    with pytest.raises(ArgumentError) as caught:
        dtypes.op_name(op)
    start, _, end = words.rpartition("| ")
    assert start in str(caught.value)
    assert str(caught.value).endswith(end)


def test_no_text_is_made_of_an_op():
    """It may be long, and that of a device array waits for the GPU."""

    class OnDevice:
        def __dlpack__(self) -> None: ...

        def __repr__(self) -> str:
            raise AssertionError("read from the GPU")

    with pytest.raises(ArgumentError, match=r"no op .*OnDevice\. .*The array for the result is the argument out="):
        dtypes.op_name(OnDevice())


def test_an_op_of_the_programs_own():
    op = MPI.Op.Create(lambda *_: None)
    with pytest.raises(ArgumentError, match="no op like this op of MPI, which the program has made"):
        dtypes.op_name(op)
    op.Free()


def test_names_need_no_mpi():
    """MPI is not imported to look at an op, as that would start it."""
    program = (
        "import sys\nfrom ipcreduce import dtypes\nprint(dtypes.op_name('mean'))\n"
        "try: dtypes.op_name(7)\nexcept ValueError as error: print(error)\nprint('mpi4py.MPI' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], env=machine.environment(), stdout=subprocess.PIPE, text=True)
    lines = run.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("avg", "False")
    assert "no op 7" in lines[1]


def test_ops():
    for dtype, name in DTYPES.items():
        assert all(dtypes.kind_name(dtype, op) == name for op in OPS)
        assert dtypes.reduced_as(name) == name
    for name, (view, ops) in VIEWS.items():
        dtype = np.dtype(name)
        assert dtype.itemsize % np.dtype(view).itemsize == 0
        assert dtypes.reduced_as(name) == view
        for op in OPS:
            if op in ops:
                assert dtypes.kind_name(dtype, op) == name
            else:
                with pytest.raises(ArgumentError, match=rf"dtype {name} has no {op}, but {' and '.join(ops)}\. \w+"):
                    dtypes.kind_name(dtype, op)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (">f4", 'array.astype("float32")'),
        (">i8", 'array.astype("int64")'),
        (">c8", 'array.astype("complex64")'),
        ("g", 'array.astype("float64")'),
        ("G", 'array.astype("complex128")'),
        ("O", "Pass rows of different lengths as a list of arrays"),
        ("U1", 'array.astype("float32")'),
        ("M8[s]", 'array.view("int64")'),
        ("V2", 'array.astype("float32")'),
        ("f4,i4", "for each field: array[name]"),
        (ml_dtypes.float8_e4m3fn, "to float16 or bfloat16"),
        (ml_dtypes.float8_e5m2, "to float16 or bfloat16"),
        (ml_dtypes.int4, "to int8"),
        (ml_dtypes.uint4, "to uint8"),
    ],
)
def test_what_is_no_kind(dtype: Any, advice: str):
    with pytest.raises(ArgumentError) as caught:
        dtypes.kind_name(np.dtype(dtype), "sum")
    text = str(caught.value)
    assert f"dtype {np.dtype(dtype)} cannot be reduced. The dtypes are {', '.join(KIND_NAMES)}. Convert" in text
    assert advice in text
