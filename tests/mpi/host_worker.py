"""Ranks of the host backend: ``mpirun -n 4 python tests/mpi/host_worker.py scenario ...``; each runs on every rank."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import numpy as np
from mpi4py import MPI

import ipcreduce
from tests import bad_calls

WORLD = MPI.COMM_WORLD


class HostModule:
    """NumPy as tests/sweep.py and tests/bad_calls.py want it."""

    @staticmethod
    def buffer(raw: np.ndarray) -> np.ndarray:
        return raw.copy()

    @staticmethod
    def view(
        buffer: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None
    ) -> np.ndarray:
        return np.ndarray(shape, dtype, buffer.data, offset, strides)

    @staticmethod
    def read(array: np.ndarray) -> np.ndarray:
        return array

def bad():
    with ipcreduce.Communicator(timeout=20) as comm:
        print(bad_calls.run(HostModule, comm))
        print(bad_calls.run_constructors(device=False))
bad()
