"""Mutants of what goes wrong on one rank: nested calls, texts of foreign objects, exceptions at start-up."""

from __future__ import annotations

from tests.mutants import Mutant, unit

TURNS, CALLS = "ipcreduce/calls/turns.py", "ipcreduce/calls/sequence.py"
EXCHANGE, WATCHDOG = "ipcreduce/ranks/exchange.py", "ipcreduce/page/watchdog.py"
TEXTS, STARTUP, COMMUNICATOR, OPEN, LIFETIME = (
    f"ipcreduce/{name}.py" for name in ("texts", "startup", "communicator", "open_communicator", "process")
)
CONNECTIONS = "ipcreduce/ranks/connections.py"
FAST_PATH, IPC_STARTUP = "ipcreduce/device/fast_path.py", "ipcreduce/ipc/peers.py"


def on_hosts(scenario: str, how: str = "memory") -> str:
    """The command that runs one scenario of NumPy arrays on two ranks."""
    return f"CUDA_VISIBLE_DEVICES= mpirun -n 2 tests/mpi/host_worker.py {how} {scenario}"


MUTANTS = [
    # ---- nested calls
    Mutant(
        "a nested call is made",
        TURNS,
        "        if calls.within or calls.nested:\n            make_way(calls)\n",
        "",
        unit("calls", "a_nested_call_is_refused_and_the_one_around_it_is_made"),
    ),
    Mutant(
        "a nested call is made on the fast path",
        FAST_PATH,
        "            if calls.within or calls.nested:\n                turns.make_way(calls)\n",
        "",
        unit("calls", "a_nested_call_is_refused_and_the_one_around_it_is_made"),
    ),
    Mutant(
        "a nested call is told while the one around it waits",
        TURNS,
        "    calls.nested.append(partial(calls.fail, error, begun=False))\n    raise error\n",
        "    calls.within = False\n    calls.fail(error, begun=False)\n    calls.within = True\n    raise error\n",
        unit("calls", "a_nested_call_is_refused_and_the_one_around_it_is_made"),
    ),
    Mutant(
        "the peers do not hear of a nested call",
        TURNS,
        "        calls.nested.pop(0)()\n\n\ndef alone",
        "        calls.nested.pop(0)\n\n\ndef alone",
        on_hosts("nested"),
    ),
    Mutant(
        "a nested call in one that fails is forgotten",
        TURNS,
        "        while calls.nested:\n            calls.nested.pop(0)()\n",
        "        calls.nested.clear()\n",
        unit("calls", "a_nested_call_in_one_that_fails_is_told_behind_the_meeting"),
    ),
    Mutant(
        "a call in the vote of a recording is made",
        TURNS,
        "        calls.within = True\n        return body(*given)\n    finally:\n",
        "        return body(*given)\n    finally:\n",
        unit("calls", "a_call_in_an_exchange_of_the_same_thread_is_refused"),
    ),
    Mutant(
        "a nested close() takes the ground from under the call around it",
        OPEN,
        "            if calls.within:  # by a signal handler or a finaliser\n",
        "            if False:\n",
        on_hosts("nested"),
    ),
    # ---- texts
    Mutant(
        "a lone surrogate is not encoded",
        TEXTS,
        '    data = str.encode(text, "utf-8", "backslashreplace")\n',
        '    data = str.encode(text, "utf-8")\n',
        unit("texts", "a_text_in_a_record"),
    ),
    Mutant(
        "a text that cannot be made replaces the exception",
        TEXTS,
        "        return printable(str(thing))\n    except Exception as error:\n",
        "        return printable(str(thing))\n    except MemoryError as error:\n",
        on_hosts("texts_of_any_kind"),
    ),
    Mutant(
        "a text is cut within a character",
        TEXTS,
        'data[:most].decode(errors="ignore").encode()',
        "data[:most]",
        unit("texts", "a_text_is_cut_between_characters"),
    ),
    Mutant(
        "a fault counts as raised before it stands on the page",
        CALLS,
        "        self._post(control_page.REFUSED, described(error), raised=True)\n",
        "        self.raised = True\n        self._post(control_page.REFUSED, described(error))\n",
        unit("calls", "a_fault_that_cannot_be_posted_is_not_raised"),
    ),
    # ---- start-up
    Mutant(
        "only errors of ours and of the system are told by a step",
        EXCHANGE,
        "    except BaseException as caught:\n        error = caught\n    try:\n        confirm(",
        "    except (IpcReduceError, OSError) as caught:\n        error = caught\n    try:\n        confirm(",
        unit("exchange", "a_step_tells_of_any_exception"),
    ),
    Mutant(
        "an exception outside of a step is not told",
        STARTUP,
        "        exchange.tell(ranks, error, deadline)\n",
        "",
        on_hosts("warnings_at_start_up"),
    ),
    Mutant(
        "a rank that leaves counts as a mismatch",
        EXCHANGE,
        "    _raise_left(ranks, gathered, what)\n",
        "",
        unit("exchange", "a_rank_that_leaves_is_named_at_the_next_exchange"),
    ),
    Mutant(
        "warnings are given behind the last vote",
        COMMUNICATOR,
        "                warnings.warn(text, RuntimeWarning, stacklevel=2)\n",
        "                warnings.warn(text, RuntimeWarning, stacklevel=2) if self.rank == 0 else None\n",
        on_hosts("warnings_at_start_up"),
    ),
    Mutant(
        "a rank without descriptors is sent another way",
        EXCHANGE,
        "_LACKS if out_of_descriptors(error) else _STAYS",
        "_STAYS",
        unit("exchange", "a_step_without_descriptors_leads_to_no_other_way"),
    ),
    Mutant(
        "a rank without descriptors is on another host",
        STARTUP,
        '        if out_of_descriptors(error):\n            raise\n        return ""\n',
        '        return ""\n',
        unit("startup", "a_process_that_can_open_no_file_is_on_no_other_host"),
    ),
    Mutant(
        "a watch without descriptors misses the rank's end",
        WATCHDOG,
        "                if out_of_descriptors(error):\n                    raise\n",
        "",
        unit("watchdog", "without_a_descriptor_the_watch_is_an_error_and_leaves_nothing"),
    ),
    Mutant(
        "an address is cut",
        CONNECTIONS,
        "        addresses = addresses[:-1]\n",
        "        return text\n",
        unit("mirror", "all_addresses_of_a_host_are_told_as_far_as_they_fit"),
    ),
    Mutant(
        "long names of hosts are cut",
        STARTUP,
        '    return hashlib.sha256(b"\\0".join(map(encoded, parts))).hexdigest()\n',
        '    return "".join(parts)\n',
        on_hosts("names_of_hosts"),
    ),
    Mutant(
        "clocks of two time namespaces are compared",
        STARTUP,
        '    return _digest(boot, _namespace("time")) if boot else ""\n',
        "    return _digest(boot)\n",
        "pytest tests/mpi/test_security.py::test_clocks_of_their_own",
    ),
    Mutant(
        "the others do not hear by what a rank has left the communicator's block",
        OPEN,
        "            if why:\n",
        "            if False:\n",
        on_hosts("a_block_that_raises"),
    ),
    Mutant(
        "the others do not hear by what a program has ended",
        LIFETIME,
        '    return f"its program ended with {described(error)}"\n',
        '    return "its program ended"\n',
        "pytest tests/mpi/test_failures.py::test_the_end_of_a_program_is_told",
    ),
    Mutant(
        "a rank that leaves the start-up of our kernels waits for those that are past it",
        IPC_STARTUP,
        "            if isinstance(error, Agreed):\n",
        "            if True:\n",
        "CUDA_VISIBLE_DEVICES=0,1 mpirun -n 2 tests.sim.scenarios exceptions_at_start_up",
    ),
]
