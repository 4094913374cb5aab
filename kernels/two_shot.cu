// Two-shot all-reduce: the message is split into one chunk for each rank. Each rank sends every peer that peer's chunk,
// reduces its own chunk, and sends the result to all. 2 (n-1)/n S bytes leave each rank, in two hops.
//
// Thread p owns column p of every chunk, from the first load to the last store. So no barrier is needed between the
// hops, and in place is safe. If there are more columns than threads in the grid, the threads take them in tiles. Tile
// t+1 is sent before tile t is reduced, and tile t-1 is gathered after it, so the links never idle while a thread
// waits. The local stores of a tile come after its last poll: with a single tile, no peer waits for them there. A
// thread takes kDepth columns of a tile. That is one, unless `python -m ipcreduce tune` has found more to be faster.
//
// Arrival, rotation and visibility: as in one_shot.cu, with two groups of rows in each half. Chunks arrive in
// `scatter`, and results in `gather`. All chunks are padded to the same number of packets, so at least one packet goes
// between every pair of ranks.
//
// Progress: block b waits for the peers' blocks b only. It sends tile t+1 before it waits for tile t, and the results
// of tile t before it waits for results.
#include <packets.cuh>

constexpr int kDepth = IPCREDUCE_DEPTH;

// kTiled: the columns take more than one tile. The code for a single tile is compiled separately, because it is a third
// as long (see vec.cuh).
template <bool kTiled, bool kAligned> DEVICE void run(const Args& args, u32 columns, u32 tile) {
  const auto in = input_of<kAligned>(args), out = output_of<kAligned>(args);
  u32 column = thread_in_grid();
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);  // first used after the loads of the message are issued: one latency for both
  bool alive = epoch.alive;
  Packet chunks[kDepth][kMaxRanks];
  load_chunks(chunks, in, columns, column);

  const u64 row = row_bytes(columns), scatter = parity_half_offset(args, epoch), gather = scatter + (kRanks - 1) * row;
  const u64 own_workspace = args.peers[0];

  const auto reduce_columns = [&](u32 column, Packet (&results)[kDepth]) {
    Packet v[kDepth][kMaxRanks];
    receive_columns(v, args, in, scatter, columns, column, alive);
    if (!kTiled && !alive) [[unlikely]] return;  // a separate exit, as in one_shot.cu; with tiles it costs 0.4 %
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      results[d] = alive ? reduce(v[d]) : poison();
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        send_packet(args.peers[i] + gather + row_offset_at_peer(i, row), columns, packet_index(column, d), results[d],
                    packet_index(column, d) < columns && alive);
    }
  };

  const auto operands_at = [&](u32 column, int i) {
    return operands_of<kAligned>(args, peer_rank(i) * columns + column, column < columns);
  };
  const auto store_result = [&](u32 column, int i, const Packet& p) {
    store_message<kElementBytes>(out, peer_rank(i) * columns + column, p, column < columns);
  };
  const auto poison_columns = [&](u32 column) {
#pragma unroll 1
    for (int d = 0; d < kDepth; ++d)
#pragma unroll 1
      for (int i = 0; i < kRanks; ++i) store_result(packet_index(column, d), i, poison());
  };

  // The operands of an expression are loaded before the wait for results if the registers suffice, or else after it.
  constexpr bool kOperandsEarly = kDepth * kMaxRanks * Operands::kPackets <= (kDepth * kMaxRanks <= 4 ? 4 : 8);
  const auto gather_columns = [&](u32 column, const Packet (&results)[kDepth]) {
    Packet v[kDepth][kMaxRanks];
    Operands operands[kDepth][kMaxRanks];
    if constexpr (kOperandsEarly) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d)
#pragma unroll
        for (int i = 0; i < kRanks; ++i) operands[d][i] = operands_at(packet_index(column, d), i);
    }
    [[maybe_unused]] const auto operands_of_packet = [&](int d, int i) {
      return kOperandsEarly ? operands[d][i] : operands_at(packet_index(column, d), i);
    };
    receive_packets(v, args, own_workspace + gather, columns, column, alive);
    if (!alive) [[unlikely]] return poison_columns(column);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool active = packet_index(column, d) < columns;
      store_result(packet_index(column, d), 0, map_packet(results[d], operands_of_packet(d, 0)));
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        store_result(packet_index(column, d), i, map_packet(v[d][peer_rank(i)], operands_of_packet(d, i)));
      restore_sentinels(own_workspace + scatter, columns, packet_index(column, d), active);
      restore_sentinels(own_workspace + gather, columns, packet_index(column, d), active);
    }
  };

  push_chunks(chunks, args, scatter, columns, column, alive);
  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  Packet results[kDepth], previous[kDepth];
  if (!kTiled) {
    // This returns, because with a branch around the rest the compiler would not know that warps stay converged.
    if (!warp_has_packet(column, columns)) return;
    reduce_columns(column, results);
    // gather_columns() would do the same. Returning here saves the first test of alive in its wait.
    if (!alive) [[unlikely]] return poison_columns(column);
    return gather_columns(column, results);
  }
  const u32 tiles = ceil_div(columns, tile);
  for (u32 t = 0; t < tiles; ++t, column += tile) {
    if (t + 1 < tiles) {
      load_chunks(chunks, in, columns, column + tile);
      push_chunks(chunks, args, scatter, columns, column + tile, alive);
    }
    if (warp_has_packet(column, columns)) reduce_columns(column, results);
    if (t > 0) gather_columns(column - tile, previous);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) previous[d] = results[d];
  }
  if (warp_has_packet(column - tile, columns)) gather_columns(column - tile, previous);
}

KERNEL(two_shot, kDepth * kRanks <= 4 ? 512 : 256, 2)(KERNEL_ARGS args) {
  const u32 columns = columns_per_chunk(args), tile = kDepth * threads_in_grid();
  if (columns > tile) run<true, false>(args, columns, tile);
  else if (is_aligned(args.in, args.out, args.bytes) && operands_aligned(args)) run<false, true>(args, columns, tile);
  else run<false, false>(args, columns, tile);
}
