"""A user's element-wise expression as C++ source, and the compiler's errors about it in the user's terms.

The expression is code of the program: it is compiled into a kernel as it stands, like a kernel of the program's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ArgumentError, IpcReduceError
from ..texts import text_of

KINDS = ("full", "row", "scalar")  # as in map.cuh: an array of the message's shape, or of its last dimension; a number
_FILE = "expression"  # by which the compiler's messages name it
# NVRTC says "expression(2): error: ...", and g++, which serves the simulated device, "expression:2:7: error: ...".
_PLACE = re.compile(rf"^{_FILE}(?:\((\d+)\)|:(\d+)(?::\d+)?): *(?:fatal )?error:? *(.*)$", re.MULTILINE)
_MOST_ERRORS = 5  # in a message


@dataclass(frozen=True)
class Operand:
    """An operand of an expression, without its value: its name, one of ``DTYPE_NAMES``, and one of :data:`KINDS`."""

    name: str
    dtype: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} {self.kind}"


@dataclass(frozen=True)
class Expression:
    """An expression and its operands: all that a kernel is compiled for, and all that the ranks compare."""

    text: str
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        """The expression in one line, as messages show it."""
        of = f" with {', '.join(map(str, self.operands))}" if self.operands else ""
        return " ".join(self.text.split()) + of

    def before(self, kernel: str) -> str:
        """The source that comes before that of ``kernel``: the operands, and the expression as a function.

        Line numbers in messages are those of the expression, and then those of the kernel's own file.
        """
        operands = " ".join(f"OPERAND({one.name}, {one.dtype}, {one.kind})" for one in self.operands)
        return (
            f"#define IPCREDUCE_MAP\n#define IPCREDUCE_OPERANDS {operands}\n#include <map.cuh>\n"
            f'MAP_ELEMENT {{ return (\n#line 1 "{_FILE}"\n{self.text}\n); }}\n#line 1 "{kernel}.cu"\n'
        )

    def error(self, log: object) -> IpcReduceError:
        """The error for a compiler's log: :class:`ArgumentError` if the expression is wrong."""
        text = text_of(log)
        lines = self.text.count("\n") + 1
        found = [(min(int(one or other), lines), what) for one, other, what in _PLACE.findall(text)]
        if not found:
            return IpcReduceError(f"a kernel with the expression {self} does not compile:\n{text}")
        said = "; ".join(f"line {line}: {what}" for line, what in dict.fromkeys(found[:_MOST_ERRORS]))
        return ArgumentError(
            f"the expression of then= does not compile. {said}. The expression is {self}. It is C++, and knows v and "
            "the operands by their names"
        )
