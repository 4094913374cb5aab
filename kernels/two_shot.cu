// Two-shot all-reduce: the message is cut into one chunk a rank; each rank pushes to every other that one's chunk,
// folds its own, and pushes the result to all. 2 (n-1)/n S bytes leave each rank, in two hops.
//
// Thread p owns column p of every chunk, from the first load to the last store, so the hops need no barrier between
// them, and in place is safe. Columns beyond the threads of the grid are further tiles of the same threads: tile t+1
// is sent before tile t is folded, and tile t-1 is gathered after, so the links never idle while a thread waits.
//
// Arrival, rotation and visibility are as in one_shot.cu, for two groups of rows in a half: `scatter`, into which
// chunks come, and `gather`, into which results come. Chunks are padded to the same number of packets, so there is at
// least one packet between every pair. Progress: block b waits for the peers' blocks b only; it sends tile t+1 before
// it waits for tile t, and results of tile t before it waits for results.
#include <exchange.cuh>

KERNEL(two_shot, 512)(KERNEL_ARGS args) {
  if (args.trigger_early) trigger_dependents();
  await_predecessor();
  const u32 epoch = read_epoch(args);
  const u64 half = (epoch & 1) * args.half_bytes;

  const u32 columns = divide_up((u32)divide_up(args.bytes, kPacketBytes), kRanks);
  const u32 tiles = divide_up(columns, threads_in_grid());
  const u64 row = row_bytes(columns), scatter = half, gather = half + kRanks * row;
  const u64 ours = args.peers[0];
  Wait wait;

  const auto reduce = [&](u32 tile) {
    const u32 column = tile * threads_in_grid() + thread_in_grid();
    const bool active = column < columns;
    const Packet result = active ? fold_column(args, scatter, columns, column, wait) : poison();
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      put(args.peers[i] + gather + kRank * row, columns, column, result, active && wait.alive);
    if (active) store_message<kElementBytes>(args.out, (u64)kRank * columns + column, args.bytes, result);
    clear(ours + scatter, columns, column, active, wait);
  };

  const auto collect = [&](u32 tile) {
    const u32 column = tile * threads_in_grid() + thread_in_grid();
    const bool active = column < columns;
    Packet v[kMaxRanks];
    if (active) {
      get(v, args, ours + gather, columns, column, wait);
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        store_message<kElementBytes>(args.out, (u64)source(i) * columns + column, args.bytes,
                                     wait.alive ? v[source(i)] : poison());
    }
    clear(ours + gather, columns, column, active, wait);
  };

  push_chunks(args, scatter, columns, thread_in_grid());
  if (!args.trigger_early) trigger_dependents();
  advance_epochs(args, epoch);
  for (u32 tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) push_chunks(args, scatter, columns, (tile + 1) * threads_in_grid() + thread_in_grid());
    reduce(tile);
    if (tile > 0) collect(tile - 1);
  }
  collect(tiles - 1);
}
