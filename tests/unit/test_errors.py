"""The types of the errors, and the one form of their messages."""

from __future__ import annotations

import pickle

import pytest

import ipcreduce
from ipcreduce import errors

TYPES = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}


def test_every_error_is_public_and_has_one_base():
    for name, kind in TYPES.items():
        assert getattr(ipcreduce, name) is kind
        assert name in ipcreduce.__all__
        assert issubclass(kind, ipcreduce.IpcReduceError)
        assert kind.__doc__
    assert issubclass(ipcreduce.IpcReduceError, RuntimeError)


def test_only_wrong_arguments_are_value_errors():
    assert [name for name, kind in TYPES.items() if issubclass(kind, ValueError)] == ["ArgumentError"]


@pytest.mark.parametrize("name", sorted(TYPES.keys() - {"CudaError", "IpcReduceError"}))
def test_a_handler_of_one_catches_no_other(name: str):
    others = [kind for other, kind in TYPES.items() if other not in (name, "IpcReduceError")]
    assert not any(issubclass(TYPES[name], other) for other in others)


def test_a_cuda_error_says_which_call_and_code():
    error = ipcreduce.CudaError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY, out of memory")
    assert (error.call, error.code) == ("cuMemAlloc", 2)
    assert str(error) == "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY, out of memory (2)"


def test_changed_addresses_keep_their_paths():
    old, new = (0x1000, (2,), "float32", (4,)), (0x2000, (2,), "float32", (4,))
    error = ipcreduce.AddressChangedError("moved", ["a", "b"], ["c"], {"d": (old, new)})
    copy = pickle.loads(pickle.dumps(error))
    for one in (error, copy):
        assert (one.missing, one.added, one.changed) == (("a", "b"), ("c",), {"d": (old, new)})


@pytest.mark.parametrize("name", sorted(TYPES))
def test_errors_pass_between_processes(name: str):
    """Through multiprocessing and concurrent.futures, which pickle them."""
    error = TYPES[name]("cuInit", 3, "no") if name == "CudaError" else TYPES[name]("what went wrong")
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert (vars(copy), copy.reach) == (vars(error), error.reach)
        error.locate(0, 7)
        error.reach = errors.Reach.CAPTURED


def test_report_has_one_form():
    assert errors.report(3, 17, "a rank is late", "Do so.") == "rank 3, call 17: a rank is late. Do so."
    assert errors.report(0, 0, "a rank is late", "Do so.") == "rank 0, start-up: a rank is late. Do so."


def test_every_message_can_be_encoded():
    """Also with the name of a file that is no UTF-8."""
    for error in (
        errors.ArgumentError("/data/\udcff"),
        errors.AddressChangedError("\udcff"),
        errors.CudaError("\udcff", 1, "\udcff"),
    ):
        assert "\\udcff" in str(error)
        str(error).encode()
