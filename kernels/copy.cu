// Copies a message on one GPU, by way of a user's expression if there is one.
//
// It applies expressions behind an all-reduce over NCCL, and for one rank (see map.cuh). It also moves messages into the
// area that bulk.cu works in, and results out of it. Then `outs` has three numbers: the first packet to leave out, how
// many these are, and whether `out` is the area. The packets of this rank's chunk are left out if bulk.cu takes them from
// the program's array, or puts them there.
//
// Each thread loads a packet and its operands before it stores that packet. So the output may be the input, or an array
// among the operands.
//
// If a wait on this GPU was abandoned, the area stays as it is (see bulk.cu), and the program's array gets bytes 0xFF.
// `epochs` is 0 where no kernel waits.
#include <packets.cuh>

constexpr int kBatch = Operands::kPackets ? 1 : 4;  // packets of a thread whose loads are under way at once

template <bool kAligned> DEVICE void run(const Args& args) {
  const auto in = input_of<kAligned>(args), out = output_of<kAligned>(args);
  const u32 first = (u32)args.outs[0];
  u32 left_out = (u32)args.outs[1];
  grid_dependency_sync();
  trigger_programmatic_launch();
  const bool abandoned = args.epochs && was_abandoned(args);
  if (abandoned && args.outs[2]) return;
  if (abandoned) left_out = 0;
  const u32 packets = ceil_div((u32)args.bytes, kPacketBytes) - left_out;
  for (u32 i = thread_in_grid(); i < packets; i += kBatch * threads_in_grid()) {
    const auto index = [&](int b) { return packet_index(i, b) + (packet_index(i, b) < first ? 0 : left_out); };
    Packet found[kBatch];
    Operands operands[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      found[b] = load_message<kElementBytes, true>(in, index(b), packet_index(i, b) < packets);
      operands[b] = operands_of<kAligned>(args, index(b), packet_index(i, b) < packets);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const Packet result = abandoned ? poison() : map_packet(found[b], operands[b]);
      store_message<kElementBytes>(out, index(b), result, packet_index(i, b) < packets);
    }
  }
}

KERNEL(copy, 512, 2)(KERNEL_ARGS args) {
  if (is_aligned(args.in, args.out, args.bytes) && operands_aligned(args)) [[likely]] run<true>(args);
  else run<false>(args);
}
