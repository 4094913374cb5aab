// One-shot all-reduce: every rank sends its whole message to every peer, and reduces the messages of all ranks. (n-1) S
// bytes leave each rank, in one hop. It is the fastest algorithm for small messages. Each thread takes one packet.
//
// The kernel needs no barrier and no fence, for these reasons:
//
// * Arrival. A packet is one 128-bit access, so its data and its flag word become visible together. All slots of this
//   half were empty when the kernel began. So a slot whose flag word is not the sentinel holds this operation's packet.
//
// * Rotation. Operations alternate between the two halves of the workspace. A peer stores into half h for operation e+2
//   only after its kernel e+1 has ended. That kernel needed a packet of e+1 from this rank. This rank sent it after its
//   own kernel e had ended, which had restored the sentinel in its slots of h. The argument has two conditions: every
//   operation sends at least one packet between every pair of ranks, and all kernels share one epoch, whatever their
//   sizes and algorithms. Both hold.
//
// * Visibility. This rank restores a slot by a plain store of kernel e. The peer stores to that slot next in its kernel
//   e+2. Causality orders both. A kernel boundary in a stream orders everything before it with everything after it at
//   system scope (with programmatic launch, griddepcontrol.wait does). So this rank's relaxed store of the packet of
//   e+1 and the boundary before it are a release. The peer's relaxed load of that packet and the boundary after it are
//   an acquire. Relaxed polls that are ordered once, at the boundary, cost nothing in the loop.
//
// * Progress. Block b waits for the blocks b of the peers only, after it has sent all its own packets.
#include <packets.cuh>

template <bool kAligned> DEVICE void run(const Args& args) {
  const auto input = input_of<kAligned>(args), output = output_of<kAligned>(args);
  const u32 packets = ceil_div((u32)args.bytes, kPacketBytes), index = thread_in_grid();
  const auto in = array_with(input, index), out = array_with(output, index);
  const bool active = index < packets;
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);  // first used after the loads of the message are issued: one latency for both
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
  const Operands operands = operands_of<kAligned>(args, index, active);  // of an expression: behind the sends
  advance_epochs(args, epoch);
  if (!warp_has_packet(index, packets)) return;

  receive_packets(v, args, rows, packets, index, alive);
  // This exit is separate, so that no instruction lies between the last poll and the reduction.
  if (!alive) [[unlikely]] return store_message<kElementBytes>(out, index, poison(), active);
  store_message<kElementBytes>(out, index, map_packet(reduce(v[0]), operands), active);
  restore_sentinels(rows, packets, index, active);
}

// Over 2 GPUs one_shot is fastest even for messages that need more threads than a GPU holds at once. So a
// multiprocessor gets as many blocks of 1,024 threads as fit, which is two. The arrays of an expression need more registers
// than that leaves.
KERNEL(one_shot, 1024, kRanks == 2 && !Operands::kPackets ? 2 : 1)(KERNEL_ARGS args) {
  if (is_aligned(args.in, args.out, args.bytes) && operands_aligned(args)) [[likely]] run<true>(args);
  else run<false>(args);
}
