"""Stands for the packages ``nccl`` and ``nccl.bindings``."""

from __future__ import annotations

from . import nccl as nccl

__path__: list[str] = []
