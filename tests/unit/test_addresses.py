"""Device arrays are found in every kind of container, and every difference from a recording is named."""

from __future__ import annotations

import enum
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipcreduce.arrays import locations
from ipcreduce.arrays.maps import Map
from ipcreduce.arrays.norms import FP8
from ipcreduce.cuda import cupy_runtime
from ipcreduce.errors import AddressChangedError, ArgumentError
from ipcreduce.graphs import address_check
from ipcreduce.graphs.address_check import SHOWN, AddressCheck
from ipcreduce.graphs.addresses import LIMIT, collect_addresses


class Array:
    """As PyTorch's: on the host it has no interface."""

    def __init__(self, address: int, shape: tuple[int, ...] = (2, 3), device: bool = True) -> None:
        self.address, self.shape, self.device = address, shape, device
        self.typestr = "<f4"
        self.strides: tuple[int, ...] | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.device:
            raise AttributeError("on the host")
        return {"shape": self.shape, "typestr": self.typestr, "data": (self.address, False), "strides": self.strides}


A, B, C, D = (Array(address) for address in (0x1000, 0x2000, 0x3000, 0x4000))


class Forbidden(Exception):
    """Code of a container's type was run."""


def forbidden(*_: Any, **__: Any) -> Any:
    raise Forbidden


class Hostile:
    """All that attribute access can run."""

    __getattribute__ = __getattr__ = forbidden
    raising = property(forbidden)
    __eq__ = __hash__ = __repr__ = __bool__ = __len__ = __iter__ = __class_getitem__ = forbidden


class HostileMeta(type):
    __getattribute__ = __getattr__ = __eq__ = __hash__ = __instancecheck__ = forbidden


class HostileObject(Hostile):
    __class__ = property(forbidden)  # what isinstance() asks

    def __init__(self, **values: Any) -> None:
        object.__getattribute__(self, "__dict__").update(values)


class HostileDict(dict):
    __getattribute__ = __iter__ = __getitem__ = __len__ = __eq__ = __contains__ = forbidden
    keys = values = items = get = copy = forbidden


class HostileList(list):
    __getattribute__ = __iter__ = __getitem__ = __len__ = __eq__ = __contains__ = forbidden


class HostileTuple(tuple):
    __getattribute__ = __iter__ = __getitem__ = __len__ = __eq__ = __contains__ = forbidden


class WithMeta(metaclass=HostileMeta):
    pass


@dataclass
class Data:
    x: Any = None
    y: Any = None
    _private: Any = None


@dataclass(slots=True)
class SlottedData:
    x: Any = None
    y: Any = None
    _private: Any = None


Pair = namedtuple("Pair", "x y")


class Base:
    __slots__ = ("_private", "x")


class Middle(Base):
    __slots__ = ()

    @property
    def computed(self) -> Any:
        raise Forbidden


class Slots(Middle):
    """Slots through three classes, and a ``__dict__`` in a fourth."""

    __slots__ = ("unset", "y")


class SlotsAndDict(Slots):
    pass


