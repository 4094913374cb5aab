"""The control page as a channel for the exchanges of :mod:`ipcreduce.ranks.exchange`, once start-up is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..page.control_page import Page
from ..page.records import rows


class PageChannel:
    """A channel for exchanges within a call that this rank has entered. It is its own Request, which is always done."""

    silence = "they did not answer"  # never shown: gather() waits, and its errors say who did not come
    left = False

    def __init__(self, page: Page, call: int, gather: Callable[[bytes], list[bytes]]) -> None:
        """:param call: its number. :param gather: collects every rank's bytes."""
        self.rank, self.size, self.call = page.rank, page.n, call
        self._gather = gather

    def gather(self, sent: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> PageChannel:
        """Collect every rank's ``sent``, by rank in ``received``. :raises IpcReduceError: as CallSequence.gather()."""
        parts = self._gather(sent.tobytes())
        layout = np.dtype(f"V{sent.nbytes}")  # for a tuple NumPy calls Python code, and loses a Ctrl-C that comes then
        received[:] = np.concatenate([rows(part, layout, "an exchange") for part in parts]).view(np.uint8)
        return self

    def Test(self) -> bool:
        """True: :meth:`gather` has waited already, so the exchange is done."""
        return True
