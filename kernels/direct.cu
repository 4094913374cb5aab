// Direct all-reduce: two-shot whose results go straight into the peers' outputs. It stages half as much and writes the
// gathered part once, but the outputs must lie in memory that the peers have mapped: the graphs' (ipcreduce/graphs). Whole
// and aligned messages only: the registers of a thread hold no more.
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
  const auto in = message_at<true>(args.in, args.bytes);
  const u32 columns = columns_of(args), tile = kDepth * threads_in_grid(), tiles = divide_up(columns, tile);
  const u64 row = row_bytes(columns), flag_row = row_bytes(blocks_in_grid()), ours = args.peers[0];
  await_predecessor();

  const Epoch epoch = read_epoch(args);
  bool alive = epoch.alive;
  const u64 scatter = half_of_epoch(args, epoch), flags = scatter + (kRanks - 1) * row;

  const auto push = [&](u32 column) {
    Packet chunks[kDepth][kMaxRanks];
    load_chunks(chunks, in, columns, column);
    push_chunks(chunks, args, scatter, columns, column, alive);
  };

  const auto reduce = [&](u32 column) {
    Packet v[kDepth][kMaxRanks];
    get_columns(v, args, in, scatter, columns, column, alive);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool active = nth(column, d) < columns;
      const Packet result = alive ? fold(v[d]) : poison();
#pragma unroll
      for (int i = 0; i < kRanks; ++i)
        store_message<kElementBytes>(message_at<true>(args.outs[i], args.bytes), kRank * columns + nth(column, d),
                                     result, active && (i == 0 || alive));
      clear(ours + scatter, columns, nth(column, d), active && alive);
    }
  };

  u32 column = thread_in_grid();
  push(column);
  trigger_dependents();
  advance_epochs(args, epoch);
  for (u32 t = 0; t < tiles; ++t, column += tile) {
    if (t + 1 < tiles) push(column + tile);
    if (warp_has_some(column, columns)) reduce(column);
  }

  // One thread speaks for its block: what the others have stored is behind the barrier. Not for a block of which a wait
  // has failed, nor for any other once that is so.
  sync_block();
  if (thread_in_block() == 0) {
    fence_sys();
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (!gave_up(args))
        store_packet_sys(args.peers[i] + flags + row_at_peer(i, flag_row) + kPacketBytes * block_in_grid(), {{0, 0, 0, 0}});
    get_flags(args, ours + flags, flag_row, block_in_grid(), alive);
    fence_sys();
  }
  sync_block();
  if (!gave_up(args)) return;

  // Some peer's results did not all come: nothing of theirs in this block's columns is to be trusted.
  for (column = thread_in_grid(); column < columns; column += threads_in_grid())
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      store_message<kElementBytes>(message_at<true>(args.out, args.bytes), source(i) * columns + column, poison(), true);
}
