"""Mutants of calls with an expression: kernels, operands, comparison, recordings, and the kernel behind NCCL."""

from __future__ import annotations

from tests.mutants import Mutant, unit
from tests.mutants.lists import scenario

KERNELS, ONE_SHOT, TWO_SHOT = "kernels/map.cuh", "kernels/one_shot.cu", "kernels/two_shot.cu"
OPERANDS, LAUNCHES, REDUCER = "ipcreduce/arrays/maps.py", "ipcreduce/device/maps.py", "ipcreduce/device_reducer.py"
KNOWN = "ipcreduce/device/known_maps.py"
SWEEP = "mpirun -n 2 tests.simulated tests/gpu/map_sweep.py --cases 40 --largest 6000 --kinds 3"

MUTANTS = [
    Mutant(
        "an operand that is a row takes longer rows than kernels count",
        "ipcreduce/device/maps.py",
        "if columns >= _TOO_LONG and any",
        "if columns > 1 << 40 and any",
        unit("maps", "rows_that_kernels_do_not_count"),
    ),
    Mutant(
        "a call with an expression is looked up by any op",
        KNOWN,
        "        if type(op) is not str:\n            return NOT_READY\n",
        "",
        unit("known_maps", "an_op_that_is_no_str"),
    ),
    # ---- kernels
    Mutant(
        "a row of an operand begins anew with each launch",
        LAUNCHES,
        "offset // array.itemsize % columns",
        "0 * offset",
        unit("maps", "words_of_operands"),
    ),
    Mutant(
        "an operand of the array's shape begins anew with each launch",
        LAUNCHES,
        'if one.kind == "full" else 0',
        'if one.kind == "row" else 0',
        unit("maps", "words_of_operands"),
    ),
    Mutant("a row of an operand never ends", KERNELS, "if (++at == columns) at = 0;", "++at;", SWEEP),
    Mutant(
        "rows of an operand are loaded by packets, whatever their length",
        KERNELS,
        "(kKind == full || (table.columns | table.first) % kElements == 0)",
        "true",
        SWEEP,
    ),
    Mutant(
        "the peers' results are stored without the expression",
        TWO_SHOT,
        "map_packet(v[d][peer_rank(i)], operands_of_packet(d, i))",
        "v[d][peer_rank(i)]",
        SWEEP,
    ),
    Mutant(
        "two_shot sends mapped values",
        TWO_SHOT,
        "results[d] = alive ? reduce(v[d]) : poison();",
        "results[d] = alive ? map_packet(reduce(v[d]), operands_of<kAligned>(args, kRank * columns + column, true))"
        " : poison();",
        SWEEP,
    ),
    Mutant(
        "one_shot stores the result without the expression",
        ONE_SHOT,
        "map_packet(reduce(v[0]), operands)",
        "reduce(v[0])",
        SWEEP,
    ),
    # ---- what the ranks compare
    Mutant(
        "spaces in an expression are not compared",
        "ipcreduce/calls/fingerprint.py",
        'f"{text}\\0{source}"',
        "text",
        unit("maps", "what_the_ranks_compare"),
    ),
    # ---- operands
    Mutant(
        "an operand may share memory with out",
        OPERANDS,
        "if written and not same and views.share_memory(view, used.target):",
        "if False:",
        scenario("refused_expressions"),
    ),
    Mutant(
        "numbers are rounded to the array's dtype",
        OPERANDS,
        'of = "float32" if of in _HALVES else of',
        'of = "float32" if of in _HALVES or kind == "float32" else of',
        unit("maps", "numbers"),
    ),
    Mutant(
        "the function of the host gets half types as they are",
        OPERANDS,
        "return array.astype(np.float32) if array.dtype in (np.float16, BFLOAT16) else array",
        "return array",
        unit("maps", "the_function_of_the_host"),
    ),
    # ---- known calls
    Mutant(
        "a known call with an expression has operands of the first shape",
        KNOWN,
        "if values[index].shape != at[1]:",
        "if False:",
        scenario("known_expressions_around"),
    ),
    Mutant(
        "a known call has whatever Map has the id of the first one",
        KNOWN,
        "or known.then() is not then:",
        "or False:",
        unit("known_maps", "an_object_that_has_changed_or_died"),
    ),
    Mutant(
        "a kind of calls has no dtypes of operands",
        KNOWN,
        "key += at[1], at[2]",
        "key += (at[1],)",
        scenario("known_expressions"),
    ),
    Mutant(
        "a known call writes over its operands",
        KNOWN,
        "if address < past and target < address + size and not (can_be_result and address == target):",
        "if False:",
        scenario("known_expressions_around"),
    ),
    Mutant(
        "behind NCCL a known call reads an operand after the sum has taken its place",
        KNOWN,
        "can_be_result = first is None and at[1:] == place[1:]",
        "can_be_result = at[1:] == place[1:]",
        scenario("known_expressions"),
    ),
    Mutant(
        "a known call has the numbers of the first one",
        KNOWN,
        "at = kind, source, target, words\n        ready",
        "at = kind, source, target, ()\n        ready",
        unit("known_maps", "other_numbers_and_addresses"),
    ),
    Mutant(
        "a graph of a known call has whatever numbers",
        "ipcreduce/ipc/ready.py",
        "place = one.launch, source, target, operands",
        "place = one.launch, source, target",
        scenario("known_expressions"),
    ),
    Mutant(
        "a new result of a known call is made in a capture",
        KNOWN,
        "if current > 1 and self._order.quick(current) is None:",
        "if False:",
        unit("known_maps", "new_results"),
    ),
    Mutant(
        "a known call on tensors has the memory of the first one",
        KNOWN,
        "self.read(tensors) == self.addresses",
        "self.read(tensors) is not None",
        scenario("known_expressions_around"),
    ),
    # ---- recordings, NCCL, ends
    Mutant(
        "a recording does not hold the operands",
        REDUCER,
        "used.source, used.destination, used.target, *mapped.arrays)",
        "used.source, used.destination, used.target)",
        scenario("recorded_expressions"),
    ),
    Mutant(
        "behind NCCL an operand is read after the sum has taken its place",
        REDUCER,
        "elif any(views.overlap(one, reduced) for one in mapped.arrays):",
        "elif False:",
        scenario("forms_of_expressions"),
    ),
    Mutant(
        "the kernels of expressions are never unloaded",
        "ipcreduce/nccl/backend.py",
        "        own = *self.norms.kernels.release_actions(), *self.map_kernels.close_actions()\n",
        "        own = self.norms.kernels.release_actions()\n",
        scenario("rounded_once"),
    ),
]
