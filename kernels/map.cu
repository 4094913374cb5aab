// A user's expression on an array that is reduced already: over NCCL, and for one rank. See map.cuh.
//
// Each thread loads a packet and its operands before it stores that packet. So the output may be the input, or an array
// among the operands.
#include <packets.cuh>

#ifdef IPCREDUCE_MAP
template <bool kAligned> DEVICE void run(const Args& args) {
  const auto in = message_at<kAligned>(args.in, args.bytes), out = message_at<kAligned>(args.out, args.bytes);
  const u32 packets = ceil_div((u32)args.bytes, kPacketBytes);
  grid_dependency_sync();
  trigger_programmatic_launch();
  for (u32 index = thread_in_grid(); index < packets; index += threads_in_grid()) {
    const Packet reduced = load_message<kElementBytes, true>(in, index, true);
    const Operands operands = operands_of<kAligned>(args, index, true);
    store_message<kElementBytes>(out, index, map_packet(reduced, operands), true);
  }
}

KERNEL(map, 512, 2)(KERNEL_ARGS args) {
  if (is_aligned(args.in, args.out, args.bytes) && operands_aligned(args)) [[likely]] run<true>(args);
  else run<false>(args);
}
#endif
