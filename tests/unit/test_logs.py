"""The log: what a program's handlers raise changes no call."""

from __future__ import annotations

import logging

import pytest

from ipcreduce.logs import WARNING, log


class Full(logging.Handler):
    """As one whose disk is full."""

    def handle(self, record: logging.LogRecord) -> bool:
        raise OSError("no space left on device")


@pytest.fixture
def full() -> Full:
    handler = Full()
    logging.getLogger("ipcreduce").addHandler(handler)
    yield handler
    logging.getLogger("ipcreduce").removeHandler(handler)


def test_a_handler_that_raises(full: Full):
    log(WARNING, "%d of %d", 1, 2)


def test_an_interrupt_passes(full: Full, monkeypatch: pytest.MonkeyPatch):
    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(full, "handle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log(WARNING, "once")


def test_what_is_logged(caplog: pytest.LogCaptureFixture):
    try:
        raise ValueError("of a test")
    except ValueError:
        log(WARNING, "%d of %d", 1, 2, trace=True)
    (record,) = caplog.records
    assert (record.getMessage(), record.name, record.filename) == ("1 of 2", "ipcreduce", "test_logs.py")
    assert record.exc_info is not None
