// All-gather: every rank sends its part to every peer, and all store the parts of all ranks. (n-1) times its part leaves
// each rank, in one hop. A broadcast is an all-gather to which all ranks but the root bring nothing.
//
// It moves bytes, as unsigned integers: no bit pattern is changed. It is one_shot.cu with messages of different lengths
// in place of a reduction, and the proofs of arrival, rotation, visibility and progress are those. Every message has at
// least one packet. If there are more packets than threads, the threads take them in tiles, of which t+1 is sent before
// this rank waits for t. In place is safe: a thread stores a packet of its own part where it has loaded it, or not at all.
#include <packets.cuh>

constexpr int kDepth = IPCREDUCE_DEPTH;

template <bool kTiled, bool kAligned> DEVICE void run(const Args& args) {
  const SplitTable& table = args.table;
  const PartPackets packets_of{table};
  const u32 longest = (u32)args.bytes / kPacketBytes;  // packets of a message
  constexpr bool kPlacesEarly = !kTiled && kDepth * kMaxRanks <= 2;  // before the wait, if the registers suffice
  const auto load = [&](Packet (&own)[kDepth], u32 index) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const u32 at = packet_index(index, d);
      own[d] = load_place<kElementBytes, kAligned>(place_of<false>(table, kRank, at), at < packets_of(0));
    }
  };

  u32 index = thread_in_grid();
  Packet own[kDepth], next[kDepth];
  grid_dependency_sync();
  const Epoch epoch = load_epoch(args);  // first used after the loads of the message are issued: one latency for both
  bool alive = epoch.alive;
  load(own, index);

  const u64 half = parity_half_offset(args, epoch), rows = args.peers[0] + half, stride = row_bytes(longest);
  const auto send = [&](const Packet (&own)[kDepth], u32 index) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        send_packet(args.peers[i] + half + row_offset_at_peer(i, stride), longest, packet_index(index, d), own[d],
                    packet_index(index, d) < packets_of(0) && alive);
  };
  const auto receive = [&](const Packet (&own)[kDepth], u32 index) {
    Packet v[kDepth][kMaxRanks];
    const auto find = [&](int d, int i) { return place_of<true>(table, peer_rank(i), packet_index(index, d)); };
    Place places[kDepth][kMaxRanks];
    if constexpr (kPlacesEarly) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d)
#pragma unroll
        for (int i = 0; i < kRanks; ++i) places[d][i] = find(d, i);
    }
    receive_packets(v, args, rows, longest, packets_of, index, alive);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const u32 at = packet_index(index, d);
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        store_place<kElementBytes, kAligned>(kPlacesEarly ? places[d][i] : find(d, i),
                                             alive ? v[d][peer_rank(i)] : poison(), at < packets_of(i));
      const Place here = kPlacesEarly ? places[d][0] : find(d, 0);
      const bool is_there = here.at == place_of<false>(table, kRank, at).at;
      store_place<kElementBytes, kAligned>(here, own[d], at < packets_of(0) && !is_there);
      restore_sentinels(rows, longest, packets_of, at, alive);
    }
  };

  send(own, index);
  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  if (!kTiled) {
    if (warp_has_packet(index, longest)) receive(own, index);
    return;
  }
  const u32 tile = kDepth * threads_in_grid(), tiles = ceil_div(longest, tile);
  for (u32 t = 0; t < tiles; ++t, index += tile) {
    if (t + 1 < tiles) {
      load(next, index + tile);
      send(next, index + tile);
    }
    if (warp_has_packet(index, longest)) receive(own, index);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) own[d] = next[d];
  }
}

KERNEL(gather, kDepth * kRanks <= 4 ? 512 : 256, 2)(KERNEL_ARGS args) {
  const bool aligned = args.in % kPacketBytes == 0;
  if ((u32)args.bytes / kPacketBytes > kDepth * threads_in_grid()) {
    if (aligned) run<true, true>(args);
    else run<true, false>(args);
  } else if (aligned) run<false, true>(args);
  else run<false, false>(args);
}
