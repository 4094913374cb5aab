"""Mutants of how ranks see and hear each other: flight recorder, watchdog, mirror between hosts, start-up."""

from __future__ import annotations

from tests.mutants import Mutant, unit
from tests.mutants.calls import PAGE

RECORDER, MIRROR, WATCHDOG, COMPARISON = (
    f"ipcreduce/page/{name}.py" for name in ("flight_recorder", "mirror", "watchdog", "comparison")
)
STARTUP, HOST = "ipcreduce/startup.py", "mpirun -n 2 tests/mpi/host_worker.py memory"
CONNECTIONS, EXCHANGE = "ipcreduce/ranks/connections.py", "ipcreduce/ranks/exchange.py"

MUTANTS = [
    Mutant(
        "rank 0 alone hears that it cannot write",
        "ipcreduce/bench/output.py",
        "        problem = mpi.bcast(problem)\n",
        "        pass\n",
        "pytest tests/mpi/test_cli.py::test_rank_0_cannot_write",
    ),
    Mutant(
        "what cannot be written is left to the interpreter's end",
        "ipcreduce/bench/output.py",
        "            with suppress(OSError):  # a",
        "            if False:  # a",
        "pytest tests/mpi/test_cli.py::test_an_output_that_cannot_be_written",
    ),
    # ---- the flight recorder
    Mutant(
        "a call's number is written before its key",
        RECORDER,
        "        if self.recorded[slot] is not what:  # else it is there from RING calls ago\n",
        "        self.number[0] = call\n        if self.recorded[slot] is not what:\n",
        unit("flight_recorder", "a_slot_is_written_before_its_number_and_compared_behind_it"),
    ),
    Mutant(
        "every slot is compared as the first one",
        RECORDER,
        "self._keys[slot * self._n : (slot + 1) * self._n]",
        "self._keys[: self._n]",
        unit("flight_recorder", "that_all_agree_is_seen_at_one_look"),
    ),
    Mutant(
        "a slot that is being overwritten is compared",
        RECORDER,
        "< call + RING - 1",
        "< call + RING",
        unit("flight_recorder", "a_slot_that_is_being_overwritten_is_not_compared"),
    ),
    Mutant(
        "a key that comes late is taken for another call",
        RECORDER,
        "ask_twice(partial(self._differs, rank, call))",
        "self._differs(rank, call)",
        unit("flight_recorder", "a_key_that_comes_late_is_no_difference"),
    ),
    Mutant(
        "a key stands for a moment beside the text of another call",
        RECORDER,
        '        entry["key"] = 0  # while it has another one\'s text\n',
        "",
        unit("flight_recorder", "no_key_stands_beside_the_text_of_another"),
    ),
    Mutant(
        "a refusal hides an earlier call that differs",
        "ipcreduce/calls/faults.py",
        "fault = _difference_before(page, call if fault is None else fault[0]) or fault",
        "pass",
        unit("control_page", "a_difference_that_nobody_has_found_comes_before_a_refused_call"),
    ),
    Mutant(
        "a mismatch is posted though the ranks have met since it was seen",
        COMPARISON,
        "                if current and not page.aborted:\n",
        "                if not page.aborted:\n",
        unit("comparison", "a_mismatch_is_not_posted_once_the_ranks_meet"),
    ),
    Mutant(
        "the watchdog posts a mismatch at once, and ends earlier calls",
        COMPARISON,
        " or clock.now() - found.seen > _PATIENCE_SECONDS)",
        " or True)",
        unit("comparison", "a_mismatch_is_left_to_the_ranks_for_a_while"),
    ),
    Mutant(
        "a mismatch that was raised stays found",
        COMPARISON,
        "(found.era != page.era or clock.now()",
        "(clock.now()",
        unit("comparison", "a_mismatch_that_the_ranks_have_raised_is_forgotten"),
    ),
    Mutant(
        "a resynchronisation does not begin an era",
        "ipcreduce/calls/sequence.py",
        "        page.next_era()\n",
        "",
        unit("comparison", "an_era_ends_before_the_ranks_meet_and_as_the_page_is_cleared"),
    ),
    Mutant(
        "an era does not end as the page is cleared",
        PAGE,
        "            self.next_era()\n",
        "",
        unit("comparison", "an_era_ends_before_the_ranks_meet_and_as_the_page_is_cleared"),
    ),
    # ---- the watchdog
    Mutant(
        "a watch that fails ends the watchdog's thread",
        WATCHDOG,
        "            except Exception:  # the other watches need",
        "            except MemoryError:  # the other watches need",
        unit("watchdog", "a_page_stays_watched_while_another_ones_watch_fails"),
    ),
    Mutant(
        "the watchdog ignores a death",
        WATCHDOG,
        "            self.lost = self.lost or (rank, why)\n",
        "            pass\n",
        unit("watchdog", "a_death_is_seen_at_once"),
    ),
    Mutant(
        "a process with the number of one that ended is taken for that",
        WATCHDOG,
        "        if process is not None and process.descriptor in self._ready():",
        "        if False:",
        unit("watchdog", "a_process_that_has_got_the_number_of_one_that_ended"),
    ),
    Mutant(
        "a rank that closed and ended counts as dead",
        WATCHDOG,
        "        if not self._page.has_left(rank):\n",
        "        if True:\n",
        unit("watchdog", "a_rank_that_closed_may_end"),
    ),
    Mutant(
        "the abort word is raised once only after a loss",
        PAGE,
        "            if new or not self.aborted:",
        "            if new:",
        unit("watchdog", "the_abort_word_stays_up"),
    ),
    # ---- between hosts
    Mutant(
        "the last words stay behind where a connection was full before",
        MIRROR,
        "            for _ in range(2):  # what",
        "            for _ in range(1):  # what",
        unit("mirror", "the_last_words_go_behind_what_a_connection_had_not_taken"),
    ),
    Mutant(
        "the mirror drops aborts",
        MIRROR,
        "aborts = raised - peer.aborts",
        "aborts = 0",
        unit("mirror", "what_is_written_arrives_with_the_page_untouched_elsewhere"),
    ),
    Mutant(
        "an abort comes back from those who were told",
        PAGE,
        "            self._words32[ABORT_OFFSET // 4] = why or TOLD\n",
        "            self.abort(why or TOLD)\n",
        unit("mirror", "an_abort_does_not_come_back_later"),
    ),
    Mutant(
        "the mirror drops the texts of calls",
        MIRROR,
        'new_texts = b"" if full else calls.own_texts(begin, texts[1])',
        'new_texts = b""',
        unit("mirror", "calls_arrive_with_their_texts"),
    ),
    Mutant(
        "what a peer has read is not noted",
        MIRROR,
        "            peer.acknowledged = read\n",
        "",
        unit("mirror", "a_rank_that_does_not_read_is_not_flooded"),
    ),
    Mutant(
        "a process that is stopped fills its connection",
        MIRROR,
        "full = peer.sent - peer.acknowledged > _MOST_UNREAD",
        "full = False",
        unit("mirror", "a_rank_that_does_not_read_is_not_flooded"),
    ),
    Mutant(
        "calls before a resynchronisation are compared after it",
        RECORDER,
        "max(first, self.first, newest - RING + 2)",
        "max(first, newest - RING + 2)",
        unit("comparison", "calls_that_a_resynchronisation_left_out_are_not_compared"),
    ),
    Mutant(
        "slots that are written again during a look are compared",
        RECORDER,
        "        differing = differing[differing >= self._newest(rank) - RING + 2]  # the ranks go on meanwhile\n",
        "",
        unit("comparison", "slots_that_are_written_again_during_the_look_are_left_out"),
    ),
    Mutant(
        "a call that may be withdrawn is compared",
        COMPARISON,
        "        last -= not (settled and self._number == calls.call_of(rank))\n",
        "",
        unit("comparison", "a_last_call_is_compared_once_it_stands"),
    ),
    Mutant(
        "a key that has not arrived is taken for another call afterwards",
        RECORDER,
        "ask_twice(partial(self.first_differing, rank, first, last))",
        "self.first_differing(rank, first, last)",
        unit("comparison", "a_key_that_comes_behind_its_number_is_no_difference"),
    ),
    Mutant(
        "a watch that has ended still writes to its pipe",
        WATCHDOG,
        "self._epoll, self._wake_read, self._wake_write = None, -1, -1",
        "self._epoll = None",
        unit("watchdog", "nothing_is_written_to_a_pipe_that_is_closed"),
    ),
    Mutant(
        "calls of one host are not compared afterwards",
        WATCHDOG,
        "            self.comparison.look()\n",
        "            if self.mirror.descriptors():\n                self.comparison.look()\n",
        "mpirun -n 2 tests.sim.scenarios nccl_mismatches_unseen_at_first",
    ),
    Mutant(
        "a call that a fault has ended hides that fault",
        "ipcreduce/calls/sequence.py",
        "earlier[0] < self.number + (reach is Reach.ENDED)",
        "earlier[0] < self.number",
        unit("calls", "a_call_that_a_fault_has_ended_raises_that_fault"),
    ),
    Mutant(
        "whoever connects is taken for a rank",
        "ipcreduce/ranks/handshake.py",
        "        if not hmac.compare_digest(proof, ",
        "        if False and (proof, ",
        unit("mirror", "a_stranger_is_sent_away"),
    ),
    Mutant(
        "the connections' secret is in the log",
        CONNECTIONS,
        "        failed.pop_all()\n        listener.close()\n",
        "        failed.pop_all()\n        listener.close()\n"
        '        __import__("logging").getLogger("ipcreduce").debug(secret.hex())\n',
        "mpirun -n 2 tests.sim.scenarios no_secret_is_shown",
    ),
    # ---- start-up
    Mutant(
        "a rank with other code is let in",
        STARTUP,
        '    _check_same_build(ranks, everyone["build"].tolist())\n',
        "",
        f"{HOST} other_builds",
    ),
    Mutant(
        "kernels are no part of a build",
        STARTUP,
        'sources += sorted(kernel_directory().glob("*.cu*"))',
        "pass",
        unit("startup", "any_other_module_kernel_or_version_is_another_build"),
    ),
    Mutant(
        "what raises in an option is told to nobody",
        "ipcreduce/options.py",
        "        except Exception as error:",
        "        except ArgumentError as error:",
        f"{HOST} errors_before_the_first_exchange",
    ),
    Mutant(
        "a message of another version is taken",
        EXCHANGE,
        'for field in ("magic", "version", "kind", "length"):',
        'for field in ("magic", "kind", "length"):',
        unit("exchange", "another_program_or_version_is_named"),
    ),
    Mutant(
        "a step that failed on the last rank passes",
        EXCHANGE,
        'failed = [rank for rank in range(len(gathered)) if not gathered[rank]["ok"]]',
        'failed = [rank for rank in range(len(gathered) - 1) if not gathered[rank]["ok"]]',
        unit("exchange", "a_failed_step_names_ranks_and_reasons"),
    ),
    Mutant(
        "a wait at start-up has no end",
        EXCHANGE,
        "if now > deadline:",
        "if False:",
        unit("exchange", "the_deadline_ends_a_wait"),
    ),
    Mutant(
        "close() waits for a rank that has gone to read its last words",
        "ipcreduce/page/mirror.py",
        "                peer.outgoing.clear()\n",
        "                pass\n",
        unit("mirror", "no_words_are_left_for_a_rank_that_has_gone"),
    ),
]
