// One-shot all-reduce: every rank pushes its whole message to every other, and each folds all of them.
// (n-1) S bytes leave each rank, in one hop: the fastest way for small messages. One packet a thread.
//
// Why it is right, with no barrier and no fence of its own:
//
// * Arrival. A packet is one 128-bit access, so its mark and its data become visible together; a slot whose mark is
//   not empty holds this operation's packet, because every slot of this half was empty when the kernel began.
//
// * Rotation. Operations use the halves of the workspace in turn. A peer stores into half h for operation e+2 only
//   after its kernel e+1 ended, for which it needed a packet of mine of e+1, which I sent after my kernel e had ended,
//   its clearing of h included. It needs that every operation sends at least one packet between every pair of ranks,
//   and that all kernels share one epoch, whatever their sizes and algorithms; both hold.
//
// * Visibility. The clearing (a plain store of kernel e) and the peer's next store to that slot (in its kernel e+2)
//   are ordered by causality: kernel boundaries in a stream order everything before with everything after at system
//   scope (with programmatic launch, griddepcontrol.wait does), so my relaxed store of the packet of e+1 together with
//   the boundary before it is a release, and the peer's relaxed load of it with the boundary after it an acquire.
//   Polling relaxed and ordering once, at the boundary, costs nothing in the loop.
//
// * Progress. Block b waits for the peers' blocks b only, after it has sent all its own packets.
#include <exchange.cuh>

template <bool kPlain> DEVICE void run(const Args& args) {
  const auto in = message_at<kPlain>(args.in, args.bytes), out = message_at<kPlain>(args.out, args.bytes);
  const u32 packets = divide_up(in.bytes, kPacketBytes), index = thread_in_grid();
  const bool active = index < packets;
  await_predecessor();

  const Epoch epoch = read_epoch(args);  // not used before the message is on its way too: one latency for both
  bool alive = epoch.alive;
  Packet v[1][kMaxRanks];
  v[0][kRank] = load_message<kElementBytes, false>(in, index, active);

  const u64 half = half_of_epoch(args, epoch), rows = args.peers[0] + half;
  v[0][kRank] = canonical(v[0][kRank]);
#pragma unroll
  for (int i = 1; i < kRanks; ++i)
    put(args.peers[i] + half + row_at_peer(i, row_bytes(packets)), packets, index, v[0][kRank], active && alive);

  trigger_dependents();
  advance_epochs(args, epoch);
  if (!warp_has_some(index, packets)) return;

  get(v, args, rows, packets, index, alive);
  // By a way of its own: nothing then lies between the last poll and the fold.
  if (!alive) [[unlikely]] return store_message<kElementBytes>(out, index, poison(), active);
  store_message<kElementBytes>(out, index, fold(v[0]), active);
  clear(rows, packets, index, active);
}

// Over 2 GPUs it is the quickest for messages of more threads than the GPU holds: the more of them the better.
KERNEL(one_shot, 1024, kRanks == 2 ? 2 : 1)(KERNEL_ARGS args) {
  if (is_plain(args.in, args.out, args.bytes)) [[likely]] run<true>(args);
  else run<false>(args);
}
