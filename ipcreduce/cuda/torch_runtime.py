"""PyTorch's tensors and streams, in a program that has imported it. It is never imported here."""

from __future__ import annotations

import sys
from typing import Any

from ..handles import Stream


def is_tensor(array: Any) -> bool:
    """True for a PyTorch tensor. There is none in a program that has not imported PyTorch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # None while another thread is at the import
    return kind is not None and isinstance(array, kind)


def current_stream(tensor: Any) -> tuple[Stream, Any]:
    """The handle of PyTorch's current stream on a tensor's GPU, and the object that it is the handle of."""
    stream = sys.modules["torch"].cuda.current_stream(tensor.device)
    return Stream(int(stream.cuda_stream)), stream


def pending(array: Any) -> str:
    """The method that resolves a tensor's lazy negation or conjugation (``x.conj().imag`` is not negated yet), or "".

    The memory holds other values than the tensor, and neither protocol tells so.
    """
    if is_tensor(array):
        for name in ("neg", "conj"):
            if getattr(array, f"is_{name}")():
                return f"resolve_{name}"
    return ""
