"""Names of kinds and ops: what may be written, and what is said of the rest."""

from __future__ import annotations

import subprocess
import sys
import typing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ipcreduce import annotations, kinds
from ipcreduce.errors import ArgumentError
from ipcreduce.numerics import DTYPES, KIND_NAMES, OPS, VIEWS
from tests.tools import machine


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_its_own_name(op: str):
    assert kinds.op_name(op) is OPS[OPS.index(op)]
    assert type(kinds.op_name(np.str_(op))) is str, "canonical: it is compared between ranks"


def test_other_names_of_ops():
    assert kinds.op_name("mean") == "avg"
    names = {op: kinds.op_name(getattr(MPI, op)) for op in ("SUM", "PROD", "MIN", "MAX")}
    assert names == {"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max"}


def test_type_checkers_know_the_same_names():
    names = typing.get_args(annotations.OpName)
    assert {kinds.op_name(name) for name in names} == set(OPS)
    with pytest.raises(ArgumentError) as caught:
        kinds.op_name(None)
    assert f"op must be one of {', '.join(names)}, or MPI's SUM, PROD, MIN, MAX; found None." in str(caught.value)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("sun", "found 'sun'. Pass one of these"),
        (" mean", "found ' mean'. Pass \"mean\""),
        ("SUM", "found 'SUM'. Pass \"sum\""),
        (b"sum", "found b'sum'. Pass one of these"),
        (["sum"], "found ['sum']. Pass one of these"),
        (SimpleNamespace(name="SUM"), 'Pass "sum"'),  # as torch.distributed's ReduceOp.SUM
        (MPI.LAND, "found MPI.LAND. Pass one of these"),
        (MPI.OP_NULL, "found MPI.OP_NULL. Pass one of these"),
    ],
)
def test_what_is_no_op(op: Any, words: str):
    with pytest.raises(ArgumentError) as caught:
        kinds.op_name(op)
    assert str(caught.value).endswith(words)


def test_an_op_of_the_programs_own():
    op = MPI.Op.Create(lambda *_: None)
    with pytest.raises(ArgumentError, match=r"found an MPI\.Op of the program's own"):
        kinds.op_name(op)
    op.Free()


def test_names_need_no_mpi():
    """MPI is not imported to look at an op, as that would start it."""
    program = (
        "import sys\nfrom ipcreduce import kinds\nprint(kinds.op_name('mean'))\n"
        "try: kinds.op_name(7)\nexcept ValueError as error: print(error)\nprint('mpi4py.MPI' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], env=machine.environment(), stdout=subprocess.PIPE, text=True)
    lines = run.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("avg", "False")
    assert "found 7" in lines[1]


def test_kinds():
    for dtype, name in DTYPES.items():
        assert all(kinds.kind_name(dtype, op) == name for op in OPS)
        assert kinds.reduced_as(name) == name
    for name, (view, ops) in VIEWS.items():
        dtype = np.dtype(name)
        assert dtype.itemsize % np.dtype(view).itemsize == 0
        assert kinds.reduced_as(name) == view
        for op in OPS:
            if op in ops:
                assert kinds.kind_name(dtype, op) == name
            else:
                with pytest.raises(ArgumentError, match=rf"op must be {' or '.join(ops)} for {name}; found {op}\. \w+"):
                    kinds.kind_name(dtype, op)


@pytest.mark.parametrize("dtype", [">f4", ">c8", "g", "G", "O", "U1", "M8[s]", "V2", "f4,i4"])
def test_what_is_no_kind(dtype: str):
    with pytest.raises(ArgumentError) as caught:
        kinds.kind_name(np.dtype(dtype), "sum")
    text = str(caught.value)
    assert f"dtype must be one of {', '.join(KIND_NAMES)}; found {np.dtype(dtype)}. Convert" in text