def slots(kind: type, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


class Scaled(FP8):
    """Of a user, with an array of its own."""

    scale = property(forbidden)

    def __init__(self, scale: Any, more: Any) -> None:
        super().__init__(scale)
        self.more = more


def check(roots: Any) -> AddressCheck:
    return AddressCheck([("x", roots)])


def difference(made: AddressCheck, roots: Any) -> AddressChangedError:
    with pytest.raises(AddressChangedError) as caught:
        made.verify([("x", roots)])
    return caught.value


# ---- what is walked
@pytest.mark.parametrize(
    ("nest", "paths"),
    [
        (A, {"": A}),
        ({"a": A, 7: B, ("t", 1): C}, {'["a"]': A, "[7]": B, "[('t', 1)]": C}),
        ({'quote"': A, "é": B}, {'["quote\\""]': A, '["é"]': B}),
        (OrderedDict(a=A), {'["a"]': A}),
        (defaultdict(list, a=[A]), {'["a"][0]': A}),
        ([A, [B], (C,)], {"[0]": A, "[1][0]": B, "[2][0]": C}),
        (Pair(A, [B]), {".x": A, ".y[0]": B}),
        (Data(A, [B]), {".x": A, ".y[0]": B}),
        (SlottedData(A, [B]), {".x": A, ".y[0]": B}),
        (types.SimpleNamespace(x=A, y=B), {".x": A, ".y": B}),
        (slots(Slots, x=A, y=B), {".x": A, ".y": B}),
        (slots(SlotsAndDict, x=A, y=B, z=C), {".x": A, ".y": B, ".z": C}),
        ({"layers": [Data(), Data(x={"m": slots(Slots, y=A)})]}, {'["layers"][1].x["m"].y': A}),
        ([FP8(A), FP8(per="token"), FP8.__new__(FP8)], {"[0].scale": A}),
        ({"m": Map("v * s + a + b", s=2.0, a=A, b=B)}, {'["m"].operands["a"]': A, '["m"].operands["b"]': B}),
        (Scaled(A, [B]), {".scale": A, ".more[0]": B}),
    ],
)
def test_every_kind_of_container(nest: Any, paths: dict[str, Array]):
    found = collect_addresses(nest)
    assert found == {path: array.address for path, array in paths.items()}
    assert [type(address) for address in found.values()] == [int] * len(paths)


def test_attributes_of_subclasses_of_containers():
    class Named(dict):
        pass

    class Sequence(list):
        __slots__ = ("more",)

    mapping, sequence = Named(a=A), Sequence([C])
    mapping.b, sequence.more = B, D
    assert collect_addresses([mapping, sequence]) == {
        '[0]["a"]': 0x1000, "[0].b": 0x2000, "[1][0]": 0x3000, "[1].more": 0x4000,
    }  # fmt: skip


def test_the_order_is_that_of_the_nest():
    nest = {"z": [D, {"y": A}], "a": B, "m": Data(x=[C], y=D)}
    assert list(collect_addresses(nest)) == ['["z"][0]', '["z"][1]["y"]', '["a"]', '["m"].x[0]', '["m"].y']


def test_only_device_arrays():
    nest = [np.ones(3), Array(0x5000, device=False), 1, "text", b"bytes", None, 2.5, {1}, range(3), memoryview(b"1"), A]
    assert collect_addresses(nest) == {"[10]": 0x1000}


def test_private_names_modules_classes_and_functions_are_skipped():
    module = types.ModuleType("module")
    module.x = A

    class Class:
        x = A

    def function() -> None: ...

    function.x = A
    private = Data(_private=[A])
    private._more = B
    slotted = slots(SlotsAndDict, _private=A)
    slotted._more = B
    bound = Data(x=types.MethodType(function, Data(x=A)))
    nest = [module, Class, Class(), function, private, slotted, SlottedData(_private=A), bound, len, lambda: A]
    assert collect_addresses(nest) == {}
    assert collect_addresses({"_key": A}) == {'["_key"]': 0x1000}  # not a name


def test_no_code_of_the_containers_is_run():
    elements = HostileList([A, HostileTuple([B])])
    nest = HostileObject(mapping=HostileDict({"a": elements}), typed=[WithMeta()], none=HostileTuple())
    assert collect_addresses(nest) == {'.mapping["a"][0]': 0x1000, '.mapping["a"][1][0]': 0x2000}
    made = check(nest)
    made.verify([("x", nest)])
    list.__setitem__(elements, 0, C)
    assert difference(made, nest).changed.keys() == {'x.mapping["a"][0]'}


def test_an_array_in_an_argument_of_our_own_classes_changes():
    made = check([FP8(A), Map("v + a", a=B)])
    made.verify([("x", [FP8(A), Map("v + a", a=B)])])
    assert difference(made, [FP8(C), Map("v + a", a=B)]).changed.keys() == {"x[0].scale"}
    assert difference(made, [FP8(A), Map("v + a", a=C)]).changed.keys() == {'x[1].operands["a"]'}
    assert difference(made, [FP8(per="token"), Map("v + a", a=1)]).missing == ("x[0].scale", 'x[1].operands["a"]')


def test_a_dict_of_attributes_with_code_of_its_own():
    nest = Data()
    nest.__dict__ = HostileDict(x=A, _y=B)
    assert collect_addresses(nest) == {".x": 0x1000}
    check(nest).verify([("x", nest)])


def test_a_property_that_hides_attributes_is_not_run():
    class Hides:
        __dict__ = property(forbidden)

    class Shadows(Base):
        x = property(forbidden)

    shadows = Shadows()
    Base.x.__set__(shadows, A)
    assert collect_addresses([Hides(), shadows]) == {"[1].x": 0x1000}


def test_keys_that_cannot_be_shown_or_look_alike():
    class Key:
        __repr__ = forbidden

    class Same:
        def __repr__(self) -> str:
            return "same"

    class Colour(enum.Enum):
        RED = 1

    key = Key()
    assert collect_addresses({key: A}) == {f"[{object.__repr__(key)}]": 0x1000}
    assert collect_addresses({Same(): A, Same(): B}) == {"[same]": 0x1000, "[same]'": 0x2000}
    assert collect_addresses({Colour.RED: A}) == {"[<Colour.RED: 1>]": 0x1000}


def test_an_array_is_under_every_path_to_it():
    shared = Data(x=A)
    nest = {"layer0": shared, "layer1": shared, "array": A}
    assert collect_addresses(nest) == {'["layer0"].x': 0x1000, '["layer1"].x': 0x1000, '["array"]': 0x1000}
    made = check(nest)
    nest["layer1"] = Data(x=A)  # another object with the same array
    made.verify([("x", nest)])
    shared.x = B
    assert list(difference(made, nest).changed) == ['x["layer0"].x']
    nest["layer1"] = shared
    assert list(difference(made, nest).changed) == ['x["layer0"].x', 'x["layer1"].x']


def test_cycles_end():
    nest = Data(x=A)
    nest.y = [nest, {"back": nest, "a": B}]
    nest.y.append(nest.y)
    assert collect_addresses(nest) == {".x": 0x1000, '.y[1]["a"]': 0x2000}
    made = check(nest)
    made.verify([("x", nest)])
    nest.y[0] = Data(x=C)
    assert difference(made, nest).added == ("x.y[0].x",)


def test_a_deep_nest():
    def deep(array: Array) -> Any:
        nest: Any = array
        for level in range(3000):
            nest = [{"k": nest}, (nest,), Pair(nest, 0), Data(nest), slots(Slots, x=nest)][level % 5]
        return nest

    nest = deep(A)
    [path] = collect_addresses(nest)
    assert path.startswith('.x.x.x[0]["k"].x.x')
    assert path.count(".x") == 1800
    made = check(nest)
    made.verify([("x", nest)])
    error = difference(made, deep(B))
    assert error.changed == {f"x{path}": (locations.locate(A), locations.locate(B))}
    assert len(str(error)) < 500


@pytest.mark.parametrize("shape", [list, tuple, lambda values: dict(enumerate(values))])
def test_too_many_objects(shape: Any):
    assert len(collect_addresses(shape([A] * (LIMIT - 1)))) == LIMIT - 1
    with pytest.raises(ArgumentError, match=f"more than {LIMIT} objects.*Pass the arrays themselves"):
        collect_addresses(shape([A] * LIMIT))


def test_too_many_paths():
    nest: Any = [A]
    for _ in range(40):
        nest = [nest, nest]
    with pytest.raises(ArgumentError, match=r'more than 100000 objects.*args\[0\].*check="never"'):
        AddressCheck([("args[0]", nest)])


def test_an_array_that_does_not_give_its_address_is_named():
    class Refuses:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("requires grad")

    with pytest.raises(ArgumentError, match=r'\["w"\]\[0\]: the .*Refuses does not give its address: requires grad'):
        collect_addresses({"w": [Refuses()]})


# ---- objects that carry a protocol themselves
class Carrier:
    def __init__(self, address: int, **attributes: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (address, False), "version": 3}
        self.__dict__.update(attributes)


class SlottedCarrier:
    __slots__ = ("__cuda_array_interface__", "x")


def carried_by_dlpack(device_type: int = 2) -> tuple[Any, int]:
    base = np.zeros(3, np.float32)
    carrier = Data(x=A)
    carrier.__dlpack__ = lambda stream: base.__dlpack__()
    carrier.__dlpack_device__ = lambda: (device_type, 0)
    return carrier, base.ctypes.data


def test_arrays_that_carry_their_protocol():
    slotted = SlottedCarrier()
    slotted.__cuda_array_interface__, slotted.x = Carrier(0x6000).__cuda_array_interface__, B
    by_dlpack, address = carried_by_dlpack()
    nest = {"a": Carrier(0x5000, x=A), "b": [slotted], "c": by_dlpack, "d": carried_by_dlpack(1)[0]}
    assert collect_addresses(nest) == {'["a"]': 0x5000, '["b"][0]': 0x6000, '["c"]': address, '["d"].x': 0x1000}
    check(nest).verify([("x", nest)])


def test_an_array_that_carries_its_protocol_moves():
    nest = [Carrier(0x5000), Data(x=Carrier(0x6000))]
    made = check(nest)
    nest[1].x = Carrier(0x7000)
    assert difference(made, nest).changed.keys() == {"x[1].x"}
    nest[1].x.__cuda_array_interface__["data"] = (0x6000, False)
    made.verify([("x", nest)])
    nest[0].__cuda_array_interface__ = Carrier(0x8000).__cuda_array_interface__
    assert difference(made, nest).changed.keys() == {"x[0]"}


def test_an_object_becomes_an_array_or_ends_to_be_one():
    first, second, slotted = Data(x=1), Carrier(0x5000, x=A), SlottedCarrier()
    made = check([first, second, slotted])
    interface = second.__cuda_array_interface__
    first.__cuda_array_interface__ = interface
    assert difference(made, [first, second, slotted]).added == ("x[0]",)
    del first.__cuda_array_interface__
    slotted.__cuda_array_interface__ = interface
    assert difference(made, [first, second, slotted]).added == ("x[2]",)
    del slotted.__cuda_array_interface__, second.__cuda_array_interface__
    error = difference(made, [first, second, slotted])
    assert (error.missing, error.added) == (("x[1]",), ("x[1].x",))


def test_no_code_of_a_carrier_is_run():
    carrier = HostileObject(__cuda_array_interface__=Carrier(0x5000).__cuda_array_interface__, x=A)
    strange = Data()
    strange.__dict__ = HostileDict(__cuda_array_interface__=Carrier(0x6000).__cuda_array_interface__)
    nest = [carrier, strange]
    assert collect_addresses(nest) == {"[0]": 0x5000, "[1]": 0x6000}
    check(nest).verify([("x", nest)])


def test_a_carrier_that_does_not_give_its_address_is_named():
    wrong = Data()
    wrong.__cuda_array_interface__ = None  # it says that it is none
    assert collect_addresses({"w": wrong}) == {}
    wrong.__cuda_array_interface__ = {}
    with pytest.raises(ArgumentError, match=r'\["w"\]: the Data does not give its address'):
        collect_addresses({"w": wrong})


# ---- comparing
def test_differences_are_named():
    made = AddressCheck([("args[0]", [A, B]), ('kwargs["x"]', {"k": Data(C)}), ("attn_metadata", None)])
    made.verify([("args[0]", [A, B]), ('kwargs["x"]', {"k": Data(C)}), ("attn_metadata", None)])
    with pytest.raises(AddressChangedError) as caught:
        made.verify([("args[0]", [D]), ('kwargs["x"]', {"k": Data(C)}), ("attn_metadata", Data(B))])
    error = caught.value
    assert error.missing == ("args[0][1]",)
    assert error.added == ("attn_metadata.x",)
    assert error.changed == {"args[0][0]": (locations.locate(A), locations.locate(D))}
    assert "args[0][0]: 0x1000 -> 0x4000" in str(error)
    assert "missing args[0][1]" in str(error)
    assert "added   attn_metadata.x" in str(error)


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("address", 0x2000, "x: 0x1000 -> 0x2000"),
        ("shape", (3, 2), r"x: shape \(2, 3\) -> \(3, 2\), strides \(12, 4\) -> \(8, 4\)"),
        ("typestr", "<i4", "x: dtype float32 -> int32"),
        ("strides", (4, 8), r"x: strides \(12, 4\) -> \(4, 8\)"),
    ],
)
def test_all_of_an_array_is_compared(attribute: str, value: Any, text: str):
    array = Array(0x1000)
    made, before = check(array), locations.locate(array)
    array.strides = (12, 4)  # as it is without
    made.verify([("x", array)])
    if attribute != "strides":
        array.strides = None
    setattr(array, attribute, value)
    error = difference(made, array)
    assert error.changed == {"x": (before, locations.locate(array))}
    assert (error.missing, error.added) == ((), ())
    assert re.search(text + "$", str(error))


