"""Mutants of the backends: stream order, fast path, plan, workspace, ends; and of NCCL's."""

from __future__ import annotations

from tests.mutants import Mutant, unit

FAST, KNOWN, ORDER, FREEING = (
    f"ipcreduce/device/{name}.py" for name in ("fast_path", "known_calls", "stream_order", "deferred_free")
)
PLAN, BACKEND, LAUNCHES, READY = (f"ipcreduce/ipc/{name}.py" for name in ("plan", "backend", "launches", "ready"))
STARTUP, WORKSPACE, LINKS = (f"ipcreduce/ipc/{name}.py" for name in ("peers", "workspace", "links"))
CUPY, TORCH = "ipcreduce/cuda/cupy_runtime.py", "ipcreduce/cuda/torch_runtime.py"
GUARD, NCCL, LIBRARY = (f"ipcreduce/nccl/{name}.py" for name in ("guard", "backend", "library"))


def late(program: str, scenario: str) -> str:
    """The command of a scenario of ``tests/gpu`` in which each piece of work begins late, at random."""
    return f"SIM_LATE=0.005 mpirun -n 2 tests.simulated tests/gpu/{program}.py {scenario}"


def quick(scenario: str) -> str:
    """The command of a scenario of tests/graphs."""
    return f"mpirun -n 2 tests.graphs --sim {scenario}"


def scenario(name: str, ranks: int = 2) -> str:
    """The command of a scenario of tests/sim/scenarios."""
    return f"mpirun -n {ranks} tests.sim.scenarios {name}"


