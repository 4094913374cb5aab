// One-shot all-reduce: every rank pushes its whole message to every peer, and reduces the messages of all ranks itself.
// (n-1) S bytes leave each rank, in one hop: the fastest algorithm for small messages. One packet a thread.
//
// Correctness, without a barrier or fence of its own:
//
// * Arrival. A packet is one 128-bit access, so its data and its flag word become visible together. All slots of this
//   half were empty when the kernel began. So a slot whose flag word is not the sentinel holds this operation's packet.
//
// * Rotation. Operations alternate between the two halves of the workspace. A peer stores into half h for operation e+2
//   only after its kernel e+1 ended. That kernel needed a packet of mine of e+1, which I sent after my kernel e had
//   ended, with its slots of h restored to the sentinel. Two conditions: every operation sends at least one packet
//   between every pair of ranks, and all kernels share one epoch, whatever their sizes and algorithms. Both hold.
//
// * Visibility. My restoring of a slot (a plain store of kernel e) and the peer's next store to it (in its kernel e+2)
//   are ordered by causality. A kernel boundary in a stream orders everything before it with everything after it at
//   system scope (with programmatic launch, griddepcontrol.wait does). So my relaxed store of the packet of e+1
//   together with the boundary before it is a release, and the peer's relaxed load of it together with the boundary
//   after it an acquire. Relaxed polls that are ordered once, at the boundary, cost nothing in the loop.
//
// * Progress. Block b waits for the peers' blocks b only, after it has sent all its own packets.
#include <packets.cuh>

template <bool kAligned> DEVICE void run(const Args& args) {
  const auto in = message_at<kAligned>(args.in, args.bytes), out = message_at<kAligned>(args.out, args.bytes);
  const u32 packets = ceil_div(in.bytes, kPacketBytes), index = thread_in_grid();
  const bool active = index < packets;
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);  // first used after the message's loads are issued too: one latency for both
  bool alive = epoch.alive;
  Packet v[1][kMaxRanks];
  v[0][kRank] = load_message<kElementBytes, false>(in, index, active);

  const u64 half = parity_half_offset(args, epoch), rows = args.peers[0] + half;
  v[0][kRank] = replace_sentinel_nan(v[0][kRank]);
#pragma unroll
  for (int i = 1; i < kRanks; ++i)
    send_packet(args.peers[i] + half + row_offset_at_peer(i, row_bytes(packets)), packets, index, v[0][kRank],
                active && alive);

  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  if (!warp_has_packet(index, packets)) return;

  receive_packets(v, args, rows, packets, index, alive);
  // A separate exit, so that nothing lies between the last poll and the reduction.
  if (!alive) [[unlikely]] return store_message<kElementBytes>(out, index, poison(), active);
  store_message<kElementBytes>(out, index, reduce(v[0]), active);
  restore_sentinels(rows, packets, index, active);
}

// Over 2 GPUs one_shot is fastest even for messages of more threads than a GPU holds at once: hence as many blocks of
// 1,024 threads a multiprocessor as fit, two.
KERNEL(one_shot, 1024, kRanks == 2 ? 2 : 1)(KERNEL_ARGS args) {
  if (is_aligned(args.in, args.out, args.bytes)) [[likely]] run<true>(args);
  else run<false>(args);
}
