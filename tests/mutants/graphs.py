"""Mutants of graphs: recordings, breaks, replays, memory, address check, registration, runners."""

from __future__ import annotations

from tests.mutants import Mutant, unit

GRAPH, SESSION, RECORDING, RUNNER = (
    f"ipcreduce/graphs/{name}.py" for name in ("graph", "session", "recording", "runner")
)
BREAKS, POOL, ADDRESSES, CHECK = (
    f"ipcreduce/graphs/{name}.py" for name in ("breaks", "pool", "addresses", "address_check")
)
COPIED, ARRAYS = "ipcreduce/graphs/copied_inputs.py", "ipcreduce/arrays/views.py"
CONTEXT = "ipcreduce/graphs/forward_context.py"
MAPPINGS, REGISTRATION = (f"ipcreduce/graphs/direct/{name}.py" for name in ("mappings", "registration"))


def scenario(name: str, *, ranks: int = 2, late: bool = False, direct: bool = False) -> str:
    """The command of a scenario of tests/graphs; ``late``: each piece of work begins late, at random."""
    environ = "SIM_LATE=0.005 " * late
    return f"{environ}mpirun -n {ranks} tests.graphs --sim {'--algorithm direct ' * direct}{name}"


MUTANTS = [
    # ---- breaks
    Mutant(
        "a break is not run at a replay",
        GRAPH,
        "                    part.replay(handle)\n",
        "                    pass\n",
        scenario("real_data"),
    ),
    Mutant(
        "a break runs on another stream than its replay",
        BREAKS,
        "        with current_streams.on_stream(stream, self._pool.device):\n",
        "        if True:\n",
        scenario("replayed_on_another_stream", late=True),
    ),
    Mutant(
        "what a break returns is not copied at a replay",
        BREAKS,
        "            views.copy_into(due, found, stream)\n",
        "            pass\n",
        scenario("returned"),
    ),
    Mutant(
        "what a break returns is only looked at by its address",
        ARRAYS,
        "pointer(array) == pointer(other) and array.strides == other.strides",
        "pointer(array) == pointer(other)",
        scenario("returned_view"),
    ),
    Mutant(
        "arrays that overlap are copied over themselves",
        ARRAYS,
        "    if overlap(target, value):\n",
        "    if False:\n",
        scenario("returned_view"),
    ),
    Mutant(
        "the work of a break at the end is no part of the replay",
        GRAPH,
        "            session.order(StreamOrder.extend, handle)\n",
        "            pass\n",
        scenario("the_break_at_the_end"),
    ),
    Mutant(
        "the segments of a graph are launched in the wrong order",
        GRAPH,
        "        for part in self._parts:\n            if isinstance(part, Segment):\n",
        "        for part in reversed(self._parts):\n            if isinstance(part, Segment):\n",
        scenario("real_data"),
    ),
    Mutant(
        "a break within a break ends a segment",
        GRAPH,
        "            current.graph = None\n            try:\n",
        "            try:\n",
        scenario("nested"),
    ),
    Mutant(
        "an exception in a break is kept from the peers",
        GRAPH,
        "                    session.calls.fail(error, begun=False, foreign=True)\n                    raise\n",
        "                    raise\n",
        scenario("exceptions_in_breaks"),
    ),
    Mutant(
        "an exception in a break is kept from the peers while the body goes on",
        GRAPH,
        "any more\n            self._session.calls.fail(error, begun=False, foreign=True)\n            raise\n",
        "any more\n            raise\n",
        scenario("caught_on_one_rank"),
    ),
    Mutant(
        "a break keeps its arguments' memory",
        BREAKS,
        "self._args, self._kwargs = without_blocks(args, pool), without_blocks(kwargs, pool)",
        "self._args, self._kwargs = args, kwargs",
        scenario("views_of_arguments"),
    ),
    # ---- states
    Mutant(
        "a graph that failed can be recorded again",
        GRAPH,
        'self._end("failed")',
        'self._end("empty")',
        scenario("exceptions"),
    ),
    Mutant(
        "a capture is left open after an exception",
        GRAPH,
        "                error = caught\n                recording.abandon()\n",
        "                error = caught\n",
        scenario("exceptions"),
    ),
    Mutant(
        "a closed graph is replayed, and does nothing",
        GRAPH,
        'self._expect("replay()", ("staged",),',
        'self._expect("replay()", ("staged", "closed"),',
        scenario("states"),
    ),
    Mutant(
        "a recording within a capture of others begins",
        GRAPH,
        "        if any(streams.capture_id(stream) for stream in callers):\n",
        "        if False:\n",
        scenario("foreign_capture"),
    ),
    Mutant(
        "two recordings of a communicator are open at once",
        SESSION,
        '            if calls.recording is not None:\n                raise GraphStateError("this',
        '            if False:\n                raise GraphStateError("this',
        scenario("two_threads"),
    ),
    Mutant(
        "a recording that failed here is launched by the others",
        SESSION,
        "        if error is not None or theirs is not None:\n            try:",
        "        if error is not None:\n            try:",
        scenario("exceptions"),
    ),
    Mutant(
        "a task's calls become part of what another one records",
        GRAPH,
        "if self._recording is not None and not self._recording.is_own:",
        "if False:",
        scenario("two_tasks"),
    ),
    Mutant(
        "a task's refused call ends what another one records",
        "ipcreduce/calls/sequence.py",
        "self.recording.is_own else None",
        "self.recording.in_this_thread else None",
        scenario("two_tasks"),
    ),
    Mutant(
        "a runner copies inputs in another one's recording",
        RUNNER,
        "if self._copy_inputs and current.graph is None:",
        "if self._copy_inputs:",
        scenario("two_tasks"),
    ),
    Mutant(
        "an interrupt before the vote on a recording is kept from the peers",
        SESSION,
        "self.calls.lock, self.calls.leaving(recording.number, error):",
        "self.calls.lock:",
        scenario("interrupted_at_the_end"),
    ),
    Mutant(
        "an interrupt before the launch of a recording is kept from the peers",
        GRAPH,
        "        with session.calls.leaving(session.calls.number + 1):  #",
        "        if True:  #",
        scenario("interrupted_at_the_end"),
    ),
    Mutant(
        "an interrupt in a recording is told as one of a later call",
        "ipcreduce/calls/sequence.py",
        "raised=True, call=number)",
        "raised=True)",
        scenario("interrupted_at_the_end"),
    ),
    Mutant(
        "a replay is part of a capture of others",
        "ipcreduce/device/backend.py",
        "stream, owner, capturable=False)",
        "stream, owner)",
        scenario("a_replay_is_not_captured"),
    ),
    # ---- order
    Mutant(
        "a recording does not wait for the caller's stream",
        GRAPH,
        "            self._session.order(StreamOrder.chain, caller, recording.stream)\n",
        "            pass\n",
        scenario("filled_at_the_exit", late=True),
    ),
    Mutant(
        "the caller's stream does not wait for what was recorded",
        SESSION,
        "                self.order(StreamOrder.chain, recording.stream, caller)\n",
        "                pass\n",
        scenario("filled_at_the_exit", late=True),
    ),
    Mutant(
        "a replay is not compared with the peers'",
        SESSION,
        "            self.calls.enter(segment.what, stream)\n",
        "            pass\n",
        scenario("different_graphs"),
    ),
    # ---- memory
    Mutant(
        "a slab's block is handed out twice",
        POOL,
        "            slab.take(address, nbytes)\n",
        "",
        unit("pool", "blocks"),
    ),
    Mutant(
        "a pool is given back while a graph uses it",
        POOL,
        "            if self._users:\n                return\n",
        "",
        unit("pool", "a_pool_that_a_graph_uses_again_before_it_went_back_stays"),
    ),
    Mutant(
        "a block serves the work of another stream",
        POOL,
        "                if slab.stream == stream\n",
        "",
        unit("pool", "the_smallest_range_that_fits_and_neighbours_join"),
    ),
    Mutant(
        "the memory of a captured call is given to others",
        POOL,
        "        if not capture:\n            return nullcontext()\n",
        "        return nullcontext()\n",
        "mpirun -n 2 tests.simulated tests/gpu/captures.py temporaries",
    ),
    Mutant(
        "the arrays of a recording are not kept alive",
        GRAPH,
        "self._held = [*recording.held, inputs]",
        "self._held = [inputs]",
        scenario("arrays_are_held"),
    ),
    Mutant(
        "the inputs of a recording are not kept alive",
        GRAPH,
        "self._held = [*recording.held, inputs]",
        "self._held = [*recording.held]",
        scenario("arrays_are_held"),
    ),
    Mutant(
        "a result of a runner keeps the pool, and not its memory",
        BREAKS,
        "views.view_of(value, hold)",
        "views.view_of(value, pool)",
        scenario("results_of_runners_outlive"),
    ),
    # ---- the address check
    Mutant(
        "the address check leaves out the first array of a container",
        ADDRESSES,
        "            for position, locate, place in located:\n",
        "            for position, locate, place in located[1:]:\n",
        unit("addresses", "one_change_in_a_random_nest"),
    ),
    Mutant(
        "the address check does not look into containers within containers",
        ADDRESSES,
        "                    met.append(values[position])\n",
        "                    met.append(met[container])\n",
        unit("addresses", "one_change_in_a_random_nest"),
    ),
    Mutant(
        "the address check names the path beside the right one",
        ADDRESSES,
        "            number, suffix, key = self._names[number]\n",
        "            number, suffix, key = self._names[number - 1]\n",
        unit("addresses", "every_kind_of_container"),
    ),
    Mutant(
        "a check of the first replay is done at every one",
        CHECK,
        "        if not self._always:\n",
        "        if False:\n",
        scenario("addresses"),
    ),
    Mutant(
        "a check at every replay is done once",
        CHECK,
        "        if not self._always:\n",
        "        if True:\n",
        scenario("addresses"),
    ),
    Mutant(
        "the address check does not look into subclasses of FP8 and Map",
        ADDRESSES,
        "in OWN if issubclass(kind, own)}",
        "in OWN if kind is own}",
        unit("addresses", "every_kind_of_container"),
    ),
    # ---- runners
    Mutant(
        "a runner does not copy the inputs",
        COPIED,
        "        views.copy_into(there, source, stream)\n",
        "        pass\n",
        scenario("copied_inputs"),
    ),
    Mutant(
        "a runner looks at the addresses of inputs only",
        COPIED,
        "if not views.same_elements(here, there)]",
        "if views.pointer(here) != views.pointer(there)]",
        scenario("inputs_at_the_same_place"),
    ),
    Mutant(
        "arrays in FP8 and Map are not copied",
        COPIED,
        "yield from _pairs(read(new), read(recorded), ",
        "yield from _pairs(0, 0, ",
        scenario("arrays_of_our_own_arguments"),
    ),
    Mutant(
        "an FP8 or a Map that asks for something else is replayed as recorded",
        COPIED,
        "if type(new) is not type(recorded) or _form(new) != _form(recorded):",
        "if type(new) is not type(recorded):",
        scenario("arrays_of_our_own_arguments"),
    ),
    Mutant(
        "a runner compares a caller's list with itself",
        RUNNER,
        "_Recorded(graph, outputs, arguments)",
        "_Recorded(graph, outputs, [args, kwargs])",
        scenario("copied_inputs"),
    ),
    Mutant(
        "an array in place of what was none is ignored",
        COPIED,
        "    elif views.locate(new) is not None:\n",
        "    elif False:\n",
        scenario("copied_inputs"),
    ),
    Mutant(
        "inputs that have changed places are copied one after the other",
        COPIED,
        "if _meets(here, written) else here",
        "if False else here",
        scenario("inputs_at_the_same_place"),
    ),
    Mutant(
        "different inputs are copied into memory that they share",
        COPIED,
        "if views.share_memory(there, other[2]) and not _alike(pair, other):",
        "if False:",
        scenario("inputs_that_share_memory"),
    ),
    Mutant(
        "inputs beside each other in the same rows are taken for ones that share memory",
        ARRAYS,
        "return overlap(array, other) and share_memory(_geometry(array), _geometry(other))",
        "return overlap(array, other)",
        scenario("inputs_that_share_memory"),
    ),
    Mutant(
        "inputs are copied while a replay on another stream reads them",
        RUNNER,
        "                    session.order(StreamOrder.follow, stream)  #",
        "                    #",
        scenario("inputs_of_a_replay_that_runs"),
    ),
    Mutant(
        "a runner replays in another mode than its own",
        RUNNER,
        "if context is None or context.mode != self._mode:",
        "if context is None:",
        scenario("which_calls_replay"),
    ),
    Mutant(
        "a forward context that is left before an inner one hides that",
        CONTEXT,
        "        _entered.set(_innermost())\n",
        "        _entered.set(block.outer)\n",
        unit("forward_context", "blocks_that_are_left_in_any_order"),
    ),
    Mutant(
        "a forward context that was left elsewhere stays set",
        CONTEXT,
        "    if block is not None and block.is_left:\n",
        "    if False:\n",
        unit("forward_context", "an_asynchronous_generator_that_is_dropped"),
    ),
    # ---- registration
    Mutant(
        "graphs are registered though a rank could not",
        REGISTRATION,
        '                if text:\n                    raise UnsupportedError(f"{what} failed',
        '                if False:\n                    raise UnsupportedError(f"{what} failed',
        unit("pool", "no_rank_goes_on_with_a_registration_that_has_failed_on_one"),
    ),
    Mutant(
        "peers' outputs are written wherever they say",
        REGISTRATION,
        "            if number >= 0 and offset + size > held:\n",
        "            if False:\n",
        "mpirun -n 3 tests.sim.scenarios registration_that_lies",
    ),
    Mutant(
        "a graph's memory is freed while a peer has it mapped",
        MAPPINGS,
        "return bool((self._words[:, serial % MARKS] == serial + 1).all())",
        "return bool((self._words[:, serial % MARKS] == serial + 1).any())",
        unit("pool", "memory_stays_until_every_rank_has_dropped_the_graph"),
    ),
    Mutant(
        "a slab that another graph uses is unmapped",
        MAPPINGS,
        "if self._uses[key] <= 0]:",
        "if self._uses[key] <= 1]:",
        unit("pool", "a_slab_is_mapped_once_and_as_long_as_a_graph_uses_it"),
    ),
]
