// All-reduce of a long message from few multiprocessors, for calls that run beside other kernels.
//
// Matrix products want all multiprocessors. A thread of two_shot.cu waits for its own packet, so it takes many threads
// to fill the links, and blocks that wait for a peer keep products from running. Here one thread of a block orders
// copies of whole tiles, and the multiprocessor's copy unit makes them: 8 blocks fill the links of an H200.
//
// The message lies in `area`, memory of this package that the peers have mapped: copy.cu brings it there and fetches the
// result. It is split into a chunk of columns for each rank. Rank r loads chunk r out of the area of every rank, reduces
// it, and stores the result over chunk r in every area. So a rank's chunk is read and written by that rank alone. Its own
// chunk may also lie in the program's arrays: `in` and `out` are where that message begins, if not the own area.
//
// A chunk is split into tiles, and block b takes the tiles b, b + grid, ... of its rank's chunk. The tiles of all ranks
// are loaded into a stage in shared memory, kStages - 1 tiles ahead. The threads reduce them onto the first tile of the
// stage, from where it is stored.
//
// Flags are packets, as in direct.cu, at the block's index in two rows of slots. They lie in the half of this epoch, and
// their reader restores the sentinel, so the rotation of one_shot.cu holds.
//
// * Entry. A block loads and stores in a peer's area after that block of the peer has sent its entry flag, so after the
//   peer's kernel has begun. By then the peer's message is there: earlier kernels of its stream wrote it, and the fence
//   before the flag makes that visible here. A flag is observed by a relaxed load. The fence behind it orders the loads
//   of this thread behind it, and fence.proxy.async does so for those of the copy unit, which is another proxy.
//
// * Exit. The thread that has ordered the copies waits until they have been made (wait_group, without .read: the writes
//   are then visible to this thread). The fence orders them before the exit flag. A kernel ends when the exit flags of
//   that block of every peer have come, so no peer reads or writes this area any more, and all results are in it.
//
// * Within a stage. The copy unit writes a tile, and the gate's phase ends when all bytes have come: the threads that
//   wait for it see them. A thread's results become visible to the copy unit by its fence.proxy.async, and the barrier
//   orders this before the thread that orders the store. The stage is filled again after that store has read it.
//
// * A wait that is abandoned. This rank has sent its entry flag, so a late peer may still read this area: it must stay as
//   it is until the host resets it, when every kernel has ended on every rank. So nothing is poisoned here. copy.cu
//   neither fills the area nor believes it any more, and gives the program bytes 0xFF.
//
// Progress: block b waits for the peers' blocks b only. It sends its entry flag before it waits, and then waits for
// copies of its own only. A block with no tile sends and waits for flags all the same.
#include <packets.cuh>

constexpr u32 kStages = 6;
constexpr u32 kLine = 128 / kPacketBytes;
constexpr u32 kTile = kStageBytes / kMaxRanks / kPacketBytes / kLine * kLine;  // packets of one rank in a stage

struct Stages {
  Packet tile[kStages][kMaxRanks][kTile];
  Gate full[kStages];
  u32 alive;
};
static_assert(sizeof(Stages) <= kLargeSharedBytes, "a block has no more shared memory");

KERNEL(bulk, 512, 1)(KERNEL_ARGS args) {
  LARGE_SHARED(Stages, stages);
  const u32 packets = ceil_div((u32)args.bytes, kPacketBytes);
  const u32 columns = ceil_div(ceil_div(packets, kRanks), kLine) * kLine, begin = min_u32(kRank * columns, packets);
  const u32 own = min_u32(columns, packets - begin), tiles = ceil_div(own, kTile);
  const u32 turns = tiles > block_in_grid() ? ceil_div(tiles - block_in_grid(), blocks_in_grid()) : 0;
  const u64 chunk = (u64)kPacketBytes * begin, flag_row = row_bytes(kEpochSlots), own_workspace = args.peers[0];
  const bool orders = thread_in_block() == 0;
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);
  const u64 entry = parity_half_offset(args, epoch), exit = entry + (kRanks - 1) * flag_row;
  const auto first_packet = [&](u32 turn) { return (block_in_grid() + turn * blocks_in_grid()) * kTile; };
  const auto tile_packets = [&](u32 turn) { return min_u32(kTile, own - first_packet(turn)); };
  const auto load_tiles = [&](u32 turn) {
    const u32 stage = turn % kStages, bytes = kPacketBytes * tile_packets(turn);
    const u64 at = chunk + (u64)kPacketBytes * first_packet(turn);
    expect_at_gate(stages.full[stage], kRanks * bytes);
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      bulk_load(stages.tile[stage][peer_rank(i)], args.outs[i] + at, bytes, stages.full[stage]);
    bulk_load(stages.tile[stage][kRank], args.in + at, bytes, stages.full[stage]);
  };
  const auto store_tile = [&](u32 turn) {
    const u32 bytes = kPacketBytes * tile_packets(turn);
    const u64 at = chunk + (u64)kPacketBytes * first_packet(turn);
#pragma unroll
    for (int i = 1; i < kRanks; ++i) bulk_store(args.outs[i] + at, stages.tile[turn % kStages][0], bytes);
    bulk_store(args.out + at, stages.tile[turn % kStages][0], bytes);
    commit_bulk_stores();
  };

  if (orders) {
    for (u32 stage = 0; stage < kStages; ++stage) prepare_gate(stages.full[stage]);
    fence_acq_rel_sys();
    if (epoch.alive) send_flags(args, entry, flag_row, block_in_grid());
  }
  advance_epochs(args, epoch);
  if (orders) {
    bool alive = epoch.alive;
    wait_for_flags(args, own_workspace + entry, flag_row, block_in_grid(), alive);
    fence_acq_rel_sys();
    fence_proxy_async();
    stages.alive = alive;
    if (alive)
      for (u32 turn = 0; turn + 1 < kStages && turn < turns; ++turn) load_tiles(turn);
  }
  sync_block();
  if (!stages.alive) return;

  for (u32 turn = 0; turn < turns; ++turn) {
    const u32 stage = turn % kStages, count = tile_packets(turn);
    wait_for_bytes(stages.full[stage], turn / kStages % 2);
    for (u32 column = thread_in_block(); column < count; column += threads_in_block()) {
      Packet v[kMaxRanks];
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) v[rank] = stages.tile[stage][rank][column];
      stages.tile[stage][0][column] = reduce(v);
    }
    fence_proxy_async_shared();
    sync_block();
    if (!orders) continue;
    store_tile(turn);
    if (turn + kStages - 1 >= turns) continue;
    wait_until_stores_have_read<1>();  // those of the turn before, whose stage is filled next
    load_tiles(turn + kStages - 1);
  }

  if (orders) {
    wait_until_stores_are_made();
    fence_proxy_async();
    fence_acq_rel_sys();
    bool alive = true;
    send_flags(args, exit, flag_row, block_in_grid());
    wait_for_flags(args, own_workspace + exit, flag_row, block_in_grid(), alive);
    fence_acq_rel_sys();
  }
}
