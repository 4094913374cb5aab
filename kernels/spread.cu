// Broadcast in two hops: the message is split into a chunk for each peer of the root. The root sends each peer that
// peer's chunk, and the peer forwards it to the others. S bytes leave the root, and (n-2)/(n-1) S each peer; in one hop
// (gather.cu) (n-1) S leave the root. Bytes are moved as unsigned integers: no bit pattern is changed.
//
// Thread p owns column p of every chunk, as in two_shot.cu, so no barrier is needed between the hops. If there are more
// columns than threads, the threads take them in tiles. A peer forwards tile t+1 before it waits for tile t of others.
//
// Arrival and visibility: as in one_shot.cu. A half has one group of rows: the root's row takes the peer's own chunk,
// and each other row what that peer forwards. Each slot has one reader, which restores the sentinel.
//
// Rotation: as in one_shot.cu, which needs a packet between every pair of ranks. All chunks are padded to one number of
// packets, so at least one goes from the root to every peer, and between every two peers. A peer has no data for the
// root, and sends an answer: a packet without data, for which the root's kernel waits. It shows that the peer's kernel
// before this one has ended. The argument needs no more, so a peer sends it before it waits for anything.
//
// Progress: only the first thread of the root waits, when all is sent, for what block 0 of each peer sends first. Block
// b of a peer waits for block b of the root, and for those of the other peers after it has forwarded the tile itself.
//
// In place: the root only reads its array, and the others only write theirs. What they wait for in vain is poisoned.
#include <packets.cuh>

DEVICE u32 chunk_of(u32 rank, u32 root) { return rank - (rank > root); }  // not of the root, which has none

// Waits for packet `index` in the row of rank `sender`. As receive_packets(), which waits for every row.
DEVICE Packet receive_packet(const Args& args, u64 row, u32 packets, u32 index, u32 sender, bool& alive) {
  const u32 lane = index % 32, slot = index < packets ? index : index - lane;
  const u64 escape = escape_at(row, packets, slot) + lane / 16 * 4;
  Packet p;
  u32 last = 0, second = 0;
  const auto load_slot = [&] {
    p = load_packet_relaxed_sys(row + (u64)kPacketBytes * slot);
    if (kFloat) return;
    last = load_u32_relaxed_sys(escape);
    if (!kWholePackets) second = load_u32_relaxed_sys(escape + 8);
  };
  wait_for_peers<true>(alive, args, load_slot, [&](int i) {
    return peer_rank(i) != sender || (has_arrived(p) && last != kSentinel && second != kSentinel);
  });
  if (!alive) return poison();
  if (last >> lane % 16 & 1) p.word[3] = kSentinel;
  if (second >> lane % 16 & 1) p.word[1] = kSentinel;
  return p;
}

struct OfPeers {  // every rank but the root forwards so many packets
  static constexpr bool kSame = false;
  u32 packets, root;
  DEVICE u32 operator()(int i) const { return peer_rank(i) == root ? 0 : packets; }
};

template <bool kAligned> DEVICE void run_root(const Args& args, u32 root, u32 columns) {
  u32 column = thread_in_grid();
  const u32 tile = threads_in_grid(), tiles = ceil_div(columns, tile);
  const auto in = input_of<kAligned>(args);
  grid_dependency_sync();
  const Epoch epoch = load_epoch(args);  // first used after the loads of the message are issued: one latency for both
  bool alive = epoch.alive;
  const u64 half = parity_half_offset(args, epoch);
  const auto send = [&](u32 column) {
    Packet chunks[1][kMaxRanks];
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      chunks[0][i] = load_message<kElementBytes, true>(in, chunk_of(peer_rank(i), root) * columns + column,
                                                       column < columns);
    push_chunks(chunks, args, half, columns, column, alive);
  };
  send(column);
  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  for (u32 t = 1; t < tiles; ++t) send(column += tile);
  if (thread_in_grid() == 0) wait_for_flags(args, args.peers[0] + half, row_bytes(columns), 0, alive);
}

template <bool kAligned> DEVICE void run_peer(const Args& args, u32 root, u32 columns) {
  u32 column = thread_in_grid();
  const u32 tile = threads_in_grid(), tiles = ceil_div(columns, tile);
  const auto out = output_of<kAligned>(args);
  grid_dependency_sync();
  const Epoch epoch = load_epoch(args);
  bool alive = epoch.alive;
  const u64 half = parity_half_offset(args, epoch), rows = args.peers[0] + half, stride = row_bytes(columns);
  const int to_root = (root + kRanks - kRank) % kRanks;  // as a peer's number
  const auto store = [&](u32 rank, u32 column, const Packet& p) {
    store_message<kElementBytes>(out, chunk_of(rank, root) * columns + column, alive ? p : poison(), column < columns);
  };
  const auto forward = [&](u32 column) {
    const Packet own = receive_packet(args, rows + row_offset(to_root, stride), columns, column, root, alive);
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      send_packet(args.peers[i] + half + row_offset_at_peer(i, stride), columns, column, own,
                  column < columns && alive && peer_rank(i) != root);
    store(kRank, column, own);
  };
  const auto collect = [&](u32 column) {
    Packet v[1][kMaxRanks];
    receive_packets(v, args, rows, columns, OfPeers{columns, root}, column, alive);
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (peer_rank(i) != root) store(peer_rank(i), column, v[0][peer_rank(i)]);
    restore_sentinels(rows, columns, column, column < columns && alive);  // in the root's row, too
  };
  store_packet_relaxed_sys(args.peers[to_root] + half + row_offset_at_peer(to_root, stride), {{0, 0, 0, 0}},
                           column == 0 && alive);
  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  for (u32 t = 0; t <= tiles; ++t, column += tile) {
    if (warp_has_packet(column, columns)) forward(column);
    if (t > 0 && warp_has_packet(column - tile, columns)) collect(column - tile);
  }
}

KERNEL(spread, 256, 2)(KERNEL_ARGS args) {
  const u32 root = (u32)args.outs[0], columns = ceil_div(ceil_div((u32)args.bytes, kPacketBytes), kRanks - 1);
  const bool aligned = is_aligned(args.in, args.out, args.bytes);
  if (root == kRank) {
    if (aligned) run_root<true>(args, root, columns);
    else run_root<false>(args, root, columns);
  } else if (aligned) run_peer<true>(args, root, columns);
  else run_peer<false>(args, root, columns);
}
