"""Tensors of PyTorch on the host, where it is installed."""

from __future__ import annotations

import pytest

from ipcreduce.arrays import views
from ipcreduce.arrays.host_operands import HostOperands
from ipcreduce.dtypes import reduce
from ipcreduce.errors import ArgumentError

torch = pytest.importorskip("torch")


def reduced(array: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of twice the same array."""
    for name, one in (("array", array), ("out", out)):
        assert one is None or not views.is_device(one, name)
    used = HostOperands(array, "sum", out)
    total = reduce([used.source, used.source], used.op)
    if used.target is not None:
        used.target[...] = total
    return used.result(total)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64", "int8", "uint8", "int64", "complex64"])
def test_a_tensor_in_a_tensor_out(name: str):
    dtype = getattr(torch, name)
    for array in (torch.ones(6, dtype=dtype), torch.ones(3, 4, dtype=dtype).T, torch.ones((), dtype=dtype)):
        result = reduced(array)
        assert (type(result), result.dtype, result.shape) == (torch.Tensor, dtype, array.shape)
        assert (result == 2).all()
        out = torch.zeros(2 * array.numel(), dtype=dtype)[::2].reshape(array.shape) if array.ndim == 1 else array
        assert reduced(array, out) is out
        assert (out == 2).all()


def test_gradients():
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ArgumentError, match=r"array is a tensor that requires grad.*Pass tensor\.detach\(\)"):
        reduced(weight)
    assert reduced(weight.detach()).tolist() == [2, 2, 2]
    with torch.no_grad():
        assert reduced(weight, weight) is weight
    assert weight.tolist() == [2, 2, 2]


def test_memory_that_is_not_the_values():
    array = torch.complex(torch.ones(3), torch.ones(3)).conj()
    for wrong, words in (
        (array, "resolve_conj"), (array.imag, "resolve_neg"), (torch.ones(2, 2).to_sparse(), "to_dense"),
        (torch.ones(3, device="meta"), "on the device meta"),
        (torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "dequantize"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            reduced(wrong)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_8_bits(name: str):
    tensor = torch.zeros(3).to(getattr(torch, name))
    words = rf"a Tensor of torch\.{name} cannot be reduced\. The dtypes are .*\. Convert the array to float16"
    with pytest.raises(ArgumentError, match=words):
        reduced(tensor)


def test_ops_of_pytorch():
    ops = pytest.importorskip("torch.distributed").ReduceOp
    names = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"}
    for name, meant in names.items():
        member = getattr(ops, name)
        assert (
            HostOperands(torch.ones(3), member, None).op == HostOperands(torch.ones(3), ops(member), None).op == meant
        )
    with pytest.raises(ArgumentError, match=r"there is no op ReduceOp\.BXOR\. .*\. Pass one of these"):
        HostOperands(torch.ones(3), ops.BXOR, None)
    for wrong in (torch.ones(3), torch.ones(3, requires_grad=True)):
        with pytest.raises(
            ArgumentError, match=r"there is no op Tensor\. .*\. The array for the result is the argument out="
        ):
            HostOperands(torch.ones(3), wrong, None)


def test_tensors_without_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which PyTorch sets in this import: it is gone at the end
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Wrapper(torch.Tensor):
        """Holds another tensor, and shows its shape."""

        @staticmethod
        def __new__(cls, held: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

        @classmethod
        def __torch_dispatch__(cls, *_: object) -> None:
            raise AssertionError("asked for an operator")

    class Local(Wrapper):
        to_local = torch.Tensor.clone

    ones, zero = torch.ones(6), torch._efficientzerotensor((12,))
    for wrong, words in (
        (Wrapper(ones), r"Wrapper, which overrides __torch_dispatch__ .*in torch\.ops\.ipcreduce, such as all_reduce"),
        (Local(ones), r"Local, which overrides __torch_dispatch__ .*\. Pass tensor\.to_local\(\)"),
        (FakeTensorMode().from_tensor(ones), "FakeTensor, which overrides"),
        (zero[:6], r"knows to be zero, .*\. Pass tensor\.clone\(\)"), (zero[6:], "knows to be zero"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"array is a .*{words}"):
            reduced(wrong)
        with pytest.raises(ArgumentError, match=f"out is a .*{words}"):
            reduced(ones, wrong)
    assert reduced(zero.clone()).tolist() == [0] * 12

    class Named(torch.Tensor):
        """A subclass that has memory."""

    assert reduced(ones.as_subclass(Named)).tolist() == [2] * 6


def test_a_null_pointer_by_dlpack_is_refused():
    """As PyTorch exports it, whatever else is looked at."""
    zero = torch._efficientzerotensor((6,))
    with pytest.raises(ArgumentError, match="a Tensor, does not give its memory: its elements have address 0"):
        views.host_view(zero)
    assert views.host_view(zero[:0]).shape == (0,)


def test_the_compiler_stays_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which PyTorch sets in this import: it is gone at the end
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    from torch._dynamo import trace_rules

    views.is_device(torch.ones(1))
    assert trace_rules.check(views.is_device)
    assert not trace_rules.check(reduced)