def test_an_array_that_comes_from_or_goes_to_the_host():
    array = Array(0x1000, device=False)
    made = check([array])
    array.device = True
    assert difference(made, [array]).added == ("x[0]",)
    made = check([array])
    array.device = False
    assert difference(made, [array]).missing == ("x[0]",)


def test_twenty_differences_are_shown_and_all_are_kept():
    old, new = [Array(address) for address in range(1, 31)], [Array(address) for address in range(100, 130)]
    error = difference(check(old), new)
    assert len(error.changed) == 30
    assert str(error).count(" -> ") == SHOWN == 20
    assert str(error).endswith("and 10 more, see .changed, .missing and .added")
    assert "more" not in str(difference(check(old[:20]), new[:20]))


def test_other_containers_with_the_same_arrays():
    made = check({"a": A, "b": [B], "c": 1, "d": None})
    made.verify([("x", {"b": [B], "d": 2.5, "a": A, "c": "text"})])
    made.verify([("x", {"b": (B,), "a": A, "e": [], "f": Data()})])
    assert difference(made, {"b": (B,), "a": A, "e": [C], "f": Data()}).added == ('x["e"][0]',)


def test_other_keys_for_the_same_arrays():
    for old, new in (({"a": A}, {"b": A}), (Data(A, None), Data(None, A)), (slots(Base, x=A), slots(Base))):
        assert difference(check(old), new).missing == tuple(f"x{path}" for path in collect_addresses(old))


