"""Mutants of the kernels: of arithmetic and layouts. Those of the protocol are in tests/sim/faults.py."""

from __future__ import annotations

from tests.mutants import Mutant, unit

EXCHANGE, REDUCE, VERIFY = "kernels/packets.cuh", "kernels/reduce.cuh", "kernels/verify.cu"
SWEEP = "mpirun -n 3 tests.simulated tests/gpu/sweep.py --cases 1 --largest 300 --seed"  # its first case is
HALF_SUM, INT8_AVERAGE, INT8_SUM = f"{SWEEP} 782", f"{SWEEP} 336", f"{SWEEP} 960"
FLOAT_MINIMUM = f"{SWEEP} 4392"  # of special values

MUTANTS = [
    Mutant(
        "every waiting warp reads host memory",
        EXCHANGE,
        "replace_u32_relaxed_gpu(abort_read_at, read_at, microseconds) &&",
        "(store_u32_relaxed_gpu(abort_read_at, microseconds), true) &&",
        unit("kernel_layout", "one_of_many_waits_reads_host_memory"),
    ),
    Mutant(
        "half types are rounded after each addition",
        REDUCE,
        "return a + b;",
        "return Dtype::load(Dtype::store(a + b));",
        HALF_SUM,
    ),
    Mutant(
        "the average of integers is rounded down",
        REDUCE,
        "if (rest > 0 && (T)-1 < 0 && result < 0) ++result;",
        "",
        INT8_AVERAGE,
    ),
    Mutant(
        "the average of integers forgets the remainders",
        REDUCE,
        "v.quotients + v.remainders / kRanks",
        "v.quotients",
        INT8_AVERAGE,
    ),
    Mutant(
        "a NaN is lost in a minimum",
        REDUCE,
        "return a != a ? a : b != b || b < a ? b : a;",
        "return b < a ? b : a;",
        FLOAT_MINIMUM,
    ),
    Mutant(
        "of equal values the higher rank's is taken",
        REDUCE,
        "b != b || b > a",
        "b != b || b >= a",
        "mpirun -n 2 tests.simulated tests/gpu/scenarios.py nan_bits",
    ),
    Mutant(
        "the elements beyond the last whole packet are not written",
        "kernels/vec.cuh",
        "if (!kAligned && active && index >= m.vector_packets)\n    store_elements",
        "if (false)\n    store_elements",
        INT8_SUM,
    ),
    Mutant(
        "in the arguments two words change places",
        EXCHANGE,
        "u64 half_bytes;       // from one half of a workspace to the other\n  u64 epochs;  ",
        "u64 epochs;\n  u64 half_bytes;",
        unit("kernel_layout", "words_of_args"),
    ),
    Mutant(
        "the sentinel is another byte than the host's",
        EXCHANGE,
        "constexpr u32 kSentinel = 0xFFFFFFFFu;",
        "constexpr u32 kSentinel = 0xFEFEFEFEu;",
        unit("kernel_layout", "a_slot_at_rest"),
    ),
    Mutant(
        "a rank takes its peers for one another",
        EXCHANGE,
        "return (kRank + i) % kRanks; }",
        "return (kRank + i + 1) % kRanks; }",
        INT8_SUM,
    ),
    Mutant(
        "an abandoned wait does not raise the abort word",
        EXCHANGE,
        "    store_u32_relaxed_sys(args.abort, 1);\n",
        "",
        unit("kernel_layout", "words_of_the_control_page"),
    ),
    Mutant(
        "an abandoned wait does not say that it ended without data",
        EXCHANGE,
        "  store_u32_relaxed_sys(args.missing + 4, next_epoch ? next_epoch : kSentinel);\n",
        "",
        unit("kernel_layout", "words_of_the_control_page"),
    ),
    Mutant(
        "an abort that another thread's clock has seen ahead of ours counts as long ago",
        EXCHANGE,
        "(int)(microseconds - seen) > (int)kGraceMicroseconds",
        "microseconds - seen > kGraceMicroseconds",
        unit("kernel_layout", "waits_go_on_for_a_while_after_an_abort"),
    ),
    Mutant(
        "an abort ends waits at once",
        EXCHANGE,
        "constexpr u32 kGraceMicroseconds = 100000;",
        "constexpr u32 kGraceMicroseconds = 0;",
        unit("kernel_layout", "waits_go_on_for_a_while_after_an_abort"),
    ),
    Mutant(
        "fewer epochs than a grid has blocks",
        EXCHANGE,
        "constexpr u32 kEpochSlots = 512;",
        "constexpr u32 kEpochSlots = 256;",
        unit("plan", "the_kernels_constants"),
    ),
    Mutant(
        "the start-up check takes packets in halves for whole ones",
        VERIFY,
        "if (p.word[3] != p.word[1] && verdict == kWhole) verdict = kSplit;",
        "",
        "pytest tests/sim/test_kernels.py::test_verify_sees_how_packets_arrive[halves]",
    ),
    Mutant(
        "the start-up check's verdicts change places",
        VERIFY,
        "kNoData = 0, kWhole = 1,",
        "kNoData = 1, kWhole = 0,",
        unit("kernel_layout", "verdicts_of_the_start_up_check"),
    ),
]
