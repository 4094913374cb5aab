"""A user's element-wise expression as C++ source, and the compiler's errors about it in the user's terms.

The expression is code of the program: it is compiled into a kernel as it stands, like a kernel of the program's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ArgumentError
from ..texts import text_of

KINDS = ("full", "row", "scalar")  # as in map.cuh: an array of the message's shape, or of its last dimension; a number
_FILE = "expression"  # the compiler's messages call the expression so
# NVRTC says "expression(2): error: ..." or "At end of source: error: ...", and g++, which serves the simulated device,
# "expression:2:7: error: ...". The kernel's own file is named for a value of a wrong type: the function's beginning.
_ERROR = re.compile(
    r"^(?:At end of source|(\S+?)(?:\((\d+)\)|:(\d+)(?::\d+)?)): *(?:\w+ )?error:? *(.*)$", re.MULTILINE
)
_MAX_ERRORS = 5  # in a message


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
        # A macro of the compiler's, such as CUDART_VERSION, in place of an operand's name would be another program.
        undefined = "".join(f"#undef {one.name}\n" for one in self.operands)
        operands = " ".join(f"OPERAND({one.name}, {one.dtype}, {one.kind})" for one in self.operands)
        return (
            f"{undefined}#define IPCREDUCE_MAP\n#define IPCREDUCE_OPERANDS {operands}\n#include <map.cuh>\n"
            f'MAP_ELEMENT {{ return (\n#line 1 "{_FILE}"\n{self.text}\n); }}\n#line 1 "{kernel}.cu"\n'
        )

    def error(self, log: object) -> ArgumentError:
        """The error for the log of a compiler that has refused the kernel, which compiles without the expression."""
        text = text_of(log)
        lines = self.text.count("\n") + 1
        found = [
            f"line {min(int(one or other), lines)}: {what}" if file == _FILE else what
            for file, one, other, what in _ERROR.findall(text)
        ]
        said = "; ".join(list(dict.fromkeys(found))[:_MAX_ERRORS]) or text.rstrip("\0\n")
        return ArgumentError(
            f"the expression of then= does not compile. {said}. The expression is {self}. It is C++ with a number as "
            "its value, and knows v and the operands by their names"
        )