def test_other_containers_are_walked_once(monkeypatch: pytest.MonkeyPatch):
    made, other = check({"a": A, "b": B}), {"b": B, "a": A}
    made.verify([("x", other)])
    monkeypatch.setattr(address_check, "Walk", forbidden)
    made.verify([("x", other)])
    with pytest.raises(Forbidden):
        made.verify([("x", {"a": A, "b": B})])


def test_a_check_after_a_difference_still_compares_with_the_recording():
    made = check([A])
    for _ in range(2):
        assert difference(made, [B]).changed.keys() == {"x[0]"}
    made.verify([("x", [A])])


def test_nothing_is_kept_alive():
    array, nest = Array(0x1000), Data()
    nest.x = array
    made = check(nest)
    gone = weakref.ref(array), weakref.ref(nest)
    del array, nest
    assert [reference() for reference in gone] == [None, None]
    made.verify([("x", Data(Array(0x1000)))])


class Fast:
    """As CuPy's."""

    def __init__(self, address: int) -> None:
        self.data, self.shape = types.SimpleNamespace(ptr=address), (4, 8)
        self.dtype, self.strides = np.dtype("f2"), (16, 2)


def test_512_arrays_take_few_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cupy_runtime, "cupy", types.SimpleNamespace(ndarray=Fast))
    fresh = map(Fast, range(0x1000, 1 << 30, 512))
    layers = [
        Data(
            x=slots(SlotsAndDict, x=next(fresh), y=next(fresh), z=[next(fresh), next(fresh)], scale=1.0),
            y={"k": next(fresh), "v": next(fresh), "more": SlottedData(next(fresh), (next(fresh), 3))},
        )
        for _ in range(64)
    ]
    roots = [("attn_metadata", layers)]
    made = AddressCheck(roots)
    assert len(collect_addresses(layers)) == 512
    calls: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(event) if "call" in event else None)
    try:
        made.verify(roots)
    finally:
        sys.setprofile(before)
    assert len(calls) < 512 * 13, f"{len(calls)} calls of functions, where an array takes 10"
    layers[14].x.z[1] = next(fresh)
    with pytest.raises(AddressChangedError) as caught:
        made.verify(roots)
    assert list(caught.value.changed) == ["attn_metadata[14].x.z[1]"]


