// The second half of the unfused pair: RMSNorm of rows that an all-reduce has written, for shapes, dtypes and
// alignments that have no fused kernel. There is no exchange between GPUs. It gives the bits of the fused kernels,
// because it computes by the same functions.
//
// A block has a row at a time. Rows of up to 16,384 elements are held in registers, in kDepth units a thread. Longer
// rows (kDepth == 0) are read in chunks of 8,192 elements by blocks of 1,024 threads, and residual_out is read again
// when the sum is known.
//
// Rows, and the bytes of a row, are counted in 32 bits: epilogues.py refuses more of them.
//
// In place is safe: a thread reads an element of every array before it writes that element, and only its own elements.
#include <rmsnorm.cuh>

struct Args {
  u64 in, out;
  NormArgs norm;
};

constexpr int kDepth = IPCREDUCE_DEPTH;
constexpr u32 kChunkUnits = kChunkGroups * kGroupUnits;  // and threads of a block that reads chunks

DEVICE bool is_aligned(const Args& args) {
  const NormArgs& norm = args.norm;
  const u64 addresses = args.in | args.out | norm.residual | norm.residual_out | norm.weight | 2 * norm.quantised;
  return addresses % kPacketBytes == 0 && norm.hidden % kUnitElements == 0;
}

template <bool kAligned> DEVICE void short_rows(const Args& args, GroupSums& sums) {
  const NormArgs& norm = args.norm;
  const u32 hidden = (u32)norm.hidden;
  constexpr int kUnits = kDepth ? kDepth : 1;
  Numbers numbers = numbers_of(norm);
  u32 index[kUnits];
  bool active[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    index[i] = thread_in_block() + i * threads_in_block();
    active[i] = kUnitElements * index[i] < hidden;
  }
  prepare(sums, ceil_div(hidden, kUnitElements * kGroupUnits));
  grid_dependency_sync();

  Unit weight[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) weight[i] = load_unit<kAligned>(norm.weight, hidden, index[i], active[i]);
  load_given_scale(norm, numbers);
  u32 turn = 0;
  for (u32 row = block_in_grid(); row < (u32)norm.rows; row += blocks_in_grid(), turn ^= 1) {
    Unit in[kUnits], residual[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      in[i] = load_unit<kAligned>(row_at(args.in, norm, row), hidden, index[i], active[i]);
      residual[i] = load_residual<kAligned>(norm, row, index[i], active[i]);
    }
    trigger_programmatic_launch();
    normalise<kAligned>(args.out, norm, sums, turn, row, numbers, in, residual, weight, index, active, kUnits, [] {});
  }
}

template <bool kAligned> DEVICE void long_rows(const Args& args, GroupSums& sums) {
  const NormArgs& norm = args.norm;
  const u32 hidden = (u32)norm.hidden, group = thread_in_block() / kGroupUnits;
  const u32 units = ceil_div(hidden, kUnitElements), end = ceil_div(units, kChunkUnits) * kChunkUnits;
  Numbers numbers = numbers_of(norm);
  grid_dependency_sync();

  load_given_scale(norm, numbers);
  trigger_programmatic_launch();
  u32 turn = 0;
  for (u32 row = block_in_grid(); row < (u32)norm.rows; row += blocks_in_grid()) {
    const u64 added = row_at(norm.residual_out, norm, row);
    Totals totals = {};
    for (u32 index = thread_in_block(); index < end; index += kChunkUnits, turn ^= 1) {
      const bool active = index < units;
      const Unit x = add(load_unit<kAligned>(row_at(args.in, norm, row), hidden, index, active),
                         load_residual<kAligned>(norm, row, index, active));
      store_unit<kAligned>(added, hidden, index, x, active);
      Totals of_unit = {sum_of_squares(x), 0};
      if constexpr (kWithMost)
        of_unit.most = multiply(x, load_unit<kAligned>(norm.weight, hidden, index, active), numbers).most;
      give(sums, turn, group, active ? of_unit : Totals{}, true);
      sync_block();
      totals = combine(totals, part_of_chunk(sums, turn, 0, kChunkGroups));
    }
    totals = over_lanes<32>(totals);
    const float rstd = rstd_of(totals.sum, numbers);
    for (u32 index = thread_in_block(); index < end; index += kChunkUnits) {
      const bool active = index < units;
      const Products products = multiply(load_unit<kAligned>(added, hidden, index, active),
                                         load_unit<kAligned>(norm.weight, hidden, index, active), numbers);
      const float own = most_of_scale(active ? products.most : 0);
      store_results<kAligned>(args.out, norm, row, index, products, kWithMost ? totals.most : own, rstd, numbers,
                              active);
    }
  }
}

template <bool kAligned> DEVICE void run(const Args& args, GroupSums& sums) {
  if constexpr (kDepth == 0) long_rows<kAligned>(args, sums);
  else short_rows<kAligned>(args, sums);
}

KERNEL(rmsnorm, 1024, 1)(KERNEL_ARGS args) {
  SHARED(GroupSums, sums);
  if (is_aligned(args)) run<true>(args, sums);
  else run<false>(args, sums);
}
