"""``GraphRunner``: a function with one recording for each batch descriptor, made at the descriptor's first call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

from ..calls import call_lock
from ..calls.sequence import CallSequence
from ..cuda import current_streams
from ..device.stream_order import StreamOrder
from ..errors import ArgumentError
from ..page.fingerprint import Fingerprint
from ..process import refuse_copies
from ..texts import kind_of, text_of
from ..types import DEFAULT_STREAM
from .address_check import CHECKS, Inputs
from .addresses import item
from .breaks import current, rehearsing, without_blocks
from .copied_inputs import copy_arguments, uncopied
from .forward_context import MODES, ForwardContext, check_word, get_forward_context
from .graph import Graph
from .nests import parts, rebuilt
from .pool import GraphPool
from .session import GraphSession, HasSession, default_communicator, session_of


class GraphRunner:
    """A wrapper that calls ``function`` by replaying recordings of it.

    A call in a :func:`ipcreduce.forward_context` of the runner's mode replays the recording for that context's batch
    descriptor. The first such call makes the recording and is a real run. Any other call, and every call on a
    communicator without GPUs, calls the function. The recordings share one pool: record the largest first. A call's
    result is valid until the runner's next call. The runner keeps the function alive, and with it the objects that
    the function refers to (weights, caches).

    :param comm: None for the default communicator.
    :param mode: "piecewise", with breaks, or "full": one graph, in which decorated functions are called plainly.
    :param check: when to compare the addresses of the arrays among the arguments (in mode "full" also those in
        ``attn_metadata``) with the recording's: at the "first" replay of each recording, "always", or "never".
    :param record_new: True to record descriptors that have no recording; False to call the function for them.
    :param copy_inputs: True to copy the device arrays among the arguments, also in lists, tuples, dicts, FP8 and Map,
        into the recording's before each replay, and compare the addresses of those in other objects. If False, the
        caller must pass the same arrays each time.
    :raises ArgumentError: if ``function`` cannot be called, ``comm`` is not a communicator, or ``mode`` or ``check`` is
        another word.

    Without GPUs the results of breaks are checked as in a recording, so that the same mistakes show everywhere.
    """

    def __init__(
        self, function: Callable[..., Any], comm: HasSession | None = None, *, mode: str = "piecewise",
        check: str = "first", record_new: bool = True, copy_inputs: bool = False,
    ) -> None:  # fmt: skip
        if not callable(function):
            raise ArgumentError(f"function must be callable, not {kind_of(function)}. Pass GraphRunner(function, comm)")
        if comm is not None:
            session_of(comm)
        check_word("mode", mode, MODES[1:])  # not "none": to record nothing, call the function
        check_word("check", check, CHECKS)
        self._function, self._comm, self._mode, self._check = function, comm, mode, check
        self._record_new, self._copy_inputs = record_new, copy_inputs
        self._pool: GraphPool | None = None
        self._recorded: dict[Hashable, _Recorded] = {}
        self._calls: CallSequence | None = None  # from this runner's first call on
        self._faults = 0  # as of the last call
        self._agreed: set[Hashable] | None = None  # descriptors, since the last fault; None: there was none

    @property
    def recordings(self) -> Mapping[Hashable, Graph]:
        """The graphs by batch descriptor, in the order in which they were recorded."""
        return MappingProxyType({descriptor: one.graph for descriptor, one in self._recorded.items()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function or replay its recording, and return its result.

        :raises AddressChangedError: before anything is launched, if an array's address or layout differs from the
            recording's.
        :raises ArgumentError: with ``copy_inputs``, if the arguments do not correspond to the recording's.
        :raises IpcReduceError: see :meth:`Graph.record` and :meth:`Graph.replay`.
        """
        context = get_forward_context()
        if context is None or context.mode != self._mode:
            return self._function(*args, **kwargs)
        calls = self._calls
        if calls is None or calls.faults:
            self._agree(context.batch_descriptor)
        recorded = self._recorded.get(context.batch_descriptor)
        if recorded is not None:
            if self._copy_inputs and current.graph is None:  # else the replay is refused
                try:
                    session = self._session()
                    stream = current_streams.stream_of(session.device)[0]
                    session.order(StreamOrder.follow, stream)  # replays on other streams may still read the arrays
                    copy_arguments([args, kwargs], recorded.arguments, stream)
                except BaseException as error:
                    self._session().calls.fail(error, begun=False)
                    raise
            graph = recorded.graph
            graph.replay(self._inputs(context, args, kwargs) if graph.checks_inputs else None)
            return recorded.result()
        if not self._record_new:
            return self._function(*args, **kwargs)
        if self._session().backend is not None:
            return self._record(context, args, kwargs)
        self._session().say_eager()
        with rehearsing(self._mode == "piecewise"):
            return self._function(*args, **kwargs)

    def _agree(self, descriptor: Hashable) -> None:
        """After a fault, drop a recording that some rank lacks, as its launch may have failed there. Collective."""
        session = self._session()
        faults = session.calls.faults
        if self._calls is None:  # there is no recording yet
            self._calls, self._faults = session.calls, faults
        elif faults != self._faults:
            self._faults, self._agreed = faults, set()
        if self._agreed is None or session.backend is None or current.graph is not None:
            return
        if descriptor not in self._agreed:
            here = descriptor in self._recorded
            if not call_lock.make(session.calls, self._is_everywhere, descriptor, here) and here:
                self._recorded.pop(descriptor).graph.close()
            self._agreed.add(descriptor)

    def _is_everywhere(self, descriptor: Hashable, here: bool) -> bool:
        calls, fingerprint = self._session().calls, Fingerprint.of(f"comparison of graph {text_of(descriptor)}")
        calls.enter(fingerprint, DEFAULT_STREAM)
        everyone = calls.gather(calls.number, b"\1" * here)
        calls.compare(fingerprint)
        return all(everyone)

    def _record(self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph = Graph(
            self._comm, pool=self._pool, check=self._check, breaks=self._mode == "piecewise",
            name=text_of(context.batch_descriptor),
        )  # fmt: skip
        with graph.record(self._inputs(context, args, kwargs)):
            # Now, as the function, and later its callers, may put other arrays into these lists.
            arguments = rebuilt([args, kwargs], lambda one: one) if self._copy_inputs else None
            outputs = self._function(*args, **kwargs)
        self._pool = graph.pool
        outputs, arguments = without_blocks(outputs, graph.pool), without_blocks(arguments, graph.pool)
        recorded = self._recorded[context.batch_descriptor] = _Recorded(graph, outputs, arguments)
        return recorded.result()

    def _inputs(self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        roots = Inputs()
        if self._copy_inputs:
            roots += uncopied([args, kwargs])
        else:
            roots += [(f"args[{index}]", value) for index, value in enumerate(args)]
            roots += [(f"kwargs{item(name)}", value) for name, value in kwargs.items()]
        if self._mode == "full":
            roots.append(("attn_metadata", context.attn_metadata))
        return roots

    def _session(self) -> GraphSession:
        self._comm = default_communicator() if self._comm is None else self._comm
        return session_of(self._comm)

    __reduce__ = refuse_copies

    def __repr__(self) -> str:
        own = vars(self)  # also of a runner whose __init__ has raised
        function = own.get("_function")
        named = function if isinstance(function, (FunctionType, MethodType)) else type(function)
        mode, recordings = own.get("_mode"), len(own.get("_recorded", ()))
        if not mode:
            return "<GraphRunner: not made>"
        return f"<GraphRunner of {named.__qualname__}: mode {mode}, {recordings} recordings>"

    def close(self) -> None:
        """Close the recordings. Later calls record again. Results of earlier calls stay as they are while they live."""
        while self._recorded:
            self._recorded.popitem()[1].graph.close()
        self._pool = None

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Recorded:
    """A recording, with the function's outputs, and its arguments if others are copied into them."""

    graph: Graph
    outputs: Any
    arguments: Any

    def result(self) -> Any:
        """The outputs, for one call, whose caller may change lists and dicts."""
        return rebuilt(self.outputs, lambda one: one) if parts(self.outputs) else self.outputs
