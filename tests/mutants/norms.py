"""Mutants of an all-reduce with RMSNorm: the contract, the fused kernels, their plan and their arguments."""

from __future__ import annotations

from tests.mutants import Mutant, unit

CONTRACT, PAIR, PLAN = "kernels/rmsnorm.cuh", "kernels/rmsnorm.cu", "ipcreduce/ipc/norm_plan.py"
ONE_SHOT, TWO_SHOT, ARGUMENTS = (
    "kernels/fused_one_shot.cu", "kernels/fused_two_shot.cu", "ipcreduce/device/norm_kernels.py"
)  # fmt: skip
BITS, QUANTISED = unit("norm_kernels", "bits"), unit("norm_kernels", "quantised_bits")
TINY, LONG = unit("norm_kernels", "rows_of_zeros_and_of_tiny_numbers"), unit("norm_kernels", "rows_that_no_block_holds")
SWEEP = "mpirun -n 2 tests.simulated tests/gpu/norm_sweep.py --largest 60000 --rows 40 --cases"
RANDOM = f"{SWEEP} 20"
TILES = (
    "SIM_DEVICES=1 SIM_MULTIPROCESSORS=12 mpirun -n 3 tests.simulated tests/gpu/norm_sweep.py --largest 60000 "
    "--rows 40 --cases 24 --first 100"
)
ORDER = "pytest tests/sim/test_norms.py::test_order_between_and_within_blocks"
LATE = "mpirun -n 2 tests.simulated tests/gpu/norm_sweep.py --abandoned"

