"""The words of a call that the ranks compare, and by which it is prepared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ipcreduce.calls import request
from ipcreduce.calls.request import Member, NormShape, Request, plain, with_norm
from ipcreduce.cuda.expressions import Expression
from ipcreduce.device.backend import Validity
from ipcreduce.graphs import recording
from ipcreduce.ipc import plan, tuning

FORM = 2, 256


def test_what_the_ranks_compare():
    """Shape, dtype, op, epilogue, list or not, and where the arrays lie: each alone makes another call."""
    norm = NormShape(*FORM, "float32", 1e-6, 0.0, False)
    calls = [
        plain(FORM, "float32", "sum"), plain((256, 2), "float32", "sum"), plain(FORM, "int32", "sum"),
        plain(FORM, "float32", "max"), with_norm(FORM, norm), with_norm(FORM, replace(norm, eps=1e-5)),
        Request("sum", (Member(FORM, "float32"),), is_list=True),
        *(Request("sum", (Member(FORM, "float32"),), Expression(text, ())) for text in ("v", "v ")),
    ]  # fmt: skip
    calls += [one._replace(on_host=True) for one in calls]
    assert len({*calls}) == len({one.fingerprint.crc for one in calls}) == len(calls)
    assert plain(FORM, "float32", "sum") == calls[4].without_epilogue() == calls[7].without_epilogue() == calls[0]


def test_how_numpy_prints_numbers_is_no_part_of_a_call():
    """A rank's program may set it."""
    norms = [NormShape(*FORM, "float32", float(np.float32(eps)), 0.0, False) for eps in (1 / 3, 0.333333)]
    found = []
    for legacy in (False, "1.13"):
        request._in_words.cache_clear()
        with np.printoptions(legacy=legacy):  # type: ignore[arg-type]
            found.append([with_norm(FORM, one).fingerprint for one in norms])
    assert found[0] == found[1]
    assert found[0][0].crc != found[0][1].crc


def test_no_checksum_is_made_of_a_repr(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C within the repr() of a dataclass leaves it "..." for good, as from within itself."""

    def interrupted(_: object) -> str:
        return "..."

    call = recording.RecordedCall(plain(FORM, "float32", "sum").fingerprint, "one_shot")
    tables = tuning.Tables(plan.checked_table([plan.Choice(1 << 33, "two_shot", 256, 264, 4)], 4))

    def checksums() -> list[int]:
        return [recording.Segment(0, [call], "a graph", Validity()).fingerprint.crc, tuning.checksum(tables)]

    before = checksums()
    for kind in (type(call.fingerprint), recording.RecordedCall, plan.Choice):
        monkeypatch.setattr(kind, "__repr__", interrupted)
    assert checksums() == before
