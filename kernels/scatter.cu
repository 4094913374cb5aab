// Reduce-scatter: every rank sends each peer that peer's part, and reduces its own. (n-1)/n of the whole array leaves
// each rank, in one hop: the first one of two_shot.cu, with parts of any lengths, and with its bits.
//
// The proofs of arrival, rotation, visibility and progress are those of one_shot.cu. Every message has at least one
// packet, also to a rank whose part is empty. If there are more packets than threads, the threads take them in tiles, of
// which t+1 is sent before this rank waits for t. In place is safe: a thread stores each packet where it alone has loaded
// it.
#include <packets.cuh>

constexpr int kDepth = IPCREDUCE_DEPTH;

template <bool kTiled, bool kAligned> DEVICE void run(const Args& args) {
  const SplitTable& table = args.table;
  const u32 longest = (u32)args.bytes / kPacketBytes, packets = table.packets[kRank];
  using Parts = Packet[kDepth][kMaxRanks];  // by peer
  const auto load = [&](Parts& parts, u32 index, int first, int end) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = first; i < end; ++i) {
        const u32 rank = peer_rank(i), at = packet_index(index, d);
        parts[d][i] = load_place<kElementBytes, kAligned>(place_of<true>(table, rank, at), at < table.packets[rank]);
      }
  };

  u32 index = thread_in_grid();
  Parts parts;
  grid_dependency_sync();
  const Epoch epoch = load_epoch(args);  // first used after the loads of the message are issued: one latency for both
  bool alive = epoch.alive;
  load(parts, index, 1, kRanks);

  const u64 half = parity_half_offset(args, epoch), rows = args.peers[0] + half, stride = row_bytes(longest);
  const auto push = [&](u32 index) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        send_packet(args.peers[i] + half + row_offset_at_peer(i, stride), longest, packet_index(index, d),
                    replace_sentinel_nan(parts[d][i]), packet_index(index, d) < table.packets[peer_rank(i)] && alive);
  };
  const auto receive = [&](u32 index) {
    const SamePackets packets_of{packets};
    Parts own, v;
    load(own, index, 0, 1);
    Place places[kDepth];  // found before the wait
#pragma unroll
    for (int d = 0; d < kDepth; ++d) places[d] = place_of<false>(table, kRank, packet_index(index, d));
    receive_packets(v, args, rows, longest, packets_of, index, alive);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      v[d][kRank] = replace_sentinel_nan(own[d][0]);
      const u32 at = packet_index(index, d);
      store_place<kElementBytes, kAligned>(places[d], alive ? reduce(v[d]) : poison(), at < packets);
      restore_sentinels(rows, longest, packets_of, at, at < packets && alive);
    }
  };

  push(index);
  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  if (!kTiled) {
    if (warp_has_packet(index, packets)) receive(index);
    return;
  }
  const u32 tile = kDepth * threads_in_grid(), tiles = ceil_div(longest, tile);
  for (u32 t = 0; t < tiles; ++t, index += tile) {
    if (t + 1 < tiles) {
      load(parts, index + tile, 1, kRanks);
      push(index + tile);
    }
    if (warp_has_packet(index, packets)) receive(index);
  }
}

KERNEL(scatter, kDepth * kRanks <= 4 ? 512 : 256, 2)(KERNEL_ARGS args) {
  const bool aligned = args.in % kPacketBytes == 0;
  if ((u32)args.bytes / kPacketBytes > kDepth * threads_in_grid()) {
    if (aligned) run<true, true>(args);
    else run<true, false>(args);
  } else if (aligned) run<false, true>(args);
  else run<false, false>(args);
}
