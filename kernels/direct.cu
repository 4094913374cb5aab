// Direct all-reduce: two-shot whose results go straight into the peers' outputs. It stages half as much and writes the
// gathered part once, but the outputs must lie in memory that the peers have mapped: the graphs' (ipcreduce/graphs).
//
// The first hop is two_shot.cu's, with the same columns, tiles and arguments for arrival, rotation and progress.
//
// * Entry. I write column p of my chunk into a peer's output only after that peer's column p came, which its kernel sent
//   after everything before it in its stream: so nothing there still uses the output. In place is safe too: the peer read
//   what I overwrite, its column p of my chunk, in order to send it. (The packet is seen by a relaxed load, and my stores
//   depend on it; an acquire between them would cost as much as the exit's fence, for every packet.)
//
// * Exit. The results are plain stores, so a flag guards them: after a block's stores, a barrier and a system fence, one
//   packet a peer into that peer's row of flags, at the block's number; and a kernel ends only when the flag of the same
//   block of every peer has come. Barrier and fence make the stores of the whole block precede the flag; the fence after
//   the polls makes them precede everything after this kernel. A flag is a packet like others: in the half of this epoch,
//   emptied by its reader, so the same rotation holds for it, also in blocks that have no column.
#include <exchange.cuh>

constexpr int kDepth = IPCREDUCE_DEPTH;

KERNEL(direct, 512, 2)(KERNEL_ARGS args) {
  if (args.trigger_early) trigger_dependents();
  await_predecessor();
  Wait wait(args);
  const u32 epoch = read_epoch(args);
  const u64 half = (epoch & 1) * args.half_bytes;

  const u32 columns = divide_up((u32)divide_up(args.bytes, kPacketBytes), kRanks);
  const u32 columns_a_tile = kDepth * threads_in_grid(), tiles = divide_up(columns, columns_a_tile);
  const u64 row = row_bytes(columns), flag_row = row_bytes(blocks_in_grid());
  const u64 scatter = half, flags = half + kRanks * row, ours = args.peers[0];

  const auto reduce = [&](u32 column) {
    Packet results[kDepth];
    fold_columns(results, args, scatter, columns, column, wait);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool active = nth(column, d) < columns;
#pragma unroll
      for (int i = 0; i < kRanks; ++i)
        if (active && (i == 0 || wait.alive))
          store_message<kElementBytes>(args.outs[i], (u64)kRank * columns + nth(column, d), args.bytes, results[d]);
      clear(ours + scatter, columns, nth(column, d), active, wait);
    }
  };

  u32 column = thread_in_grid();
  push_chunks<kDepth>(args, scatter, columns, column, wait);
  if (!args.trigger_early) trigger_dependents();
  advance_epochs(args, epoch);
  for (u32 tile = 0; tile < tiles; ++tile, column += columns_a_tile) {
    if (tile + 1 < tiles) push_chunks<kDepth>(args, scatter, columns, column + columns_a_tile, wait);
    reduce(column);
  }

  // One thread speaks for its block: what the others have stored is behind the barrier. Not for a block of which a wait
  // has failed, nor for any other once that is so.
  sync_block();
  if (thread_in_block() == 0) {
    fence_sys();
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (!aborted(args))
        store_packet_sys(args.peers[i] + flags + kRank * flag_row + kPacketBytes * block_in_grid(), {{0, 0, 0, 0}});
    get_flags(args, ours + flags, flag_row, block_in_grid(), wait);
    fence_sys();
  }
  sync_block();
  if (!aborted(args)) return;

  // Some peer's results did not all come: nothing of theirs in this block's columns is to be trusted.
  for (column = thread_in_grid(); column < columns; column += threads_in_grid())
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      store_message<kElementBytes>(args.outs[0], (u64)source(i) * columns + column, args.bytes, poison());
}
