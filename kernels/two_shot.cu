// Two-shot all-reduce: the message is cut into one chunk a rank; each rank pushes to every other that one's chunk,
// folds its own, and pushes the result to all. 2 (n-1)/n S bytes leave each rank, in two hops.
//
// Thread p owns column p of every chunk, from the first load to the last store, so the hops need no barrier between
// them, and in place is safe. Columns beyond the threads of the grid are further tiles of the same threads: tile t+1
// is sent before tile t is folded, and tile t-1 is gathered after, so the links never idle while a thread waits. A tile's
// local stores come after its last poll: in a single tile, nobody waits for them there. A thread takes kDepth columns of
// a tile: one, unless `tune` has found several to be quicker.
//
// Arrival, rotation and visibility are as in one_shot.cu, for two groups of rows in a half: `scatter`, into which
// chunks come, and `gather`, into which results come. Chunks are padded to the same number of packets, so there is at
// least one packet between every pair. Progress: block b waits for the peers' blocks b only; it sends tile t+1 before
// it waits for tile t, and results of tile t before it waits for results.
#include <exchange.cuh>

constexpr int kDepth = IPCREDUCE_DEPTH;

// kTiled: there are more columns than `tile` takes. A single tile is a kernel of its own, a third as long (see vec.cuh).
template <bool kTiled, bool kPlain> DEVICE void run(const Args& args, u32 columns, u32 tile) {
  const auto in = message_at<kPlain>(args.in, args.bytes), out = message_at<kPlain>(args.out, args.bytes);
  u32 column = thread_in_grid();
  await_predecessor();

  const Epoch epoch = read_epoch(args);  // not used before the message is on its way too: one latency for both
  bool alive = epoch.alive;
  Packet chunks[kDepth][kMaxRanks];
  load_chunks(chunks, in, columns, column);

  const u64 row = row_bytes(columns), scatter = half_of_epoch(args, epoch), gather = scatter + (kRanks - 1) * row;
  const u64 ours = args.peers[0];

  const auto reduce = [&](u32 column, Packet (&results)[kDepth]) {
    Packet v[kDepth][kMaxRanks];
    get_columns(v, args, in, scatter, columns, column, alive);
    if (!kTiled && !alive) [[unlikely]] return;  // by a way of its own, as in one_shot.cu; among tiles it costs 0.4 %
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      results[d] = alive ? fold(v[d]) : poison();
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        put(args.peers[i] + gather + row_at_peer(i, row), columns, nth(column, d), results[d],
            nth(column, d) < columns && alive);
    }
  };

  const auto store = [&](u32 column, int i, const Packet& p) {
    store_message<kElementBytes>(out, source(i) * columns + column, p, column < columns);
  };
  const auto spoil = [&](u32 column) {
#pragma unroll 1
    for (int d = 0; d < kDepth; ++d)
#pragma unroll 1
      for (int i = 0; i < kRanks; ++i) store(nth(column, d), i, poison());
  };

  const auto collect = [&](u32 column, const Packet (&results)[kDepth]) {
    Packet v[kDepth][kMaxRanks];
    get(v, args, ours + gather, columns, column, alive);
    if (!alive) [[unlikely]] return spoil(column);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool active = nth(column, d) < columns;
      store(nth(column, d), 0, results[d]);
#pragma unroll
      for (int i = 1; i < kRanks; ++i) store(nth(column, d), i, v[d][source(i)]);
      clear(ours + scatter, columns, nth(column, d), active);
      clear(ours + gather, columns, nth(column, d), active);
    }
  };

  push_chunks(chunks, args, scatter, columns, column, alive);
  trigger_dependents();
  advance_epochs(args, epoch);
  Packet results[kDepth], before[kDepth];
  if (!kTiled) {
    if (!warp_has_some(column, columns)) return;  // around it, the compiler would not know that warps stay together
    reduce(column, results);
    if (!alive) [[unlikely]] return spoil(column);  // collect() would, too: its wait begins without asking so
    return collect(column, results);
  }
  const u32 tiles = divide_up(columns, tile);
  for (u32 t = 0; t < tiles; ++t, column += tile) {
    if (t + 1 < tiles) {
      load_chunks(chunks, in, columns, column + tile);
      push_chunks(chunks, args, scatter, columns, column + tile, alive);
    }
    if (warp_has_some(column, columns)) reduce(column, results);
    if (t > 0) collect(column - tile, before);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) before[d] = results[d];
  }
  if (warp_has_some(column - tile, columns)) collect(column - tile, before);
}

KERNEL(two_shot, kDepth * kRanks <= 4 ? 512 : 256, 2)(KERNEL_ARGS args) {
  const u32 columns = columns_of(args), tile = kDepth * threads_in_grid();
  if (columns > tile) run<true, false>(args, columns, tile);
  else if (is_plain(args.in, args.out, args.bytes)) run<false, true>(args, columns, tile);
  else run<false, false>(args, columns, tile);
}
