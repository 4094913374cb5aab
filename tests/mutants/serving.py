"""Mutants of the plug-ins for servers, and of the tables of the runs with vLLM."""

from __future__ import annotations

from tests.mutants import Mutant, unit

PLUGIN, SEAT = "ipcreduce/serving/__init__.py", "ipcreduce/serving/seat.py"
GROUPS, SERVER = "ipcreduce/serving/groups.py", "benchmarks/serving/server.py"
TABLE, RUNNER = "benchmarks/serving/table.py", "benchmarks/serving/run.py"

MUTANTS = [
    Mutant(
        "a stand-in for FlashInfer stops the plug-in",
        PLUGIN,
        'sys.modules.get("flashinfer") or find_spec',
        "find_spec",
        unit("serving", "a_stand_in_for_flashinfer_counts_as_flashinfer"),
    ),
    Mutant(
        "the fused pass is brought unasked",
        PLUGIN,
        'if is_on("IPCREDUCE_FUSED"):\n        _bring',
        "if True:\n        _bring",
        unit("serving", "the_fused_pass_is_asked_for"),
    ),
    Mutant(
        "SGLang's fused call is taken for fewer ranks than the group has",
        PLUGIN,
        "if ranks == group.world_size and",
        "if",
        unit("serving", "sglang_asks_flashinfer_for_the_rest"),
    ),
    Mutant(
        "SGLang leaves plain calls to FlashInfer",
        PLUGIN,
        "return False if seat is not None and",
        "return False if False and",
        unit("serving", "sglang_asks_us_for_plain_calls"),
    ),
    Mutant(
        "SGLang's fused call is traced into ours",
        PLUGIN,
        "None if torch.compiler.is_compiling() else _sglang_seat(_ranks",
        "_sglang_seat(_ranks",
        unit("serving", "sglang_asks_flashinfer_for_the_rest"),
    ),
    Mutant(
        "a batch decides whether ipcreduce sums, although it must not",
        SEAT,
        "(fits or self._takes_all)",
        "fits",
        unit("serving_fused", "the_batch_does_not_decide_who_sums"),
    ),
    Mutant(
        "a group ends before its all-reduce is closed",
        GROUPS,
        "            found.close()  # while the group is whole\n",
        "            pass\n",
        unit("serving_groups", "a_group_closes_our_all_reduce_before_it_ends"),
    ),
    Mutant(
        "groups that are not tensor-parallel get our all-reduce",
        GROUPS,
        ' and self.unique_name.partition(":")[0] == "tp"',
        "",
        unit("serving_groups", "other_groups_do_not"),
    ),
    Mutant(
        "a step of three runs is that of the first",
        TABLE,
        "if len(times) == 1 else",
        "if times else",
        unit("serve_vllm", "of_several_runs_the_median_counts"),
    ),
    Mutant(
        "a server that does not end is left",
        SERVER,
        "    server.kill()\n    server.wait()\n",
        "",
        unit("serve_vllm_trials", "a_server_that_does_not_end_is_killed"),
    ),
    Mutant(
        "a server's log has a line for every call",
        SEAT,
        "            self._kinds.add(kind)\n",
        "",
        unit("serving_fused", "the_calls_served_are_told_once"),
    ),
    Mutant(
        "tokens are compared with those of another turn",
        TABLE,
        'one.get("turn") == run.get("turn")',
        "True",
        unit("serve_vllm", "tokens_are_compared_with_those_of_the_same_turn"),
    ),
    Mutant(
        "a server that drops the seat does not hear how many calls it has served",
        SEAT,
        "weakref.finalize(self, _tell, self._calls)",
        "weakref.finalize(_tell, _tell, self._calls)",
        unit("serving_fused", "the_calls_served_are_told_once"),
    ),
    Mutant(
        "SGLang's call takes messages of all sizes",
        SEAT,
        "self.should_custom_ar(x)\n            and x.dtype",
        "x.dtype",
        unit("serving_fused", "what_the_fused_call_declines"),
    ),
    Mutant(
        "of two workers the one counts that waits longer",
        TABLE,
        "least = min(seen,",
        "least = max(seen,",
        unit("serve_vllm", "a_row_has_what_the_runs_say"),
    ),
    Mutant(
        "logprobs behind the first token that differs are compared",
        TABLE,
        "            if token != other:\n                break\n",
        "",
        unit("serve_vllm", "differences_of_two_engines_are_counted"),
    ),
    Mutant(
        "an engine that has its result runs again",
        RUNNER,
        "        if is_whole(path):\n",
        "        if False:\n",
        unit("serve_vllm", "the_runner_goes_on_where_it_stopped"),
    ),
]
