"""``python -m ipcreduce``: see ipcreduce/cli.py."""

from __future__ import annotations

from .cli import main

main()