MUTANTS = [
    # ---- one order
    Mutant(
        "the fast path launches on any stream without an event",
        ORDER,
        "        last = self.last\n        state = last.state\n",
        "        last = Last(ON_STREAM, stream)\n        state = last.state\n",
        scenario("after_a_wait"),
    ),
    Mutant(
        "a call on another stream does not wait for the last one",
        ORDER,
        "            self.chain(busy, stream)\n        return True\n",
        "        return True\n",
        scenario("overtakes_nothing"),
    ),
    Mutant(
        "a call does not wait for the event of the last one",
        ORDER,
        "            streams.wait_event(stream, self._end)\n        elif busy is not None",
        "            pass\n        elif busy is not None",
        scenario("overtakes_nothing"),
    ),
    Mutant(
        "calls in a capture are in no order",
        ORDER,
        "            streams.follow_nodes(stream, tuple(missing))\n",
        "            pass\n",
        scenario("joins_an_open_capture"),
    ),
    Mutant(
        "a kernel behind a call in a capture loses its early start",
        ORDER,
        "if not graph.lets_start_early(node)}",
        "}",
        scenario("behind_a_kernel_that_starts_early"),
    ),
    Mutant(
        "a call on another stream of a capture is in no order behind a kernel that starts early",
        ORDER,
        "        if stream == captured.stream:\n",
        "        if True:\n",
        scenario("behind_a_kernel_that_starts_early"),
    ),
    Mutant(
        "graphs of others do not wait for the last call",
        ORDER,
        "graph.move_edges(captured_graph, (), (wait,), end)\n        return _Captured((wait,), captured_graph, end)",
        "graph.move_edges(captured_graph, (), (wait,), end)\n        return _Captured((), captured_graph, end)",
        scenario("order_of_a_graph_of_others"),
    ),
    Mutant(
        "the stream of the last call is kept by its handle alone",
        ORDER,
        "if always or not (cupy_runtime.keeps(owner, stream) or torch_runtime.keeps(owner)):",
        "if always:",
        "mpirun -n 2 tests.simulated tests/gpu/scenarios.py destroyed_streams",
    ),
    Mutant(
        "a call waits for the work behind the one before it",
        ORDER,
        "        before = last.stream if last.in_event else last.busy\n",
        "        before = last.stream if last.in_event else None\n",
        "mpirun -n 2 tests.simulated tests/gpu/scenarios.py work_behind_a_call",
    ),
    Mutant(
        "a recording counts as a change of streams",
        ORDER,
        " and self.recording_stream not in (before, stream)",
        "",
        "mpirun -n 2 tests.sim.scenarios what_the_driver_is_asked",
    ),
    Mutant(
        "the fast path does not wait for calls on other streams",
        ORDER,
        "            cupy_runtime.wait_event(stream, self._end)\n",
        "            pass\n",
        scenario("overtakes_nothing"),
    ),
    Mutant(
        "the fast path does not record the end of a call",
        ORDER,
        '            doing = "cudaEventRecord"\n            cupy_runtime.record_event(self._end, stream)\n',
        '            doing = "cudaEventRecord"\n',
        scenario("overtakes_nothing"),
    ),
    Mutant(
        "NCCL is to order captured calls though it is told not to",
        NCCL,
        'timeout, os.environ.get(library.MIXING, "1") != "0")',
        "timeout, True)",
        "NCCL_GRAPH_MIXING_SUPPORT=0 IPCREDUCE_BACKEND=nccl " + late("captures", "two_graphs"),
    ),
    Mutant(
        "synchronize() does not wait for replays of others over NCCL",
        ORDER,
        "if stream is None and self.shared and self._replayed is not None:",
        "if False:",
        scenario("nccl_replays_of_others"),
    ),
    Mutant(
        "the guard does not know of replays of others over NCCL",
        ORDER,
        "if self._replayed is not None and not streams.is_over(self._replayed):",
        "if False:",
        scenario("nccl_replays_of_others"),
    ),
    # ---- borrowed streams
    Mutant(
        "what a call allocates on another stream is given back on the current one",
        CUPY,
        'if getattr(place.mem, "stream_ref", None) is None:',
        "if True:",
        "mpirun -n 2 tests.simulated tests/gpu/scenarios.py asynchronous_pool",
    ),
    Mutant(
        "PyTorch is told of a stream that may be gone when it looks at it",
        TORCH,
        "    if stream > 1 and not keeps(owner):\n",
        "    if False:\n",
        scenario("a_stream_that_goes_before_its_tensors"),
    ),
    Mutant(
        "PyTorch's stream does not wait for the call of which it is to tell",
        TORCH,
        "        streams.let_wait(own, stream)\n",
        "",
        scenario("a_stream_that_goes_before_its_tensors"),
    ),
    # ---- the fast path
    Mutant(
        "the fast path does not look at the abort word",
        FAST,
        "if not argument or self._abort_word[0]:",
        "if not argument:",
        quick("faults_are_noticed"),
    ),
    Mutant(
        "the fast path does not compare calls",
        FAST,
        "if slots[slot] != agreed[what.crc] and self._recorder.differing(number) is not None:",
        "if False:",
        unit("calls", "the_fast_path_sees_another_call"),
    ),
    Mutant(
        "the fast path takes an array for another one at its place in memory",
        KNOWN,
        "if known.array() is not array or (out is not array and known.out() is not out):",
        "if False:",
        quick("arrays_in_the_place_of_others"),
    ),
    Mutant(
        "the fast path takes an out for another one at its place in memory",
        KNOWN,
        "(out is not array and known.out() is not out)",
        "False",
        quick("arrays_in_the_place_of_others"),
    ),
    Mutant(
        "a call is taken for one at the same places with another op",
        KNOWN,
        "at = source, other[0], shape, kind, op",
        "at = source, other[0], shape, kind",
        quick("other_arrays_at_the_same_places"),
    ),
    Mutant(
        "a call is taken for one at the same places with another shape",
        KNOWN,
        "at = source, other[0], shape, kind, op",
        "at = source, other[0], kind, op",
        quick("other_arrays_at_the_same_places"),
    ),
    Mutant(
        "a call is taken for one at the same places with another dtype",
        KNOWN,
        "at = source, other[0], shape, kind, op",
        "at = source, other[0], shape, op",
        quick("other_arrays_at_the_same_places"),
    ),
    Mutant(
        "a call is taken for one at the same places with another result's place",
        KNOWN,
        "at = source, other[0], shape, kind, op",
        "at = source, shape, kind, op",
        quick("other_arrays_at_the_same_places"),
    ),
    Mutant(
        "the fast path does not see that an array has another shape",
        KNOWN,
        "if array.shape != shape or (out is not array and out is not None and out.shape != shape):",
        "if False:",
        quick("outs_shape"),
    ),
    Mutant(
        "the fast path takes an out that overlaps the input in part",
        KNOWN,
        "        elif 0 < abs(target - source) < prepared.nbytes:\n            return NOT_READY\n",
        "",
        quick("not_as_quick"),
    ),
    Mutant(
        "a call of several launches is not quick",
        LAUNCHES,
        "fast=nbytes > 0,",
        "fast=len(launches) == 1,",
        quick("in_several_launches"),
    ),
    Mutant(
        "a result is made on another stream than it is used on",
        KNOWN,
        "return None if given != current and only_current else given",
        "return given",
        scenario("results_are_tensors"),
    ),
    # ---- plan
    Mutant(
        "a tuned grid beyond the epochs is accepted",
        PLAN,
        "and 0 < choice.blocks <= EPOCH_SLOTS):",
        "and 0 < choice.blocks):",
        unit("plan", "a_choice_that_no_kernel_runs_by_is_refused"),
    ),
    Mutant(
        "a tuned table may be in any order",
        PLAN,
        "if len(table) > MOST_CHOICES or sizes != sorted({*sizes}):",
        "if len(table) > MOST_CHOICES:",
        unit("plan", "tables_are_in_order_and_short"),
    ),
    Mutant(
        "two ops share their slots",
        PLAN,
        "return CODE_BYTES * (KIND_NAMES.index(dtype) * len(OPS) + OPS.index(op))",
        "return CODE_BYTES * (KIND_NAMES.index(dtype) * len(OPS))",
        unit("plan", "codes_are_apart"),
    ),
    Mutant(
        "the plan depends on this rank's GPU",
        STARTUP,
        'min(plan.EPOCH_SLOTS, 2 * int(devices["multiprocessors"].min()))',
        'min(plan.EPOCH_SLOTS, 2 * int(devices["multiprocessors"][rank]))',
        scenario("one_smaller_gpu"),
    ),
    Mutant(
        "ranks that share a GPU fill it alone",
        STARTUP,
        "backend.launches.sharing = most_on_a_gpu(devices)",
        "backend.launches.sharing = 1",
        "SIM_DEVICES=1 " + scenario("shared_gpus"),
    ),
    Mutant(
        "a grid of ranks on one GPU may be twice too large",
        PLAN,
        "else max(1, resident // (2 * sharing))",
        "else max(1, resident // sharing)",
        unit("plan", "grids_of_ranks_on_one_gpu_are_resident_at_once"),
    ),
    Mutant(
        "the launches of a large message all write its beginning",
        LAUNCHES,
        "target + part.offset",
        "target",
        "mpirun -n 2 tests.simulated tests/gpu/sweep.py --cases 1 --largest 2000000 --smallest 1500000 --seed 164",
    ),
    Mutant(
        "a wait of a kernel ends a thousand times too late",
        LAUNCHES,
        "args[_TIMEOUT] = int(self._timeout * 1e9)",
        "args[_TIMEOUT] = int(self._timeout * 1e12)",
        unit("kernel_layout", "a_wait_goes_on_until_the_timeout"),
    ),
    Mutant(
        "packets over PCIe travel whole",
        LINKS,
        "    if links[a, b] == _PCIE:\n",
        "    if False:\n",
        scenario("packets_over_pcie", 3),
    ),
    # ---- workspace and ends
    Mutant(
        "an interrupt leaves another context current",
        "ipcreduce/cuda/contexts.py",
        "            super().__exit__()\n            raise\n",
        "            raise\n",
        unit("contexts", "an_interrupt_leaves_the_threads_own"),
    ),
    Mutant(
        "an interrupt as the background's thread starts leaves jobs to nobody",
        "ipcreduce/device/background.py",
        "            threading.Thread(target=_run, args=[_jobs], name=_NAME, daemon=True).start()\n",
        "            old = before\n            jobs, _jobs = _jobs, old\n"
        "            threading.Thread(target=_run, args=[jobs], name=_NAME, daemon=True).start()\n"
        "            _jobs = jobs\n",
        unit("background", "an_interrupt_as_the_thread_starts_leaves_one_that_serves"),
    ),
    Mutant(
        "a rank that closes because of a loss is taken for the reason",
        "ipcreduce/device/backend.py",
        "        if page.loss() is None:\n",
        "        if True:\n",
        unit("device_backend", "a_rank_that_closes_because_of_a_loss_is_not_taken_for_the_reason"),
    ),
    Mutant(
        "a rank that closes because of a loss does not end its waits",
        "ipcreduce/device/backend.py",
        "            page.abort(TOLD)\n",
        "            pass\n",
        unit("device_backend", "a_rank_that_closes_because_of_a_loss_is_not_taken_for_the_reason"),
    ),
    Mutant(
        "after a fault the slots are not emptied",
        BACKEND,
        "            self.workspace.reset()\n",
        "            pass\n",
        "mpirun -n 2 tests.simulated tests/gpu/scenarios.py late_and_recover",
    ),
    Mutant(
        "the peers' workspaces are mapped in another order",
        WORKSPACE,
        "handles[(self.rank + i) % self.n]",
        "handles[(self.rank - i) % self.n]",
        "mpirun -n 3 tests.graphs --sim same_bits",
    ),
    Mutant(
        "virtual memory is unmapped before all work has ended",
        "ipcreduce/cuda/virtual_memory.py",
        "                driver.synchronize()\n",
        "                pass\n",
        unit("bindings", "virtual_memory_is_asked_for"),
    ),
    Mutant(
        "an imported workspace that cannot be mapped keeps its addresses",
        "ipcreduce/ipc/virtual.py",
        "            there.close()\n            raise\n",
        "            raise\n",
        scenario("virtual_driver_faults"),
    ),
    Mutant(
        "a descriptor of any process of this user is taken",
        "ipcreduce/ranks/descriptors.py",
        " or pids.get(rank) != pid",
        " or rank not in pids",
        unit("descriptors", "a_process_that_is_no_rank_is_not_heard"),
    ),
    Mutant(
        "a descriptor of another user is taken",
        "ipcreduce/ranks/descriptors.py",
        "if uid != os.getuid() or",
        "if",
        unit("descriptors", "another_user_is_not_heard"),
    ),
    Mutant(
        "a workspace is freed while a peer has it mapped",
        BACKEND,
        "free_after(partial(have_left, self.page), self.context,",
        "free_after(lambda: True, self.context,",
        scenario("freed_once_unmapped"),
    ),
    Mutant(
        "a rank leaves before it has unmapped its peers' memory",
        "ipcreduce/device/backend.py",
        "        attempt(self.context, *(unmap for unmap, _ in self.shared))\n",
        "        self.page.leave()\n        attempt(self.context, *(unmap for unmap, _ in self.shared))\n",
        scenario("freed_once_unmapped"),
    ),
    Mutant(
        "a graph gives its resources back twice",
        "ipcreduce/graphs/recording.py",
        "            self._released = True\n",
        "",
        unit("pool", "a_graph_that_ends_twice_is_one_user"),
    ),
    Mutant(
        "memory is freed at once, whoever makes a call",
        FREEING,
        "                if not _no_call_runs(held):\n                    return\n",
        "",
        unit("deferred_free", "nothing_is_freed_beside_a_call"),
    ),
    Mutant(
        "memory is freed while a call runs on the device",
        FREEING,
        "if not lock.acquire(blocking=False) or not order.is_over():",
        "if not lock.acquire(blocking=False):",
        unit("deferred_free", "nothing_is_freed_beside_a_call"),
    ),
    # ---- NCCL
    Mutant(
        "a recording across an abort of NCCL's communicator succeeds",
        "ipcreduce/graphs/session.py",
        "elif recording.life.ended:",
        "elif False:",
        scenario("nccl_recordings_across_an_abort"),
    ),
    Mutant(
        "the abort of NCCL's communicator hides its cause at the end of a recording",
        "ipcreduce/graphs/session.py",
        "theirs, stale = exactly, None",
        "theirs = exactly",
        "IPCREDUCE_BACKEND=nccl mpirun -n 3 tests.graphs --sim exception_between_breaks",
    ),
    Mutant(
        "close() gives a busy device up later",
        "ipcreduce/device/backend.py",
        "if not job.wait(process.at_most(_GIVE_UP_SECONDS)):",
        "if not job.wait(2 * _GIVE_UP_SECONDS):",
        scenario("closed_on_a_busy_device"),
    ),
    Mutant(
        "close() waits longer for a peer that does not close",
        "ipcreduce/open_communicator.py",
        "_CLOSE_SECONDS = 5.0",
        "_CLOSE_SECONDS = 7.0",
        scenario("never_closed"),
    ),
    Mutant(
        "a job is waited for by the system's clock",
        "ipcreduce/device/background.py",
        "clock.wait(self._has_ended, seconds)",
        "self._has_ended(max(0.0, seconds))",
        unit("clock", "a_job_is_waited_for_by_the_clock"),
    ),
    Mutant(
        "a wait goes on a slice after its time",
        "ipcreduce/clock.py",
        "if now() >= until:",
        "if now() > until + _SLICE_SECONDS:",
        unit("clock", "a_wait_of_no_time_asks_once"),
    ),
    Mutant(
        "a refusal waits without end for work behind earlier calls",
        "ipcreduce/device/backend.py",
        "self.order.ends_by(clock.now() + self._timeout)",
        "self.order.ends_by(float('inf'))",
        scenario("other_work_behind_a_call"),
    ),
    Mutant(
        "an error of NCCL's is told though the ranks have met since it was seen",
        GUARD,
        "                if current:\n                    page.post_fault",
        "                if True:\n                    page.post_fault",
        unit("nccl", "what_was_seen_before_the_ranks_met_is_not_acted_on"),
    ),
    Mutant(
        "NCCL's communicator is aborted though the ranks have met since it was seen",
        GUARD,
        "                    if current:  # otherwise",
        "                    if True:  # otherwise",
        unit("nccl", "what_was_seen_before_the_ranks_met_is_not_acted_on"),
    ),
    Mutant(
        "a timeout is posted though the ranks have met since it was seen",
        GUARD,
        "            if current:\n                page.post_timeout",
        "            if True:\n                page.post_timeout",
        unit("nccl", "what_was_seen_before_the_ranks_met_is_not_acted_on"),
    ),
    Mutant(
        "NCCL's communicator is aborted in the foreground",
        "ipcreduce/nccl/comm.py",
        "        self._last_close = Job(partial(self._close_now, close, comm))  # not under the lock: it may run now\n",
        "        self._close_now(close, comm)\n",
        unit("nccl", "an_abort_does_not_wait_for_graphs"),
    ),
    Mutant(
        "NCCL averages by its sum",
        LIBRARY,
        '"avg": 4}',
        '"avg": 0}',
        scenario("nccl_results"),
    ),
    Mutant(
        "NCCL takes 64-bit integers for 32-bit ones",
        LIBRARY,
        '"int64": 4, "uint64": 5,',
        '"int64": 2, "uint64": 5,',
        scenario("nccl_results"),
    ),
    Mutant(
        "the guard aborts a call that would end by itself",
        GUARD,
        "            elif clock.now() - self._aborting > _GRACE_SECONDS:\n",
        "            else:\n",
        unit("nccl", "a_call_that_ends_within_the_grace_is_left_alone"),
    ),
    Mutant(
        "the guard names ranks that have come",
        GUARD,
        "if page.calls.call_of(rank) < number]",
        "if page.calls.call_of(rank) <= number]",
        unit("nccl", "a_call_that_does_not_end_names_who_is_behind"),
    ),
    Mutant(
        "the guard takes a call for launched that has only been entered",
        GUARD,
        "        number = self._order.launched  #",
        "        number = self._page.calls.number[0]  #",
        unit("nccl", "a_call_that_is_launched_late_is_watched"),
    ),
    Mutant(
        "the guard marks the order within a launch",
        ORDER,
        "        if self._open:\n            return False\n        if last",
        "        if last",
        unit("nccl", "the_order_is_not_marked_within_a_launch"),
    ),
    Mutant(
        "the guard leaves calls alone that wait in NCCL",
        GUARD,
        "if self._order.is_over() and nccl.enqueuing is None:",
        "if self._order.is_over():",
        unit("nccl", "a_call_that_waits_in_nccl_is_late_too"),
    ),
    Mutant(
        "the guard takes quick calls for one that waits",
        GUARD,
        " or number != self._enqueuing_at:",
        ":",
        unit("nccl", "many_calls_that_are_quick_are_none_that_waits"),
    ),
    Mutant(
        "the fast path does not tell of its launches",
        FAST,
        "        order.launched = number\n",
        "",
        scenario("nccl_repeated_call_that_is_late"),
    ),
    Mutant(
        "a norm is launched past what NCCL's guard reads",
        "ipcreduce/device_reducer.py",
        "        self._run(place, partial(backend.norms.start, prepared, addresses))\n",
        "        backend.order.launch(partial(backend.norms.start, prepared, addresses), stream, place.owner)\n",
        scenario("nccl_timeouts"),
    ),
    Mutant(
        "a start-up waits for NCCL's first sum without a deadline",
        "ipcreduce/nccl/join.py",
        ".wait(_half(deadline) - clock.now()):",
        ".wait(60.0):",
        scenario("nccl_start_up_that_hangs"),
    ),
    Mutant(
        "a rank that ends in a join is noticed at the timeout",
        NCCL,
        "            raise_lost(self.page, number, any_call=True)\n",
        "",
        "pytest tests/sim/test_nccl.py::test_a_rank_that_is_killed",
    ),
    Mutant(
        "a communicator that was dropped ends its calls",
        "ipcreduce/open_communicator.py",
        "            self.session.close(0.0 if lost else _CLOSE_SECONDS)\n",
        "            self.session.close(0.0)\n",
        scenario("dropped_with_a_call"),
    ),
    Mutant(
        "a job waits for the one that makes it",
        "ipcreduce/device/background.py",
        "            at_once = behind and not start(anew=True) and",
        "            at_once = False and behind and not start(anew=True) and",
        unit("background", "a_job_that_makes_a_job_which_no_thread_can_run"),
    ),
    Mutant(
        "a graph that holds an aborted communicator of NCCL's is launched",
        "ipcreduce/graphs/session.py",
        "            if segment.life.ended:\n",
        "            if False:\n",
        scenario("nccl_graphs"),
    ),
    Mutant(
        "NCCL's next communicator is made while the last one is being freed",
        "ipcreduce/nccl/backend.py",
        "            self.nccl.is_freed(_FREE_SECONDS)\n",
        "            pass\n",
        unit("nccl", "the_next_communicator_is_made_when_the_last_one_is_freed"),
    ),
    Mutant(
        "a call that a signal handler makes during synchronize() is forgotten",
        ORDER,
        "if self.launched != launched or self.last is not last:",
        "if False:",
        "mpirun -n 2 tests.sim.scenarios called_within_synchronize",
    ),
]
