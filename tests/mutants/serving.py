"""Mutants of the plug-ins for servers, and of the tables of the runs with vLLM."""

from __future__ import annotations

from tests.mutants import Mutant, unit

PLUGIN, SEAT = "ipcreduce/serving/__init__.py", "ipcreduce/serving/seat.py"
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
        'if is_on("IPCREDUCE_FUSED"):',
        "if True:",
        unit("serving", "the_fused_pass_is_asked_for"),
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
        "least = min(device,",
        "least = max(device,",
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
