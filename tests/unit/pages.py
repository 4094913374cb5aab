"""Control pages for tests: the ranks as several mappings of one file in this process."""

from __future__ import annotations

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
