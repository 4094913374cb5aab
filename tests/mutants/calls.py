"""Mutants of what the ranks do among themselves: calls, resynchronisation, control page, rounds, votes."""

from __future__ import annotations

from tests.mutants import Mutant, unit

PAGE, ROUNDS, RECORDS = (f"ipcreduce/page/{name}.py" for name in ("control_page", "rounds", "records"))
CALLS, VOTES, RESYNCHRONISATION, FAULTS = (
    f"ipcreduce/calls/{name}.py" for name in ("sequence", "votes", "resynchronisation", "faults")
)

MUTANTS = [
    # ---- calls and resynchronisation
    Mutant(
        "a vote ends the comparison of the calls before it",
        VOTES,
        "    if len({one.call for one in votes}) > 1:",
        "    if True:",
        unit("votes", "calls_before_a_vote_are_still_compared"),
    ),
    Mutant(
        "the call in which the ranks meet is not compared",
        RESYNCHRONISATION,
        "    page.calls.first = max(calls)\n",
        "    page.calls.first = max(calls) + 1\n",
        unit("calls", "the_call_in_which_the_ranks_meet_is_compared"),
    ),
    Mutant(
        "an error of another communicator in a break is not told",
        CALLS,
        "self.refuse(error, foreign=True)",
        "self.refuse(error)",
        unit("calls", "an_error_of_another_communicator_is_told"),
    ),
    Mutant(
        "Ctrl-C is replaced by an earlier fault",
        CALLS,
        "                if not isinstance(error, Exception):",
        "                if False:",
        unit("calls", "an_interrupt_is_not_replaced_by_an_earlier_fault"),
    ),
    Mutant(
        "another rank's abort is stored behind the meeting that clears it",
        PAGE,
        "        if aborts:\n            self._words32[ABORT_OFFSET // 4] = why or TOLD\n"
        "        if block:\n            self._map[place] = block\n",
        "        if block:\n            self._map[place] = block\n"
        "        if aborts:\n            self._words32[ABORT_OFFSET // 4] = why or TOLD\n",
        unit("mirror", "the_word_is_there_before_the_block_that_may_lead_to_its_end"),
    ),
    Mutant(
        "a loss is told at every turn",
        PAGE,
        "            if new or not self.aborted:",
        "            if True:",
        unit("control_page", "a_loss_is_told_once"),
    ),
    Mutant(
        "a timeout names those who wait",
        FAULTS,
        "missed & behind or missed or behind",
        "missed & behind or behind or missed",
        unit("control_page", "the_rank_that_is_missed_is_named_and_not_those_that_wait"),
    ),
    Mutant(
        "the abort word is cleared before the first meeting",
        RESYNCHRONISATION,
        "    everyone = meetings.meet(",
        "    page.clear()\n    everyone = meetings.meet(",
        unit("calls", "nobody_resets_before_all_are_quiet_nor_goes_on_before_all_have_reset"),
    ),
    Mutant(
        "the ranks resynchronise with one meeting only",
        RESYNCHRONISATION,
        "visible\n    meetings.meet(number, last_round, check, offer)\n",
        "visible\n",
        unit("calls", "the_page_is_clear_for_all_before_any_goes_on"),
    ),
    Mutant(
        "a rank resets before the others are quiet",
        RESYNCHRONISATION,
        "        backend.quiesce(deadline)\n",
        "        backend.quiesce(deadline)\n        backend.reset([])\n",
        unit("calls", "nobody_resets_before_all_are_quiet_nor_goes_on_before_all_have_reset"),
    ),
    Mutant(
        "after a resynchronisation each rank counts from its own number",
        RESYNCHRONISATION,
        "return max(calls), max(rounds)",
        "return number, last_round",
        unit("calls", "all_start_anew_with_the_highest_numbers"),
    ),
    Mutant(
        "a rank waits for ever for one that does not come to the clean-up",
        RESYNCHRONISATION,
        "if clock.now() > deadline:",
        "if False:",
        unit("calls", "a_rank_that_does_not_come_to_the_clean_up"),
    ),
    Mutant(
        "a fault of a later call is raised in an earlier one",
        CALLS,
        "if not self.raised and (fault is None or fault[0] <= self.number):",
        "if not self.raised:",
        unit("calls", "a_fault_of_a_later_call_does_not_disturb_an_earlier_one"),
    ),
    Mutant(
        "a fault of a later call ends an exchange",
        CALLS,
        "cancelled = fault is not None and fault[0] <= number",
        "cancelled = fault is not None",
        unit("calls", "a_fault_of_a_later_call_does_not_end_an_exchange"),
    ),
    Mutant(
        "the number of a recorded call is not withdrawn",
        CALLS,
        "        self.number -= 1\n",
        "        pass\n",
        unit("calls", "a_call_that_is_recorded_has_no_number"),
    ),
    Mutant(
        "a fault counts as raised for ever",
        CALLS,
        "self.raised, self._noted = False, 0",
        "self._noted = 0",
        unit("calls", "several_faults_one_after_the_other"),
    ),
    Mutant(
        "a fault is raised twice on a rank",
        CALLS,
        "            self.raised = True\n            raise faults.fault_error(page, self.number, self.timeout)\n",
        "            raise faults.fault_error(page, self.number, self.timeout)\n",
        unit("calls", "a_peers_refusal_is_raised_once"),
    ),
    Mutant(
        "a refusal ends the rank's own earlier calls",
        CALLS,
        "                backend.drain()  # the abort word would end earlier calls too\n",
        "                pass\n",
        unit("calls", "a_rank_refuses"),
    ),
    Mutant(
        "a capture meets the other ranks",
        CALLS,
        "if any(backend.is_capturing(stream) for backend in self._backends):",
        "if False:",
        unit("calls", "a_capture_does_not_resynchronise"),
    ),
    Mutant(
        "a refused call is kept from the peers",
        CALLS,
        "        self._post(control_page.REFUSED, described(error), raised=True)\n",
        "        self.raised = True\n",
        unit("calls", "a_rank_refuses"),
    ),
    # ---- the page
    Mutant(
        "the latest fault counts",
        PAGE,
        "return min(found) if found else None",
        "return max(found) if found else None",
        unit("control_page", "the_earliest_fault_counts"),
    ),
    Mutant(
        "a rank that has closed is lost also to calls that it has made",
        PAGE,
        "return self.has_left(rank) and self.calls.call_of(rank) < call",
        "return self.has_left(rank)",
        unit("control_page", "a_rank_that_closed_after_a_call_has_taken_part_in_it"),
    ),
    Mutant(
        "an abort word that comes before its record is taken for a timeout",
        PAGE,
        "if found or self.abort_word[0] != TOLD or self.loss() is not None:",
        "if True:",
        unit("control_page", "an_abort_word_that_comes_before_its_record_is_no_timeout"),
    ),
    Mutant(
        "the last loss counts",
        PAGE,
        "            if new:\n",
        "            if True:\n",
        unit("control_page", "the_first_loss_counts_and_what_a_rank_says_of_itself_comes_first"),
    ),
    Mutant(
        "the page keeps whom a rank has missed",
        PAGE,
        '            self._ranks[self.rank]["late"] = 0\n',
        "",
        unit("control_page", "clear_takes_back_ones_own"),
    ),
    Mutant(
        "a link in the place of the page is followed",
        "ipcreduce/page/shared_files.py",
        "os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDWR | os.O_CLOEXEC",
        unit("control_page", "no_link_is_followed"),
    ),
    Mutant(
        "both rounds share one buffer",
        PAGE,
        'self.slot(rank, "rounds", ROUND, parity * ROUND.itemsize)',
        'self.slot(rank, "rounds", ROUND, 0)',
        unit("rounds", "two_buffers_are_enough"),
    ),
    Mutant(
        "a record is read without its checksum",
        RECORDS,
        'if int.from_bytes(data[:_SEAL_BYTES], "little") != zlib.crc32(data[_SEAL_BYTES:]):',
        'if int.from_bytes(data[:_SEAL_BYTES], "little") == 0:',
        unit("control_page", "a_record_is_there_whole_or_not_at_all"),
    ),
    Mutant(
        "a call counts as made by all though one rank has not come",
        FAULTS,
        "return all(page.calls.call_of(rank) >= number for rank in range(page.n))",
        "return any(page.calls.call_of(rank) >= number for rank in range(page.n))",
        unit("control_page", "all_have_come_unless_a_fault_keeps_one_from_it"),
    ),
    Mutant(
        "the wrong rank is named as the one that is behind",
        FAULTS,
        "if calls[rank] < max(calls)}",
        "if calls[rank] > min(calls)}",
        unit("control_page", "a_chain_of_waits_ends_at_the_rank_that_is_behind"),
    ),
    # ---- rounds and votes
    Mutant(
        "a rank that closes right behind a meeting counts as lost before it",
        ROUNDS,
        "                if None in self._page.read_meeting(self._last):\n",
        "                if True:\n",
        unit("rounds", "a_rank_may_close_right_behind_a_meeting"),
    ),
    Mutant(
        "a rank that leaves an exchange names itself for another's fault",
        ROUNDS,
        "else cls(fault[1], fault[3])",
        "else cls(page.rank, fault[3])",
        unit("rounds", "a_round_left_because_of_a_fault"),
    ),
    Mutant(
        "a rank that gives up leaves the others waiting",
        ROUNDS,
        "            page.write_round(self.last, abandon is not None, len(left), left[:CHUNK_BYTES])\n",
        "",
        unit("rounds", "an_interrupt_leaves_the_round_too"),
    ),
    Mutant(
        "a payload loses what is beyond its first chunk",
        ROUNDS,
        "while begin < max(lengths):",
        "while begin < min(CHUNK_BYTES, max(lengths)):",
        unit("rounds", "payloads_of_different_lengths"),
    ),
    Mutant(
        "a vote does not look at the last rank",
        VOTES,
        "    for other, one in enumerate(votes):\n",
        "    for other, one in enumerate(votes[:-1]):\n",
        unit("votes", "one_has_failed"),
    ),
    Mutant(
        "a vote compares only the number of all-reduces",
        VOTES,
        "if len({(one.count, one.crc) for one in votes}) == 1:",
        "if len({one.count for one in votes}) == 1:",
        unit("votes", "another_recording"),
    ),
]
