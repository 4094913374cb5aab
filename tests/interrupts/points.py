"""The places within the package at which Python may run a signal handler, and an interrupt at one of them."""

from __future__ import annotations

import dis
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ipcreduce

PACKAGE = str(Path(ipcreduce.__file__).parent)
_FINALISER = weakref.finalize.__call__.__code__
Key = tuple[int, int]  # the way to a function, and the instruction there


def _looks(code: int) -> bool:
    """True for an instruction behind which the interpreter looks for signals: a call, or a jump back."""
    name = dis.opname[code]
    return name.startswith(("CALL", "JUMP_BACKWARD")) and "INTRINSIC" not in name


_LOOKS = [_looks(code) for code in range(256)]


def _is_finaliser(code: CodeType) -> bool:
    """True where Python ignores what is raised. When such a function runs is chance."""
    return code is _FINALISER or code.co_name == "__del__"


@dataclass
class _State:
    """A frame of the package. ``inlined``: the last call was of a function in Python, in which Python has looked."""

    way: int
    last: int = -1  # the instruction that was executed last
    inlined: bool = False


class Points:
    """The places that the thread comes to, each with the way to it, in their order.

    :param interrupt_at: raise KeyboardInterrupt at the first visit of this place.
    :ivar fired: where that was, in words; "" if the thread did not come there.
    """

    def __init__(self, interrupt_at: Key | None = None) -> None:
        self.seen: dict[Key, str] = {}
        self.fired = ""
        self._wanted = interrupt_at
        self._states: dict[int, _State] = {}

    def run(self, act: Callable[[], Any]) -> Any:
        """``act()``, watched."""
        sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of no opcode if this was never set before settrace()
        sys.settrace(self._enter)
        try:
            return act()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        caller, code = frame.f_back, frame.f_code
        parent = self._states.get(id(caller))
        if parent is not None:
            parent.inlined = code.co_name != "__init__"
        if not code.co_filename.startswith(PACKAGE) or _is_finaliser(code):
            return None
        while parent is None and caller is not None:  # contextlib's functions, say, stand between
            if _is_finaliser(caller.f_code):
                return None
            caller = caller.f_back
            parent = self._states.get(id(caller))
        way = hash((0, 0, code) if parent is None else (parent.way, parent.last, code))
        self._states[id(frame)] = state = _State(way)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def step(frame: FrameType, event: str, _arg: Any) -> Any:
            if event == "return":
                self._states.pop(id(frame), None)
            elif event == "opcode":
                now, last = frame.f_lasti, state.last
                looks = not state.inlined and (last < 0 or _LOOKS[frame.f_code.co_code[last]])
                if looks and frame.f_lineno is not None:  # None: Python closes a generator, and ignores what is raised
                    self._visit((state.way, now), frame.f_code, frame.f_lineno)
                state.last, state.inlined = now, False
            return step

        return step

    def _visit(self, key: Key, code: CodeType, line: int) -> None:
        if key not in self.seen:
            self.seen[key] = f"{code.co_filename[len(PACKAGE) + 1 :]}:{line} {code.co_name}"
            if key == self._wanted:
                self.fired = self.seen[key]
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)  # whose handler runs at once, or as soon as the package lets it
