// One-shot all-reduce, residual and RMSNorm in one kernel: every rank sends all its rows to every peer, reduces them,
// and normalises them by rmsnorm.cuh. So there is one hop, and one kernel where the unfused pair has two.
//
// A row lies in a block, or in a cluster of blocks: several blocks send and poll a row faster than one, as long as rows
// are few. A thread has kDepth units of a row, each of which is one packet (half types only). Lanes beyond the row send
// zeros, so that the lanes of a warp stay together. Weight and residual are loaded behind the sends. residual_out is
// stored, the slots are emptied, and x * w is computed while the sum of the row is on its way.
//
// * Arrival, rotation and visibility: as in one_shot.cu. The epochs and the workspace are those of the plain kernels,
//   so both may follow each other in any order. Their slots differ (plan.code_offset), so that a fused kernel and
//   a plain one wait for each other's packets, and do not reduce them. Every thread sends at least one packet to every
//   peer.
//
// * Sums within a block: the threads write the sums of their groups into shared memory, and after a barrier each warp
//   reads all of them. With more rows than blocks (tiles), two tables are used by turns: a warp writes into the table
//   of row t + 2 after the barrier of row t + 1, which the other warps reach only after they have read that of row t.
//
// * Sums within a cluster: every block gets the sums of all groups in its own shared memory, by stores that count their
//   bytes at a gate there. A store goes to a block that runs and has prepared its gate: the sender has passed the
//   cluster's barrier before, at which all threads of the cluster arrive behind the preparation, which a fence has
//   published. The barrier orders nothing else, and need not: the entries that a block clears are read by that block
//   alone, behind the barrier of advance_epochs(). And it goes to a block
//   that still runs: no block ends before its gate has opened, which is when all that is sent to it has come. A cluster
//   has one row only, so a gate opens once.
//
// * Progress. Block b waits for the blocks b of the peers, after it has sent its packets; tile t + 1 is sent before
//   tile t is waited for. A block of a cluster waits for the other blocks of it, too, which run at the same time. These
//   send before they wait, and give their sums even after an abandoned wait.
//
// * After an abandoned wait the reduced packets are NaN. So are residual_out there, the sum, and with it y and the
//   scales of the whole row, and all its e4m3 numbers.
//
// The fused kernels of FlashInfer and SGLang reduce the sum of a row over a cluster, too, with a cluster barrier for
// it. The gate takes one hop, where barrier and remote loads take three.
#include <packets.cuh>

static_assert(kElementBytes == 2 && kFloat, "a unit is one packet");
constexpr int kDepth = IPCREDUCE_DEPTH;

// kTiled: there are more rows than blocks.
template <bool kTiled> DEVICE void run(const Args& args, GroupSums& sums) {
  const NormArgs& norm = args.norm;
  const u32 hidden = (u32)norm.hidden, units = hidden / kUnitElements, rows = (u32)norm.rows;
  const u32 width = ceil_div(units, kScaleUnits * kCluster * kDepth) * kScaleUnits;  // units of one depth of a block
  const u32 block = kCluster > 1 ? block_in_cluster() : 0, stride = blocks_in_grid() / kCluster;
  u32 row = block_in_grid() / kCluster, slot = thread_in_grid();
  const u32 slots = kDepth * threads_in_grid() * (kTiled ? ceil_div(rows, stride) : 1);
  const u64 slot_row = row_bytes(slots);
  u32 index[kDepth];
  bool active[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    index[d] = (block * kDepth + d) * width + thread_in_block();
    active[d] = thread_in_block() < width && index[d] < units;
  }
  Numbers numbers = numbers_of(norm);
  prepare(sums, units / kGroupUnits);
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);  // first used after the loads are issued: one latency for both
  bool alive = epoch.alive;
  Unit own[kDepth], next[kDepth], residual[kDepth], weight[kDepth];
  const auto load_row = [&](u32 row, Unit (&to)[kDepth]) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) to[d] = load_unit<true>(row_at(args.in, norm, row), hidden, index[d], active[d]);
  };
  const auto load_residuals = [&](u32 row) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) residual[d] = load_residual<true>(norm, row, index[d], active[d]);
  };
  load_row(row, own);
  const u64 half = parity_half_offset(args, epoch), rows_at = args.peers[0] + half;
  const auto send = [&](u32 slot, Unit (&from)[kDepth]) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      Packet& packet = from[d].packet[0];
      packet = replace_sentinel_nan(packet);
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        send_packet(args.peers[i] + half + row_offset_at_peer(i, slot_row), slots, packet_index(slot, d), packet,
                    alive);
    }
  };
  send(slot, own);
  trigger_programmatic_launch();
  load_given_scale(norm, numbers);
#pragma unroll
  for (int d = 0; d < kDepth; ++d) weight[d] = load_unit<true>(norm.weight, hidden, index[d], active[d]);
  load_residuals(row);
  advance_epochs(args, epoch);
  meet_cluster(sums, units / kGroupUnits);

  for (u32 turn = 0;; turn ^= 1) {
    const bool more = kTiled && row + stride < rows;
    const u32 next_slot = slot + kDepth * threads_in_grid();
    if (more) {
      load_row(row + stride, next);
      send(next_slot, next);
    }
    Packet v[kDepth][kMaxRanks];
    receive_packets(v, args, rows_at, slots, slot, alive);
    Unit reduced[kDepth];
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      v[d][kRank] = own[d].packet[0];
      reduced[d].packet[0] = alive ? reduce_halves(v[d]) : poison();
    }
    normalise<true>(args.out, norm, sums, turn, row, numbers, reduced, residual, weight, index, active, kDepth, [&] {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) restore_sentinels(rows_at, slots, packet_index(slot, d), alive);
      if (more) load_residuals(row + stride);
    });
    if (!more) return;
    row += stride;
    slot = next_slot;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) own[d] = next[d];
  }
}

// From 5 ranks on, a thread of 1,024 has too few registers for the packets of all. Over 2 ranks, pairs of blocks have
// the long rows of large calls. Three blocks of 512 threads on a multiprocessor, with 40 registers a thread, end
// these 0.2 us to 0.5 us earlier than two where nothing else runs (benchmarks/NOTES.md).
#define PAIRS_OF_BLOCKS (kRanks == 2 && kCluster == 2 && kDepth == 1)
CLUSTER_KERNEL(fused_one_shot, PAIRS_OF_BLOCKS ? 512 : kRanks <= 4 ? 1024 : 512, PAIRS_OF_BLOCKS ? 3 : 1)
(KERNEL_ARGS args) {
  SHARED(GroupSums, sums);
  if (kCluster == 1 && args.norm.rows > blocks_in_grid()) run<true>(args, sums);
  else run<false>(args, sums);
}
