"""Lists of PyTorch's own tensors, here on the CPU: which are read by a guard, and which are told apart."""

from __future__ import annotations

from typing import Any

import pytest

from ipcreduce.cuda import torch_lists, torch_runtime

torch = pytest.importorskip("torch")
ON_CPU = -1  # of get_device()
_works = torch_lists._guards_work.__wrapped__  # which remembers nothing


@pytest.fixture(params=[True, False], ids=["guard", "no guard"], autouse=True)
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    assert torch_runtime.is_tensor(torch.zeros(1))
    if not request.param:
        monkeypatch.setattr(torch_lists, "_guards_work", lambda: False)
    return bool(request.param)


def tensors() -> list[Any]:
    return [torch.zeros(5), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(7, dtype=torch.bfloat16)]


def addresses(ones: list[Any]) -> list[int]:
    return [one.data_ptr() for one in ones]


def read_of(ones: list[Any]) -> Any:
    read = torch_lists.reader(ones, ON_CPU)
    assert read is not None
    return read


def test_new_lists_of_the_same_kind():
    read = read_of(tensors())
    for _ in range(3):
        ones = tensors()
        assert read(ones) == addresses(ones)
        assert read(tuple(ones)) == addresses(ones)


def test_many_tensors():
    read = read_of(tensors() * 4)
    ones = [one for _ in range(4) for one in tensors()]
    assert read(ones) == addresses(ones)
    assert read(ones[:-1]) is None
    assert read([*ones[:-1], torch.zeros(8, dtype=torch.bfloat16)]) is None


def test_a_guard_is_used(guarded: bool, monkeypatch: pytest.MonkeyPatch):
    """In the installed PyTorch it works, so no tensor is looked at from Python."""
    assert torch_lists._guards_work() is guarded
    read = read_of(tensors())
    monkeypatch.setattr(torch_lists, "_plain_list", lambda *_: None)
    assert (read(tensors()) is not None) is guarded


def test_modes_in_which_a_guard_is_another(guarded: bool, monkeypatch: pytest.MonkeyPatch):
    """After the first list in a mode, a guard reads the others there."""
    read = read_of(tensors())
    for mode in (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu"), torch.enable_grad):
        with mode():
            ones = tensors()
            assert read(ones) == addresses(ones)
            with monkeypatch.context() as without:
                without.setattr(torch_lists, "_plain_list", lambda *_: None)
                assert read(ones) == (addresses(ones) if guarded else None)


def test_lists_of_another_kind():
    read, ones = read_of(tensors()), tensors()
    wrong: list[Any] = [
        torch.zeros(2), torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float64), torch.zeros(6, dtype=torch.float64),
        torch.zeros(3, 2, dtype=torch.float64).T, torch.zeros(2, 6, dtype=torch.float64)[:, ::2],
        torch.zeros(2, 3, dtype=torch.float64, requires_grad=True), torch._neg_view(ones[1]),
        ones[1].to_sparse(), ones[1].numpy(), None, 1.0,
    ]  # fmt: skip
    for other in wrong:
        assert read([ones[0], other, ones[2]]) is None, other
    assert read(ones[:2]) is None
    assert read([*ones, ones[0]]) is None
    zero = torch._efficientzerotensor(2, 3, dtype=torch.float64)
    for other in (zero, torch.zeros(2, 3, dtype=torch.float64, device="meta")):
        assert 0 in (read([ones[0], other, ones[2]]) or [0]), "nothing lies at address 0"
    assert read(ones) == addresses(ones)


def test_the_same_tensors_with_other_memory():
    ones = tensors()
    read = read_of(ones)
    before = read(ones)
    kept, other = torch.zeros(5), torch.zeros(5)
    ones[0].set_(other)
    assert read(ones) == [other.data_ptr(), *before[1:]]
    ones[0].data = kept
    assert read(ones) == [kept.data_ptr(), *before[1:]]
    ones[0].resize_(4)
    assert read(ones) is None
    ones[0].resize_(5)
    assert read(ones) == addresses(ones)
    ones[0].data = torch.zeros(5, dtype=torch.float64)
    assert read(ones) is None


def test_tensors_that_require_grad():
    """They are taken within no_grad() alone, whenever their list was first seen."""
    parameters = [torch.nn.Parameter(one) for one in tensors()]
    assert torch_lists.reader(parameters, ON_CPU) is None
    with torch.no_grad():
        read = read_of(parameters)
        assert read(parameters) == addresses(parameters)
    assert read(parameters) is None
    plain = tensors()
    read = read_of(plain)
    plain[2].requires_grad_()
    assert read(plain) is None
    with torch.no_grad():
        assert read(plain) == addresses(plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.trace
def test_traces():
    """The results would be constants there, and memory may be missing."""
    counter = pytest.importorskip("torch.utils.flop_counter")
    ones = tensors()
    read = read_of(ones)
    found: list[Any] = []

    def traced(one: Any) -> Any:
        found.append(read(ones))
        return one

    torch.jit.trace(traced, torch.zeros(2), check_trace=False)
    with counter.FlopCounterMode(display=False):
        traced(None)
    with torch.autograd.forward_ad.dual_level():
        traced(None)
    torch.func.vmap(lambda one: [found.append(read([one])), one][1])(torch.zeros(2, 5))
    assert found
    assert set(map(str, found)) == {"None"}
    assert read(ones) == addresses(ones)


def test_lists_that_no_reader_takes():
    for wrong in (torch.zeros(4)[::2], torch.zeros(3, dtype=torch.complex64), None):
        assert torch_lists.reader([torch.zeros(5), wrong], ON_CPU) is None


def test_a_guard_that_takes_too_much_is_not_used(monkeypatch: pytest.MonkeyPatch):
    """It has no public name: a later PyTorch may compare less, or take other arguments."""
    one = torch.zeros(4)
    real, works = torch_lists._guard, _works
    for blind in (
        lambda _: lambda *_: True,
        lambda _: lambda *_: False,
        lambda ones: lambda *others: all(other is None or other.shape == one.shape for other in others),
        lambda ones: lambda *others: real([one.detach()])(*others) or others[0] is None,
        lambda ones: real(ones, 1),
    ):
        monkeypatch.setattr(torch_lists, "_guard", blind)
        assert not works()
