"""What every unit test has: a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shared import clock


@pytest.fixture(autouse=True)
def _clock_as_before() -> Iterator[None]:
    """By how much a test moves the clock is taken back: all of them share this process."""
    with clock.own():
        yield
