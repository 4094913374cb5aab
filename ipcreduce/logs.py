"""The package's log. What a program's handlers raise changes no call, which the other ranks would wait for."""

from __future__ import annotations

import logging
from contextlib import suppress

_LOGGER = logging.getLogger("ipcreduce")
INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR


def is_logged(level: int) -> bool:
    """True if messages of this level are logged."""
    return _LOGGER.isEnabledFor(level)


def log(level: int, text: str, *arguments: object, trace: bool = False) -> None:
    """Log a message, whatever the handlers do with it.

    :param trace: add the traceback of the exception at hand.
    """
    with suppress(Exception):
        _LOGGER.log(level, text, *arguments, exc_info=trace, stacklevel=2)
