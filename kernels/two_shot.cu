// Two-shot all-reduce: the message is cut into one chunk a rank; each rank pushes to every other that one's chunk,
// folds its own, and pushes the result to all. 2 (n-1)/n S bytes leave each rank, in two hops.
//
// Thread p owns column p of every chunk, from the first load to the last store, so the hops need no barrier between
// them, and in place is safe. Columns beyond the threads of the grid are further tiles of the same threads: tile t+1
// is sent before tile t is folded, and tile t-1 is gathered after, so the links never idle while a thread waits. A tile's
// local stores come after its last poll: in a single tile, nobody waits for them there. A thread takes kDepth columns of
// a tile: one where the grid has a thread a column, several where few threads are to keep the links full.
//
// Arrival, rotation and visibility are as in one_shot.cu, for two groups of rows in a half: `scatter`, into which
// chunks come, and `gather`, into which results come. Chunks are padded to the same number of packets, so there is at
// least one packet between every pair. Progress: block b waits for the peers' blocks b only; it sends tile t+1 before
// it waits for tile t, and results of tile t before it waits for results.
#include <exchange.cuh>

constexpr int kDepth = IPCREDUCE_DEPTH;

KERNEL(two_shot, kDepth * kRanks <= 4 ? 512 : 256, 2)(KERNEL_ARGS args) {
  if (args.trigger_early) trigger_dependents();
  await_predecessor();
  Wait wait(args);
  const u32 epoch = read_epoch(args);
  const u64 half = (epoch & 1) * args.half_bytes;

  const u32 columns = divide_up((u32)divide_up(args.bytes, kPacketBytes), kRanks);
  const u32 columns_a_tile = kDepth * threads_in_grid(), tiles = divide_up(columns, columns_a_tile);
  const u64 row = row_bytes(columns), scatter = half, gather = half + kRanks * row;
  const u64 ours = args.peers[0];

  const auto reduce = [&](u32 column, Packet (&results)[kDepth]) {
    fold_columns(results, args, scatter, columns, column, wait);
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        put(args.peers[i] + gather + kRank * row, columns, nth(column, d), results[d],
            nth(column, d) < columns && wait.alive);
  };

  const auto collect = [&](u32 column, const Packet (&results)[kDepth]) {
    Packet v[kDepth][kMaxRanks];
    get(v, args, ours + gather, columns, column, wait);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool active = nth(column, d) < columns;
      if (active) {
        v[d][kRank] = results[d];
#pragma unroll
        for (int i = 0; i < kRanks; ++i)
          store_message<kElementBytes>(args.out, (u64)source(i) * columns + nth(column, d), args.bytes,
                                       wait.alive ? v[d][source(i)] : poison());
      }
      clear(ours + scatter, columns, nth(column, d), active, wait);
      clear(ours + gather, columns, nth(column, d), active, wait);
    }
  };

  u32 column = thread_in_grid();
  push_chunks<kDepth>(args, scatter, columns, column, wait);
  if (!args.trigger_early) trigger_dependents();
  advance_epochs(args, epoch);
  Packet results[kDepth], before[kDepth];
  for (u32 tile = 0; tile < tiles; ++tile, column += columns_a_tile) {
    if (tile + 1 < tiles) push_chunks<kDepth>(args, scatter, columns, column + columns_a_tile, wait);
    reduce(column, results);
    if (tile > 0) collect(column - columns_a_tile, before);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) before[d] = results[d];
  }
  collect(column - columns_a_tile, before);
}
