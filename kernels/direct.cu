// Direct all-reduce: as two-shot, but results go straight into the outputs of the peers, and not through a workspace.
// The gathered part is then written once. The outputs must lie in memory that the peers have mapped: that of graphs,
// and of comm.empty(). Messages must be aligned and consist of whole packets: a thread has no registers for more.
//
// The first hop is that of two_shot.cu, with the same columns, tiles and proofs of arrival, rotation and progress.
//
// * Entry. This rank writes column p of its chunk into a peer's output only after that peer's column p has arrived. The
//   peer's kernel sent that column after all earlier work of its stream, so no earlier work uses the output any more.
//   In place is safe, too: this rank overwrites the peer's column p of its chunk, which the peer has read to send it.
//   (This rank observes the packet by a relaxed load, on which its stores depend. An acquire between them would cost as
//   much as the fence at the exit, for every packet.)
//
// * Exit. The results are plain stores, so a flag guards them. After a block's stores come a barrier and a system
//   fence, then one packet for each peer, at the block's index in the row of flags. A kernel ends when the flag of the
//   same block of every peer has arrived. Barrier and fence order the stores of the whole block before the flag. The
//   fence after the polls orders them before everything after this kernel. A flag is an ordinary packet: it lies in the
//   half of this epoch, and its reader restores the sentinel. So the same rotation holds for it, also in blocks without
//   a column.
#include <packets.cuh>

constexpr int kDepth = IPCREDUCE_DEPTH;

KERNEL(direct, 512, 2)(KERNEL_ARGS args) {
  const auto in = input_of<true>(args);
  const u32 columns = columns_per_chunk(args), tile = kDepth * threads_in_grid(), tiles = ceil_div(columns, tile);
  const u64 row = row_bytes(columns), flag_row = row_bytes(blocks_in_grid()), own_workspace = args.peers[0];
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);
  bool alive = epoch.alive;
  const u64 scatter = parity_half_offset(args, epoch), flags = scatter + (kRanks - 1) * row;

  const auto push = [&](u32 column) {
    Packet chunks[kDepth][kMaxRanks];
    load_chunks(chunks, in, columns, column);
    push_chunks(chunks, args, scatter, columns, column, alive);
  };

  const auto reduce_columns = [&](u32 column) {
    Packet v[kDepth][kMaxRanks];
    receive_columns(v, args, in, scatter, columns, column, alive);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool active = packet_index(column, d) < columns;
      const Packet result = alive ? reduce(v[d]) : poison();
#pragma unroll
      for (int i = 0; i < kRanks; ++i)
        store_message<kElementBytes>(message_at<true>(args.outs[i], args.bytes),
                                     kRank * columns + packet_index(column, d), result, active && (i == 0 || alive));
      restore_sentinels(own_workspace + scatter, columns, packet_index(column, d), active && alive);
    }
  };

  u32 column = thread_in_grid();
  push(column);
  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  for (u32 t = 0; t < tiles; ++t, column += tile) {
    if (t + 1 < tiles) push(column + tile);
    if (warp_has_packet(column, columns)) reduce_columns(column);
  }

  // One thread sends the flags of its block. The barrier orders the other threads' stores before the flags. No flags
  // are sent if a wait of this block was abandoned, or, as far as this block knows, one of another block.
  sync_block();
  if (thread_in_block() == 0) {
    fence_acq_rel_sys();
    send_flags(args, flags, flag_row, block_in_grid(), !wait_abandoned(args));
    wait_for_flags(args, own_workspace + flags, flag_row, block_in_grid(), alive);
    fence_acq_rel_sys();
  }
  sync_block();
  if (!wait_abandoned(args)) return;

  // Some results of a peer are missing, so none of the peers' results in this block's columns can be trusted.
  for (column = thread_in_grid(); column < columns; column += threads_in_grid())
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      store_message<kElementBytes>(message_at<true>(args.out, args.bytes), peer_rank(i) * columns + column, poison(),
                                   true);
}
