"""The table of the states of the order of calls: each row, and where it leads."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.cuda import cupy_runtime
from ipcreduce.device import stream_order
from ipcreduce.device.last_call import (
    ALWAYS_IN_EVENT,
    BEHIND_CAPTURE,
    IN_EVENT,
    NOTHING,
    ON_STREAM,
    RESTING,
    Last,
    State,
)
from ipcreduce.device.stream_order import StreamOrder
from ipcreduce.types import Stream

HERE, THERE, RECORDING = Stream(7), Stream(8), Stream(9)
KEPT = {
    NOTHING: Last(NOTHING),
    RESTING: Last(RESTING, HERE, "owner"),
    ON_STREAM: Last(ON_STREAM, HERE, "owner"),
    BEHIND_CAPTURE: Last(BEHIND_CAPTURE, HERE, "owner"),
    IN_EVENT: Last(IN_EVENT, HERE),
    ALWAYS_IN_EVENT: Last(ALWAYS_IN_EVENT, HERE),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver is asked to do with events; an owner keeps its stream, and capture 1 is on stream 100."""
    did: list[tuple[Any, ...]] = []
    streams = SimpleNamespace(
        create_event=lambda: 1,
        record_event=lambda event, stream: did.append(("record", stream)),
        wait_event=lambda stream, event: did.append(("wait", stream)),
        capture_id=lambda stream: stream == 100,
        capture_nodes=lambda stream: (1,),
        synchronize_stream=lambda stream: None,
        synchronize_event=lambda event: None,
    )
    monkeypatch.setattr(stream_order, "streams", streams)
    for name in ("using", "using_relaxed"):
        monkeypatch.setattr(stream_order, name, lambda context: nullcontext())
    monkeypatch.setattr(cupy_runtime, "keeps", lambda owner, stream: owner is not None)
    monkeypatch.setattr(cupy_runtime, "is_capturing", lambda stream: stream == 100)
    return did


def order_in(last: Last) -> StreamOrder:
    order = StreamOrder(0)
    order.last, order.recording_stream = last, RECORDING
    return order


def call(stream: Stream, owner: Any = "owner") -> Any:
    return lambda order: order.launch(lambda stream: None, stream, owner, recorded=True)


ACTS = {
    "a call there": call(HERE),
    "an unknown stream": call(HERE, None),
    "on another": call(THERE),
    "of a recording": call(RECORDING),
    "captured": call(Stream(100)),
    "extend": lambda order: order.extend(THERE),
    "synchronize": lambda order: order.synchronize(None),
    "reset": lambda order: order.reset(),
}
EDGES: dict[State, tuple[State, ...]] = {  # in the order of ACTS
    NOTHING: (ON_STREAM, IN_EVENT, ON_STREAM, ON_STREAM, NOTHING, IN_EVENT, NOTHING, NOTHING),
    RESTING: (ON_STREAM, IN_EVENT, ON_STREAM, ON_STREAM, RESTING, IN_EVENT, RESTING, NOTHING),
    ON_STREAM: (ON_STREAM, ON_STREAM, ALWAYS_IN_EVENT, ON_STREAM, BEHIND_CAPTURE, IN_EVENT, RESTING, NOTHING),
    BEHIND_CAPTURE: (ON_STREAM, IN_EVENT, ALWAYS_IN_EVENT, ON_STREAM, BEHIND_CAPTURE, IN_EVENT, NOTHING, NOTHING),
    IN_EVENT: (ON_STREAM, IN_EVENT, ALWAYS_IN_EVENT, ON_STREAM, IN_EVENT, IN_EVENT, NOTHING, NOTHING),
    ALWAYS_IN_EVENT: (ALWAYS_IN_EVENT,) * len(ACTS),
}


def test_every_state_is_in_the_table_and_leads_where_it_says(asked: Any, subtests: pytest.Subtests):
    rows = (inspect.getdoc(State) or "").splitlines()
    assert [row.split()[0] for row in rows if row[:1].isupper() and row.split()[0].isupper()] == [
        state.name for state in State
    ]
    for state, ends in EDGES.items():
        for (name, act), end in zip(ACTS.items(), ends, strict=True):
            with subtests.test(state=state.name, act=name):
                order = order_in(KEPT[state])
                act(order)
                assert order.last.state is end


def test_events_are_used_only_where_another_stream_may_follow(asked: list[Any]):
    for state, expected in (
        (NOTHING, []),
        (ON_STREAM, []),
        (BEHIND_CAPTURE, []),
        (IN_EVENT, [("wait", HERE)]),
        (ALWAYS_IN_EVENT, [("wait", HERE), ("record", HERE)]),
    ):
        asked.clear()
        call(HERE)(order_in(KEPT[state]))
        assert asked == expected, state
    asked.clear()
    call(THERE)(order_in(KEPT[ON_STREAM]))
    assert asked == [("record", HERE), ("wait", THERE), ("record", THERE)], "behind all that is there, then at once"
    asked.clear()
    call(RECORDING)(order_in(KEPT[ON_STREAM]))
    assert asked == [("record", HERE), ("wait", RECORDING)]


def test_what_the_fast_path_is_told(asked: Any):
    """Only the stream of the last call is quick, or any where all ends are in the event; none that is captured."""
    for state, last in KEPT.items():
        quick = state in (RESTING, ON_STREAM, IN_EVENT, ALWAYS_IN_EVENT)
        for looked in (False, True):
            assert order_in(last).quick(HERE, looked) is (state if quick else None)
            other = order_in(last).quick(THERE, looked)
            assert other is (state if state is ALWAYS_IN_EVENT else None)
    assert order_in(Last(ALWAYS_IN_EVENT)).quick(Stream(100), False) is None
    assert order_in(last.behind_capture()).quick(HERE, True) is ALWAYS_IN_EVENT
    assert order_in(KEPT[IN_EVENT].behind_capture()).quick(HERE, True) is None


def test_a_quick_call_behind_a_wait(asked: Any):
    order = order_in(KEPT[RESTING])
    order.resume()
    assert order.last == KEPT[ON_STREAM]


def test_an_end_stays_in_the_event_if_a_call_fails(asked: list[Any]):
    def fail(stream: Stream) -> None:
        raise KeyError

    order = order_in(KEPT[IN_EVENT])
    with pytest.raises(KeyError):
        order.launch(fail, HERE, None)
    assert asked == [("wait", HERE), ("record", HERE)]
