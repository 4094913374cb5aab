"""All mutants, from the text files beside this one: a file for each area.

The blocks of a file lie between empty lines. The first says what the file is about. ``@ PATH`` names the file that the
mutants below it change. Each other block is a mutant: its name; the change; and, behind ``$``, the command that has to
fail. The change is written as by diff: "-" begins what is taken out, "+" what is put in, and " " what stays. The first
and last lines may be parts of lines of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.mutants import Mutant


def read(text: str) -> Iterator[Mutant]:
    """The mutants of a file. :raises ValueError: if a block is none."""
    file = ""
    for block in text.strip("\n").split("\n\n")[1:]:
        if block.startswith("@ "):
            file = block[2:]
            continue
        name, *change, command = block.split("\n")
        if not (file and change and {line[0] for line in change} <= {*" -+"} and command.startswith("$ ")):
            raise ValueError(f"expected a name, a change and a command; found {block!r}")
        old, new = ("\n".join(line[1:] for line in change if line[0] in signs) for signs in (" -", " +"))
        yield Mutant(name, file, old, new, command[2:])


MUTANTS = [one for path in sorted(Path(__file__).parent.glob("*.txt")) for one in read(path.read_text())]
