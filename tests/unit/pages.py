"""Control pages for tests: the ranks as several mappings of one file in this process, and as threads of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ipcreduce.page import shared_files, watchdog
from ipcreduce.page.control_page import Page
from ipcreduce.page.mirror import Mirror


def make_pages(n: int) -> list[Page]:
    """One page a rank, all of one file, whose name is gone already."""
    first = Page.create(0, n)
    pages = [first, *(Page.open(first.path, rank, n) for rank in range(1, n))]
    for page in pages:
        page.join(*watchdog.own_identity())
    shared_files.remove(first.path)
    return pages


def make_mirrored(n: int) -> tuple[list[Page], list[Mirror]]:
    """One page a rank, none of them shared, and their mirrors. What a rank tells the others arrives at once."""
    pages = [Page.alone(rank, n) for rank in range(n)]
    ends: list[dict[int, socket.socket]] = [{} for _ in range(n)]
    for one in range(n):
        for other in range(one):
            ends[one][other], ends[other][one] = socket.socketpair()
            ends[one][other].setblocking(False)
            ends[other][one].setblocking(False)
    mirrors = [Mirror(page, own) for page, own in zip(pages, ends, strict=True)]
    turn = threading.RLock()
    telling: list[bool] = []

    def tell() -> None:
        with turn:
            if telling:  # a message that arrives may make its rank say something
                return
            telling.append(True)
            for _ in range(2):
                for act in (Mirror.send, Mirror.receive):
                    for mirror in mirrors:
                        act(mirror)
            telling.clear()

    for page in pages:
        page.changed = tell
        page.join(*watchdog.own_identity())
    return pages, mirrors


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
