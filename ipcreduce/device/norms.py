"""All-reduces with RMSNorm on one GPU: by one fused kernel, or by the pair of a plain all-reduce and a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..calls.fingerprint import Fingerprint, of_norm
from ..calls.norm_shape import ITEMSIZES, NormAddresses, NormShape
from ..dtypes import DTYPES
from ..types import Stream
from .known_calls import Prepared, Ready, keep
from .norm_kernels import NormKernels, NormLaunch

PACKET_BYTES = 16  # what fused kernels load and store at once
_MOST = 1024  # prepared calls
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
Start = Callable[[Any, int, int, Stream], None]  # of a prepared plain all-reduce: from source to target


@dataclass(frozen=True, kw_only=True)
class PreparedNorm:
    """All that a backend knows of an all-reduce with RMSNorm before its addresses are given.

    :ivar by: the names of the kernels, or of the library, that run it.
    :ivar alignment: of the addresses of arrays of the call's dtype, in bytes.
    :ivar plain: the all-reduce of the pair; None for a fused kernel, for one rank, and for no rows.
    :ivar norm: the fused kernel, or the norm of the pair; None for no rows.
    """

    what: Fingerprint
    by: str
    shape: NormShape
    alignment: int
    plain: Prepared | None
    norm: NormLaunch | None

    def needs_out(self, in_place: bool) -> bool:
        """True if it needs an array ``out`` even if y is not wanted, for the sum that the pair hands on.

        :param in_place: ``residual_out`` is the residual, and cannot hold that sum.
        """
        return self.plain is not None and not self.shape.keeps_y and in_place


class Norms:
    """The all-reduces with RMSNorm of one backend. Not thread-safe.

    :param for_array: prepares a plain all-reduce, and ``start``: puts it on a stream.
    :param fused: makes the launch of a fused kernel, or None for shapes that have none.
    """

    def __init__(
        self, ranks: int, kernels: NormKernels, for_array: Callable[[Any, Any], Prepared], start: Start,
        fused: Callable[[NormShape], NormLaunch | None] = lambda shape: None,
    ) -> None:  # fmt: skip
        self.kernels, self._ranks = kernels, ranks
        self._for_array, self._start, self._fused = for_array, start, fused
        self._prepared: dict[tuple[tuple[int, ...], NormShape], PreparedNorm] = {}

    def prepare(self, of: tuple[int, ...], shape: NormShape) -> PreparedNorm:
        """The launches for an array of shape ``of``, compiled if need be.

        :raises IpcReduceError: if a kernel does not compile. :raises CudaError: if it does not load.
        """
        found = self._prepared.get((of, shape))
        if found is None:
            found = keep(self._prepared, (of, shape), self._prepare(of, shape), _MOST)
        return found

    def _prepare(self, of: tuple[int, ...], shape: NormShape) -> PreparedNorm:
        what, itemsize = of_norm(of, shape), ITEMSIZES[shape.dtype]
        if not shape.rows:
            return PreparedNorm(what=what, by="nothing", shape=shape, alignment=itemsize, plain=None, norm=None)
        fused = self._fused(shape)
        if fused is not None:
            what = what.made_by(1)
            return PreparedNorm(what=what, by=fused.name, shape=shape, alignment=PACKET_BYTES, plain=None, norm=fused)
        norm, plain = self.kernels.pair_launch(shape), None
        by = norm.name
        if self._ranks > 1:
            like = SimpleNamespace(shape=of, dtype=_DTYPES[shape.dtype], nbytes=shape.nbytes, itemsize=itemsize)
            plain = self._for_array(like, "sum")
            what, by = what.made_by(plain.what.operations), f"{plain.by}, {by}"
        return PreparedNorm(what=what, by=by, shape=shape, alignment=itemsize, plain=plain, norm=norm)

    def start(self, prepared: PreparedNorm, addresses: NormAddresses, stream: Stream) -> None:
        """Put the kernels of a call on ``stream``. The pair keeps its sum in ``out``, or else in ``residual_out``."""
        norm = prepared.norm
        if norm is None:
            return
        if prepared.plain is not None:
            between = addresses.out or addresses.residual_out
            self._start(prepared.plain, addresses.source, between, stream)
            addresses = addresses._replace(source=between, out=addresses.out * prepared.shape.keeps_y)
        norm.set(addresses)
        norm.launch.run(stream)

    def make_ready(self, prepared: PreparedNorm, addresses: NormAddresses) -> Ready:
        """The ready call between these addresses: see :class:`Ready`."""
        return Ready(prepared.what, self._start_ready, (prepared, addresses))

    def _start_ready(self, argument: tuple[PreparedNorm, NormAddresses], stream: Stream) -> None:
        self.start(*argument, stream)
