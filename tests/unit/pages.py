"""Control pages for tests: the ranks as several mappings of one file in this process, and as threads of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ipcreduce.coordination import watchdog
from ipcreduce.coordination.control_page import Page


def make_pages(n: int) -> list[Page]:
    """One page a rank, all of one file, whose name is gone already."""
    first = Page.create(0, n)
    pages = [first, *(Page.open(first.path, rank, n) for rank in range(1, n))]
    for page in pages:
        page.join(*watchdog.own_identity())
    first.unlink()
    return pages


def in_threads(acts: Sequence[Callable[[], Any]], seconds: float = 120.0) -> list[Any]:
    """The results of all, each of which runs in a thread of its own. Raises the first one's exception, if any did."""
    results: list[Any] = [None] * len(acts)
    errors: list[BaseException | None] = [None] * len(acts)

    def run(index: int) -> None:
        try:
            results[index] = acts[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=[index], daemon=True) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for error in errors:
        if error is not None:
            raise error
    assert not any(thread.is_alive() for thread in threads), f"not all done after {seconds} s"
    return results
