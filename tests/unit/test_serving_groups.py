"""vLLM's groups with the all-reduce of ipcreduce, in stand-ins of vLLM's classes."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from ipcreduce import serving
from ipcreduce.serving import groups

done: list[Any] = []


class Reducer:
    def __init__(self, group: Any, device: Any) -> None:
        done.append(("made", group, device))

    def close(self) -> None:
        done.append("closed")


@pytest.fixture(autouse=True)
def _reducer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("ipcreduce.serving.all_reduce")
    vars(module)["ServingAllReduce"] = Reducer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.delitem(sys.modules, "ipcreduce.serving.methods", raising=False)
    monkeypatch.setattr(serving, "methods", None, raising=False)  # the import sets it; it is undone afterwards
    monkeypatch.setenv("IPCREDUCE_BATCH_INVARIANT", "1")
    monkeypatch.setattr(groups, "_wrapped", set())
    done.clear()


def communicator() -> type:
    """vLLM's, which makes an all-reduce of its own if it is told to; the groups have theirs."""

    class Communicator:
        def __init__(self, cpu_group: str, device: int, unique_name: str, world_size: int = 2, own: Any = None) -> None:
            self.cpu_group, self.device, self.unique_name = cpu_group, device, unique_name
            self.world_size, self.ca_comm = world_size, own

    class Group:
        def __init__(self, communicator: Any) -> None:
            self.device_communicator = communicator

    for _ in range(2):
        groups.serve(Group, Communicator)
    Communicator.group = Group  # type: ignore[attr-defined]
    return Communicator


@pytest.mark.parametrize("own", [None, "theirs", "ours"])
def test_a_group_closes_our_all_reduce_before_it_ends(own: str | None):
    class Group:
        def __init__(self, reducer: Any) -> None:
            self.device_communicator = types.SimpleNamespace(ca_comm=reducer)

        def destroy(self) -> None:
            done.append("ended")

    for _ in range(2):  # vLLM loads plug-ins again in every process
        groups.close_with(Group)
    Group(Reducer("gloo", 1) if own == "ours" else own).destroy()
    assert [one for one in done if isinstance(one, str)] == ["closed"] * (own == "ours") + ["ended"]
    bare = Group(None)
    del bare.device_communicator
    bare.destroy()
    assert Group.destroy.__name__ == "destroy"


def test_a_tensor_parallel_group_gets_our_all_reduce_where_it_has_none():
    kind = communicator()
    made = kind("gloo", 3, unique_name="tp:0")
    assert isinstance(made.ca_comm, Reducer)
    assert done == [("made", "gloo", 3)]


def test_other_groups_do_not():
    kind = communicator()
    others = [
        kind("gloo", 3, unique_name="pp:0"),
        kind("gloo", 3, unique_name="tp:0", world_size=1),
        kind("gloo", 3, unique_name="tp:0", own="theirs"),
    ]
    assert [one.ca_comm for one in others] == [None, None, "theirs"]
    assert done == []
    assert all(type(one) is kind and type(kind.group(one)) is kind.group for one in others)  # type: ignore[attr-defined]
    assert type(kind.group(None)) is kind.group  # type: ignore[attr-defined]  # of one rank


def test_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPCREDUCE_BATCH_INVARIANT", "0")
    assert communicator()("gloo", 3, unique_name="tp:0").ca_comm is None


def test_an_object_with_our_all_reduce_has_our_methods():
    """And stays what it was: of a class with the old name, and one class for all such objects."""
    kind = communicator()
    one, other = (kind("gloo", 3, unique_name="tp:0", own=Reducer("gloo", 3)) for _ in range(2))
    assert type(one) is type(other)
    assert isinstance(one, kind)
    assert type(one).__name__ == kind.__name__
    group = kind.group(one)  # type: ignore[attr-defined]
    assert group.ca_comm is one.ca_comm
    before = type(one)
    groups.take(one, before.__mro__[1])
    assert type(one) is before
