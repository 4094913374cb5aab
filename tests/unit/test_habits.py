"""What programs find that use the names, and the order of arguments, of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ipcreduce
from ipcreduce import Communicator


@pytest.fixture
def comm() -> Communicator:
    """One that no group has made: its attributes are looked up in the same way."""
    return Communicator.__new__(Communicator)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Allreduce", "allreduce(x, op, out=y)"),
        ("all_reduce", "allreduce(x, op, out=y)"),
        ("Allgather", "allgather(x)"),
        ("all_gather_into_tensor", "allgather(x)"),
        ("Reduce_scatter", "reduce_scatter(x, op)"),
        ("reduce_scatter_tensor", "reduce_scatter(x, op)"),
        ("Bcast", "broadcast(x, root)"),
        ("barrier", "allreduce(0), which waits for every rank"),
        ("Get_rank", "rank"),
        ("get_world_size", "size"),
        ("Free", "close()"),
    ],
)
def test_names_of_other_libraries(comm: Communicator, name: str, here: str):
    with pytest.raises(AttributeError) as caught:
        getattr(comm, name)
    assert str(caught.value) == f"'Communicator' object has no attribute {name!r}. Here it is comm.{here}"
    owner = "ipcreduce" if here.startswith("allreduce") else "ipcreduce.get_communicator()"
    with pytest.raises(AttributeError) as caught:
        getattr(ipcreduce, name)
    assert str(caught.value) == f"module 'ipcreduce' has no attribute {name!r}. Here it is {owner}.{here}"
    assert not hasattr(comm, name)


def test_other_names_are_plain_errors(comm: Communicator):
    for owner in (comm, ipcreduce):
        with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
            owner.nonsense  # noqa: B018


@pytest.mark.parametrize("owner", [None, ipcreduce])
def test_the_result_by_position(comm: Communicator, owner: Any):
    x: Any = np.ones(3)
    with pytest.raises(TypeError, match=r"the argument out=: allreduce\(x, op, out=y\)"):
        (owner or comm).allreduce(x, x, "sum")
