"""The words of a call that the ranks compare, and by which it is prepared."""

from __future__ import annotations

from dataclasses import replace

from ipcreduce.calls.request import Member, NormShape, Request, plain, with_norm
from ipcreduce.cuda.expressions import Expression

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
    assert len({*calls}) == len({one.what.crc for one in calls}) == len(calls)
    assert plain(FORM, "float32", "sum") == calls[4].without_epilogue() == calls[7].without_epilogue() == calls[0]
