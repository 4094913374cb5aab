"""Fingerprints of calls, for tests of what compares them."""

from __future__ import annotations

from ipcreduce.calls.request import plain
from ipcreduce.page.fingerprint import Fingerprint


def of_allreduce(shape: tuple[int, ...], kind: str, op: str) -> Fingerprint:
    """The fingerprint of an all-reduce of one array on the device."""
    return plain(shape, kind, op).fingerprint
