"""CuPy as tests/shared/sweep.py wants it, and what tests change on the device."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ipcreduce.ipc import plan


def buffer(raw: np.ndarray) -> Any:
    """Device bytes with these values."""
    return cupy.asarray(raw)


def view(buffer: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None) -> Any:
    """An array over a part of a buffer."""
    return cupy.ndarray(shape, dtype, buffer.data + offset, strides=strides)


def read(array: Any) -> np.ndarray:
    """The values, on the host."""
    return array.get() if array.flags.c_contiguous else array.copy().get()


def set_epochs(comm: Any, epoch: int) -> None:
    """Set all epochs of a communicator's workspace. None of its kernels may be running."""
    workspace = comm._state.backend.workspace
    memory = cupy.cuda.UnownedMemory(workspace.address, 8 * plan.EPOCH_SLOTS, workspace)
    words = cupy.ndarray((plan.EPOCH_SLOTS, 2), np.uint32, cupy.cuda.MemoryPointer(memory, 0))
    words.set(np.array([[epoch, 0]] * plan.EPOCH_SLOTS, np.uint32))
    cupy.cuda.Device().synchronize()
