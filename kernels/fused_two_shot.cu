// Two-shot all-reduce, residual and RMSNorm in one kernel. Rank r reduces the r-th part of every row, and sends it to
// all. Then every rank has all rows, and normalises them by rmsnorm.cuh. If each rank took some of the rows instead, it
// would have to send two arrays: residual_out and y. Here one array is gathered, as by the plain all-reduce.
//
// A row lies in a block, or in a cluster of blocks. A thread has one column of each rank's part, which is one packet
// (half types only), from the first load to the last store. So in place is safe. Lanes beyond a part send zeros.
//
// Arrival, rotation and visibility are those of two_shot.cu, in slots of fused kernels (plan.code_offset). What
// fused_one_shot.cu says of the sums, of clusters, and of abandoned waits holds here as well.
//
// Progress: block b waits for the peers' blocks b only, and for its cluster. It sends tile t + 1 before it waits for
// tile t, and its part of the results of tile t before it waits for the others'. All blocks are resident at once
// (norm_plan.py).
#include <packets.cuh>

static_assert(kElementBytes == 2 && kFloat, "a unit is one packet");

DEVICE void run(const Args& args, GroupSums& sums) {
  const NormArgs& norm = args.norm;
  const u32 hidden = (u32)norm.hidden, units = hidden / kUnitElements, rows = (u32)norm.rows;
  const u32 width = ceil_div(units, kScaleUnits * kCluster * kRanks) * kScaleUnits;  // units of a part in a block
  const u32 block = kCluster > 1 ? block_in_cluster() : 0, stride = blocks_in_grid() / kCluster;
  u32 row = block_in_grid() / kCluster, slot = thread_in_grid();
  const u32 slots = threads_in_grid() * ceil_div(rows, stride);
  const u64 slot_row = row_bytes(slots);
  u32 index[kMaxRanks];  // by peer
  bool active[kMaxRanks];
#pragma unroll
  for (int i = 0; i < kRanks; ++i) {
    index[i] = (peer_rank(i) * kCluster + block) * width + thread_in_block();
    active[i] = thread_in_block() < width && index[i] < units;
  }
  Numbers numbers = numbers_of(norm);
  prepare(sums, units / kGroupUnits);
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);
  bool alive = epoch.alive;
  Unit parts[kMaxRanks];
  const auto load_parts = [&](u32 row) {
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      parts[i] = load_unit<true>(row_at(args.in, norm, row), hidden, index[i], active[i]);
      parts[i].packet[0] = replace_sentinel_nan(parts[i].packet[0]);
    }
  };
  load_parts(row);
  const u64 scatter = parity_half_offset(args, epoch), gather = scatter + (kRanks - 1) * slot_row;
  const u64 own_workspace = args.peers[0];
  const auto send = [&](u64 rows_at, int i, u32 slot, const Packet& packet) {
    send_packet(args.peers[i] + rows_at + row_offset_at_peer(i, slot_row), slots, slot, packet, alive);
  };
  const auto push_parts = [&](u32 slot) {
#pragma unroll
    for (int i = 1; i < kRanks; ++i) send(scatter, i, slot, parts[i].packet[0]);
  };
  push_parts(slot);
  trigger_programmatic_launch();
  load_given_scale(norm, numbers);
  advance_epochs(args, epoch);
  meet_cluster(sums, units / kGroupUnits);

  for (u32 turn = 0;; turn ^= 1) {
    const bool more = kCluster == 1 && row + stride < rows;
    const u32 next_slot = slot + threads_in_grid();
    const Packet own = parts[0].packet[0];
    if (more) {
      load_parts(row + stride);
      push_parts(next_slot);
    }
    Packet v[1][kMaxRanks], gathered[1][kMaxRanks];
    receive_packets(v, args, own_workspace + scatter, slots, slot, alive);
    v[0][kRank] = own;
    Unit reduced[kMaxRanks], residual[kMaxRanks], weight[kMaxRanks];
    reduced[0].packet[0] = alive ? reduce_halves(v[0]) : poison();
#pragma unroll
    for (int i = 1; i < kRanks; ++i) send(gather, i, slot, reduced[0].packet[0]);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      residual[i] = load_residual<true>(norm, row, index[i], active[i]);
      weight[i] = load_unit<true>(norm.weight, hidden, index[i], active[i]);
    }
    receive_packets(gathered, args, own_workspace + gather, slots, slot, alive);
#pragma unroll
    for (int i = 1; i < kRanks; ++i) reduced[i].packet[0] = alive ? gathered[0][peer_rank(i)] : poison();
    normalise<true>(args.out, norm, sums, turn, row, numbers, reduced, residual, weight, index, active, kRanks, [&] {
      restore_sentinels(own_workspace + scatter, slots, slot, alive);
      restore_sentinels(own_workspace + gather, slots, slot, alive);
    });
    if (!more) return;
    row += stride;
    slot = next_slot;
  }
}

// A thread holds a unit of each rank's part, so blocks of many ranks have few threads, and many registers for each.
// One block has room for a row of 8,192 elements.
CLUSTER_KERNEL(fused_two_shot, kRanks <= 2 ? 512 : kRanks <= 3 ? 352 : kRanks <= 4 ? 256 : kRanks <= 6 ? 224 : 160, 2)
(KERNEL_ARGS args) {
  SHARED(GroupSums, sums);
  run(args, sums);
}