MUTANTS = [
    # ---- the contract
    Mutant(
        "the squares of a unit are added in another order",
        CONTRACT,
        "odd = add_rounded(odd, square(j + 1));",
        "odd = add_rounded(odd, square(9 - j));",
        BITS,
    ),
    Mutant(
        "chunks of a long row are added from the first lane on",
        PAIR,
        "totals = combine(totals, part_of_chunk(sums, turn, 0, kChunkGroups));",
        "const Totals of_chunk = over_lanes<32>(part_of_chunk(sums, turn, 0, kChunkGroups));\n"
        "      totals = combine(totals, Totals{of_chunk.sum / 32, of_chunk.most});",
        LONG,
    ),
    Mutant(
        "without a residual -0 becomes 0",
        CONTRACT,
        "index, active && present, signs);",
        "index, active && present);",
        unit("norm_kernels", "a_negative_zero_stays_one"),
    ),
    Mutant(
        "a NaN is lost in the largest number of a row",
        CONTRACT,
        "kWithMost ? max_nan(a.most, b.most) : 0};",
        "kWithMost ? (a.most > b.most ? a.most : b.most) : 0};",
        unit("norm_kernels", "a_nan_in_the_weight_is_in_its_scales"),
    ),
    Mutant(
        "a scale has no lower bound",
        CONTRACT,
        "divide(largest, 448.0f, 1.0f / 448.0f), 1e-10f);",
        "divide(largest, 448.0f, 1.0f / 448.0f), 0.0f);",
        QUANTISED,
    ),
    Mutant(
        "a quotient is a product with the reciprocal",
        CONTRACT,
        "return multiply_add(-multiply_add(quotient, y, -x), inverse, quotient);",
        "return quotient;",
        QUANTISED,
    ),
    Mutant(
        "with an infinite rstd the scale is infinite",
        CONTRACT,
        "is_infinite(rstd) ? bits_to_float(kNan)",
        "false ? bits_to_float(kNan)",
        TINY,
    ),
    Mutant(
        "a scale every 128 elements is one every 64",
        CONTRACT,
        "mask < (int)kScaleUnits; mask *= 2) most",
        "mask < (int)kGroupUnits; mask *= 2) most",
        QUANTISED,
    ),
    Mutant(
        "e4m3 in software rounds ties away from zero",
        CONTRACT,
        "((size + 0x7FFFFu + (size >> 20 & 1)) >> 20)",
        "((size + 0x80000u) >> 20)",
        unit("norm_kernels", "e4m3_in_software"),
    ),
    # ---- the exchange
    Mutant(
        "a cluster does not wait for the sums of its other blocks",
        CONTRACT,
        "if constexpr (kCluster > 1) wait_at_gate(sums.gate);\n  else sync_block();",
        "sync_block();",
        ORDER,
    ),
    Mutant(
        "a warp does not wait for the sums of its block",
        CONTRACT,
        "wait_at_gate(sums.gate);\n  else sync_block();",
        "wait_at_gate(sums.gate);",
        RANDOM,
    ),
    Mutant(
        "entries of a table beyond the groups of a row are not cleared",
        CONTRACT,
        "sums.sum[0][i] = sums.sum[1][i] = 0;",
        "sums.sum[0][i] = 0;",
        LONG.replace("rows_that_no_block_holds", "several_rows_of_a_block"),
    ),
    Mutant(
        "the barrier of a cluster waits for the whole GPU",
        "kernels/sync.cuh",
        "barrier.cluster.arrive.relaxed.aligned",
        "barrier.cluster.arrive.release.aligned",
        unit("compiler", "what_would_slow_fused_kernels_down"),
    ),
    Mutant(
        "elements are rounded one at a time",
        CONTRACT,
        "word[0] = D::store_two(x, next);",
        "word[0] = D::store(x) | (u32)D::store(next) << 16;",
        unit("compiler", "what_would_slow_fused_kernels_down"),
    ),
    Mutant(
        "all tiles have the residual of the first one",
        ONE_SHOT,
        "if (more) load_residuals(row + stride);",
        "",
        TILES,
    ),
    Mutant(
        "a tile that was sent is reduced with the input of the one before",
        ONE_SHOT,
        "for (int d = 0; d < kDepth; ++d) own[d] = next[d];",
        "for (int d = 0; d < kDepth; ++d) (void)next[d];",
        TILES,
    ),
    Mutant(
        "a rank takes its own row for the sum when the others' do not come",
        ONE_SHOT,
        "reduced[d].packet[0] = alive ? reduce_halves(v[d]) : poison();",
        "reduced[d].packet[0] = alive ? reduce_halves(v[d]) : own[d].packet[0];",
        LATE,
    ),
    Mutant(
        "gathered packets are taken that have not arrived",
        TWO_SHOT,
        "alive ? gathered[0][peer_rank(i)] : poison();",
        "alive ? gathered[0][peer_rank(i)] : Packet{};",
        LATE,
    ),
    Mutant(
        "the slots of the second hop are not emptied",
        TWO_SHOT,
        "      restore_sentinels(own_workspace + gather, slots, slot, alive);\n",
        "",
        f"{RANDOM} --first 20",
    ),
    # ---- plan and arguments
    Mutant(
        "a fused kernel has the slots of a plain one",
        PLAN,
        "return CODES_BYTES + CODE_BYTES * DTYPES.index(dtype)",
        "return CODE_BYTES * DTYPES.index(dtype)",
        unit("norm_plan", "slots_are_no_plain_kernels"),
    ),
    Mutant(
        "clusters are planned for more rows than they have",
        PLAN,
        "if cluster > 1 and shape.rows * cluster > blocks:",
        "if False:",
        unit("norm_plan", "launches"),
    ),
    Mutant(
        "pairs of blocks have more threads than their registers allow",
        PLAN,
        "        return 512\n",
        "        return 1024\n",
        unit("norm_plan", "launches"),
    ),
    Mutant(
        "the sum of three ranks is that of the first two",
        CONTRACT,
        "return kRanks == 2 ? add(v[0], v[1]) : reduce(v);",
        "return kRanks <= 3 ? add(v[0], v[1]) : reduce(v);",
        TILES,
    ),
    Mutant(
        "-0 stays the weight's bias",
        "ipcreduce/arrays/norms.py",
        "return rounded + 0.0",
        "return rounded",
        unit("rmsnorm", "a_bias_of_negative_zero_is_zero"),
    ),
    Mutant(
        "a row of 3072 lies in one block",
        PLAN,
        "hidden < _CLUSTERED_HIDDEN:",
        "hidden <= _CLUSTERED_HIDDEN:",
        unit("norm_plan", "the_rule"),
    ),
    Mutant(
        "the workspace has room for one hop of two",
        PLAN,
        "staging = (n - 1) * (2 if two_shot else 1) * row_bytes(slots)",
        "staging = (n - 1) * row_bytes(slots)",
        unit("norm_plan", "launches"),
    ),
    Mutant(
        "a measured choice is for rows of every length",
        PLAN,
        "if one.hidden == shape.hidden and (clusters or one.cluster == 1)]",
        "if clusters or one.cluster == 1]",
        unit("norm_plan", "measured_choices"),
    ),
    Mutant(
        "a measured choice is not loaded with the other kernels",
        PLAN,
        "for choice in _choices(shape, forced, clusters, table):",
        "for choice in ():",
        unit("norm_plan", "what_a_table_can_choose"),
    ),
    Mutant(
        "a measured choice changes by noise",
        "ipcreduce/bench/tune_norms.py",
        "<= times[best] * (1 + GAIN):",
        "<= times[best]:",
        unit("tune", "noise_changes_no_kernel"),
    ),
    Mutant(
        "tune forgets the hidden sizes of before",
        "ipcreduce/bench/tune_norms.py",
        "if one.hidden not in hidden]",
        "if False]",
        unit("tune", "rows_get_their_fastest_kernel"),
    ),
    Mutant(
        "columns of scales are as far apart as there are rows",
        ARGUMENTS,
        "(1, shape.scales_stride) if shape.column_major",
        "(1, shape.rows) if shape.column_major",
        QUANTISED,
    ),
    Mutant(
        "the weight's bias is forgotten",
        ARGUMENTS,
        "floats[:2] = shape.eps, shape.weight_bias",
        "floats[:2] = shape.eps, 0.0",
        BITS,
    ),
]
