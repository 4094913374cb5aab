"""What every unit test has: a clock of its own, and random examples that may take any time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.shared import clock

settings.register_profile("any pace", deadline=None)  # no verdict depends on how fast the machine is
settings.load_profile("any pace")


@pytest.fixture(autouse=True)
def _clock_as_before() -> Iterator[None]:
    """By how much a test moves the clock is taken back: all of them share this process."""
    with clock.own():
        yield
