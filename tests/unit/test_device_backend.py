"""How a rank that closes ends its calls, and what the others read of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.calls.sequence import CallSequence
from ipcreduce.device.backend import DeviceBackend
from ipcreduce.errors import PeerFailedError, PeerLostError
from ipcreduce.page.control_page import CLOSED_IT, REFUSED, Page

from .pages import make_pages


def abort_calls(page: Page, by_themselves: bool) -> bool:
    order = SimpleNamespace(ends_by=lambda deadline: by_themselves)
    backend: Any = SimpleNamespace(order=order, page=page, rank=page.rank)
    return DeviceBackend._abort_calls(backend, 0.0)


def raised_by(page: Page) -> Exception:
    """The error of the next call on the rank of ``page``."""
    calls = CallSequence(page, 60, [])
    calls.number = 5
    with pytest.raises((PeerFailedError, PeerLostError)) as caught:
        calls.raise_pending()
    return caught.value


def test_calls_that_have_ended_are_no_news():
    pages = make_pages(2)
    assert abort_calls(pages[0], True)
    assert not pages[1].aborted


def test_a_rank_that_closes_before_its_call_has_ended_is_named():
    pages = make_pages(2)
    assert not abort_calls(pages[0], False)
    assert pages[1].aborted
    assert pages[1].fault() == (0, 0, REFUSED, CLOSED_IT)
    assert f"rank 0 raised an error ({CLOSED_IT})" in str(raised_by(pages[1]))


def test_a_rank_that_closes_because_of_a_loss_is_not_taken_for_the_reason():
    """A slower rank has to hear of the rank that has died, and not of the one that was first to notice."""
    pages = make_pages(3)
    pages[2].post_lost(0, "its process has ended")
    pages[2].clear()  # the abort word, as if it had come later
    assert not abort_calls(pages[2], False)
    assert pages[1].aborted
    assert pages[1].fault() is None
    error = raised_by(pages[1])
    assert isinstance(error, PeerLostError)
    assert "rank 0 is gone" in str(error)
