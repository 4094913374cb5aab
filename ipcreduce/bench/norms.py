"""The contenders of ``bench --op allreduce_rmsnorm``: the call, its parts, and NCCL with PyTorch's RMSNorm.

Each contender takes :class:`Rows` as its source. The sums are exact in any order, so the reduced rows are everybody's.
The results of ipcreduce must have the bits that NumPy gives; those of peers, which round elsewhere, must be near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..arrays import rmsnorm
from ..arrays.norms import FP8
from ..calls.request import GROUP, ITEMSIZES, NormShape, with_norm
from ..communicator import Communicator
from ..device.backend import DeviceBackend
from ..device.prepared import Prepared
from ..graphs.session import session_of
from ..ipc.backend import IpcBackend
from . import contenders, data
from .collectives import ALLREDUCE

OP = "allreduce_rmsnorm"
DTYPES = tuple(ITEMSIZES)
OWN = ("allreduce", "pair")
QUANTIZE = {"none": "", "static": "given", "token": "token", "128": "group"}  # the words of --quantize, of NormShape
HIDDEN, ROWS = 8192, tuple(1 << power for power in range(10))
_EPS, _SCALE = float(np.float32(1e-6)), 0.05
_LARGEST = 8  # of the values that are added
_NEAR = 2.0**-6  # of peers: half types are rounded to 2 ** -8, up to three times
_POISON = 77.0


@dataclass(frozen=True)
class Rows:
    """The arrays of a call. There is a ``y`` even if only quantised rows are wanted: contenders use it for sums."""

    shape: NormShape
    x: Any
    weight: Any
    residual: Any
    y: Any
    residual_out: Any
    quantised: Any
    scales: Any


class Message(data.Placed):
    """This rank's rows, and room for the results: see :class:`ipcreduce.bench.data.Message`."""

    def __init__(self, rows: int, hidden: int, dtype: np.dtype[Any], comm: Communicator, quantize: str) -> None:
        scales = QUANTIZE[quantize]
        shape = self._shape = NormShape(rows, hidden, dtype.name, _EPS, 0.0, True, scales, keeps_y=not scales)
        self._dtype, self._rank, self._ranks, self._turn = dtype, comm.rank, comm.size, 0
        self.nbytes, self.of = shape.nbytes, ALLREDUCE
        self.fields = {"op": OP, "rows": rows, "hidden": hidden, "quantize": quantize}
        self.what = f"the RMSNorm of {rows} rows"
        super().__init__(comm)
        library: Any = self._library
        x, residual, y, residual_out = (library.empty((rows, hidden), dtype) for _ in range(4))
        groups = {"given": (1,), "token": (rows, 1), "group": (rows, hidden // GROUP)}.get(scales)
        self.source = Rows(
            shape, x, library.empty(hidden, dtype), residual, y, residual_out,
            library.empty((rows, hidden), np.uint8) if scales else None,
            library.empty(groups, np.float32) if groups else None,
        )  # fmt: skip
        self.target = y

    def renew(self) -> None:
        """Draw new data on every rank, and fill the results with values that none of them has."""
        self._turn += 1
        arrays, size = self.source, (self._shape.rows, self._shape.hidden)
        rng = np.random.default_rng(self._turn)
        draws = [rng.integers(-_LARGEST, _LARGEST, size).astype(self._dtype) for _ in range(self._ranks)]
        residual, weight = (rng.standard_normal(one, np.float32).astype(self._dtype) for one in (size, size[1]))
        self._reduced = np.sum([draw.astype(np.float32) for draw in draws], axis=0).astype(self._dtype)
        given = np.array([_SCALE], np.float32)
        self._expected = rmsnorm.normalise(self._shape, self._reduced, weight, residual, given)
        for array, values in ((arrays.x, draws[self._rank]), (arrays.residual, residual), (arrays.weight, weight)):
            self._fill(array, values)
        arrays.y.fill(_POISON)
        arrays.residual_out.fill(_POISON)
        if arrays.quantised is not None:
            arrays.quantised.fill(0x7F)
            arrays.scales.fill(_SCALE if self._shape.scales == "given" else _POISON)

    def is_right(self, gives: str = "all") -> bool:
        """True if the results are NumPy's.

        :param gives: "all" results with all bits; "near" ones, in which y may be rounded otherwise; or the "sum" in y.
        """
        arrays, expected = self.source, self._expected
        if gives == "sum":
            return self._same(arrays.y, self._reduced)
        if gives == "near":
            found, y = self._found(arrays.y).astype(np.float64), expected.y.astype(np.float64)
            is_near = bool((np.abs(found - y) <= _NEAR * np.abs(y)).all())
            return is_near and self._same(arrays.residual_out, expected.residual_out)
        names = [name for name in expected._fields if name != "y" or self._shape.keeps_y]
        pairs = [(getattr(arrays, name), getattr(expected, name)) for name in names]
        return all(self._same(array, values) for array, values in pairs if values is not None)

    def _same(self, array: Any, expected: np.ndarray[Any, Any]) -> bool:
        return self._found(array).tobytes() == expected.tobytes()


class Ours(contenders.Ours):
    """``allreduce_rmsnorm``. Captured calls are recorded in ipcreduce's graphs."""

    def prepare(self, source: Rows, target: Any) -> Callable[[], Any]:
        """A function that makes one call."""
        scales = source.shape.scales
        options: dict[str, Any] = {"out": source.y}
        if scales:
            how = {"given": {"scale": source.scales}, "token": {"per": "token"}, "group": {"per": GROUP}}[scales]
            options = {"quantize": FP8(**how), "quant_out": source.quantised}
        if scales in ("token", "group"):
            options["scales_out"] = source.scales
        return partial(
            self._comm.allreduce_rmsnorm, source.x, source.weight, _EPS, residual=source.residual,
            residual_out=source.residual_out, **options,
        )  # fmt: skip

    def algorithm(self, mode: str, source: Rows) -> str:
        """The names of the kernels that run a call."""
        return prepared(session_of(self._comm).require_backend("bench"), source).kernels


class Pair(Ours):
    """The timed call, by a second communicator without fused kernels: all-reduce and norm are two kernels."""

    name, own = "pair", True

    def __init__(self, like: Communicator, algorithm: str | None) -> None:
        super().__init__(Communicator(device="auto", backend=like.backend, algorithm=algorithm))
        self._like = session_of(like).require_backend("bench")
        without_fused(self._comm)

    def prepare(self, source: Rows, target: Any) -> Callable[[], Any] | None:  # type: ignore[override]
        """A function that makes one call; None if the timed call itself is two kernels."""
        if prepared(self._like, source).hands_on:
            return None
        return super().prepare(source, target)

    def close(self) -> None:
        """Close the communicator as well."""
        super().close()
        self._comm.close()


def without_fused(comm: Communicator) -> None:
    """Let a communicator run every all-reduce with RMSNorm as two kernels."""
    backend = session_of(comm).require_backend("bench")
    if isinstance(backend, IpcBackend):
        backend.launches.fuses = False


def prepared(backend: DeviceBackend, source: Rows) -> Prepared:
    """The kernel launches of this call."""
    return backend.prepare(with_norm(source.x.shape, source.shape))


class Allreduce(contenders.Ours):
    """The all-reduce alone, without a norm."""

    name, own, gives = "allreduce", True, "sum"

    def prepare(self, source: Rows, target: Any) -> Callable[[], Any]:
        """A function that makes one call."""
        return lambda: self._comm.allreduce(source.x, out=target)


class ThenTorch(contenders._Torch):
    """NCCL's all-reduce, and then PyTorch's addition and RMSNorm, neither of which quantises.

    :param reduces: NCCL by CuPy or by PyTorch.
    """

    gives = "near"

    def __init__(self, reduces: contenders.Make, mpi: Any) -> None:
        super().__init__(mpi)
        self._reduces = reduces(mpi)
        self.name = self._reduces.name
        self._result: Any = None

    def prepare(self, source: Rows, target: Any) -> Callable[[], Any] | None:
        """A function that makes one call; None with quantisation, or if NCCL does not take such an array."""
        reduce = None if source.shape.scales else self._reduces.prepare(source.x, target)
        if reduce is None:
            return None
        torch, hidden = self._torch, source.shape.hidden
        arrays = target, source.residual, source.weight, source.residual_out
        total, residual, weight, residual_out = map(self._tensor, arrays)
        self._target = total

        def call() -> None:
            reduce()
            torch.add(total, residual, out=residual_out)
            self._result = torch.nn.functional.rms_norm(residual_out, (hidden,), weight, _EPS)

        return call

    def collect(self) -> None:
        """Copy y, which is a new tensor."""
        self._target.copy_(self._result)

    def close(self) -> None:
        """Close NCCL's contender as well."""
        self._reduces.close()
        super().close()


def peers(comm: Communicator, algorithm: str | None) -> dict[str, contenders.Make]:
    """The launches and libraries that are timed beside the call."""
    found: dict[str, contenders.Make] = {"allreduce": lambda mpi: Allreduce(comm)}
    if comm.backend != "host":
        found["pair"] = lambda mpi: Pair(comm, algorithm)
        found["nccl"] = partial(ThenTorch, contenders.CupyNccl)
        found["torch_nccl"] = partial(ThenTorch, contenders.TorchNccl)
    return found


def why_not(hidden: int, quantize: str, dtype: str | None, given: Iterable[str]) -> str:
    """The reason why options do not fit ``--op allreduce_rmsnorm``; "" if they do. :param given: other options."""
    for name in given:
        return f"{name} has no meaning with --op {OP}. Choose sizes by --rows and --hidden"
    if dtype not in (None, *DTYPES):
        return f"--dtype {dtype} cannot be normalised. Choose from {', '.join(DTYPES)}"
    if quantize == "128" and hidden % GROUP:
        return f"--quantize 128 needs rows of whole groups, and --hidden {hidden} is no multiple of 128"
    return ""
