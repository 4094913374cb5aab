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

KERNEL(one_shot, 1024, 1)(KERNEL_ARGS args) {
  if (args.trigger_early) trigger_dependents();
  await_predecessor();
  Wait wait(args);
  const u32 epoch = read_epoch(args);
  const u64 half = (epoch & 1) * args.half_bytes;

  const u32 packets = (u32)divide_up(args.bytes, kPacketBytes);
  const u32 index = thread_in_grid();
  const bool active = index < packets;

  Packet v[1][kMaxRanks];
  v[0][kRank] = {};
  if (active) v[0][kRank] = canonical(load_message<kElementBytes>(args.in, index, args.bytes));
#pragma unroll
  for (int i = 1; i < kRanks; ++i)
    put(args.peers[i] + half + kRank * row_bytes(packets), packets, index, v[0][kRank], active && wait.alive);

  if (!args.trigger_early) trigger_dependents();
  advance_epochs(args, epoch);

  const u64 rows = args.peers[0] + half;
  if (active) {
    get(v, args, rows, packets, index, wait);
    const Packet result = wait.alive ? fold(v[0]) : poison();
    store_message<kElementBytes>(args.out, index, args.bytes, result);
  }
  clear(rows, packets, index, active, wait);
}