# ---- against a walker that is slow and obviously right
class Plain:
    """Attributes that raise beside those of the instance."""

    raising = property(forbidden)

    def __getattr__(self, name: str) -> Any:
        raise Forbidden(name)


class Both(dict):
    pass


def edges(what: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(what, dict):
        yield from ((f'["{key}"]', value) for key, value in what.items())
    if isinstance(what, Pair):
        yield from ((".x", what.x), (".y", what.y))
    elif isinstance(what, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(what))
    if isinstance(what, (Slots, SlottedData)):
        yield from ((f".{name}", getattr(what, name)) for name in ("x", "y") if hasattr(what, name))
    if hasattr(type(what), "__dict__") and isinstance(what, (Data, Plain, Both, SlotsAndDict)):
        yield from ((f".{name}", value) for name, value in vars(what).items() if not name.startswith("_"))


def reference(what: Any, path: str = "x", above: tuple[Any, ...] = ()) -> dict[str, Array]:
    if isinstance(what, Array):
        return {path: what} if what.device else {}
    if any(what is one for one in above):
        return {}
    found = {}
    for suffix, inner in edges(what):
        found.update(reference(inner, path + suffix, (*above, what)))
    return found


NAMES = ("x", "y", "_private", "more")
MUTABLE = {
    "dict": dict, "list": list, "both": Both, "data": Data, "slotted": SlottedData, "plain": Plain,
    "slots": Slots, "slots_dict": SlotsAndDict,
}  # fmt: skip
KINDS = [*MUTABLE, "tuple", "pair"]


class Node(NamedTuple):
    kind: str
    children: list[int]  # below 0: arrays and others; else nodes, of which tuples reach only those that exist


NODES = st.lists(
    st.builds(Node, st.sampled_from(KINDS), st.lists(st.integers(-8, 5), max_size=3)), min_size=1, max_size=6
)


def put(container: Any, place: int, value: Any) -> None:
    name = NAMES[place % 4]
    if isinstance(container, list):
        container.append(value)
    elif type(container) is dict or (isinstance(container, Both) and place % 2):
        container[name] = value
    elif isinstance(container, (Slots, SlottedData)) and not isinstance(container, SlotsAndDict):
        setattr(container, NAMES[place % 3], value)
    else:
        setattr(container, name, value)


def build(nodes: list[Node]) -> list[Any]:
    leaves = [Array(0x1000 * i, device=i != 4) for i in range(1, 5)] + [None, 3, np.ones(2), "text"]
    made: list[Any] = [MUTABLE[node.kind]() if node.kind in MUTABLE else None for node in nodes]

    def value(child: int) -> Any:
        return leaves[-child - 1] if child < 0 else made[child % len(made)]

    for i, node in enumerate(nodes):
        values = [*map(value, node.children)]
        if node.kind == "tuple":
            made[i] = tuple(values)
        elif node.kind == "pair":
            made[i] = Pair(*[*values, None, None][:2])
        else:
            for place, inner in enumerate(values):
                put(made[i], place, inner)
    return made


def located(found: dict[str, Array]) -> dict[str, Any]:
    return {path: locations.locate(array) for path, array in found.items()}


@settings(max_examples=400, deadline=None)
@given(NODES)
def test_random_nests(nodes: list[Node]):
    *_, nest = made = build(nodes)
    expected = reference(made, "")
    found = collect_addresses(made)
    assert found == {path: array.address for path, array in expected.items()}
    check(nest).verify([("x", nest)])


@settings(max_examples=600, deadline=None)
@given(NODES, st.data())
def test_one_change_in_a_random_nest(nodes: list[Node], data: st.DataObject):
    made = build(nodes)
    same = build(nodes)  # an equal one of other objects
    checked = check(made)
    old = located(reference(made))
    checked.verify([("x", same)])
    candidates = [i for i, node in enumerate(nodes) if node.kind in MUTABLE]
    if not candidates:
        return
    container = same[data.draw(st.sampled_from(candidates), "container")]
    change = data.draw(st.sampled_from(["put", "remove", "array"]), "change")
    array = Array(0x1000 * data.draw(st.integers(1, 8), "address"))
    if change == "put":
        put(container, data.draw(st.integers(0, 3), "place"), data.draw(st.sampled_from([array, None, [array]])))
    elif change == "remove":
        if isinstance(container, (list, dict)) and container:
            container.pop(
                data.draw(st.sampled_from([*range(len(container))] if isinstance(container, list) else [*container]))
            )
    elif isinstance(container, list) and container:
        container[data.draw(st.integers(0, len(container) - 1), "index")] = array
    new = located(reference(same))
    if old == new:
        checked.verify([("x", same)])
        return
    error = difference(checked, same)
    assert error.missing == tuple(path for path in old if path not in new)
    assert error.added == tuple(path for path in new if path not in old)
    assert error.changed == {path: (old[path], new[path]) for path in old if path in new and old[path] != new[path]}
