"""README.md as package indexes show it. All else about the package is in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

# How the address of a file of this tree begins, such as "https://HOST/PROJECT/blob/main/". Empty: it is not known yet.
FILES = ""
_RELATIVE = re.compile(r"(!?)\[([^]]*)\]\((?!https://)([^)]*)\)")


def description(text: str, files: str = FILES) -> str:
    """The text with links that work outside of this tree. Without ``files`` only their words are left."""

    def outside(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if not files:
            return "" if picture else words
        return f"{picture}[{words}]({files.replace('/blob/', '/raw/') if picture else files}{target})"

    return _RELATIVE.sub(outside, text)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme), long_description_content_type="text/markdown")
