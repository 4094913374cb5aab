// Lower bounds for any all-reduce on a machine, for `python -m ipcreduce bench`: a barrier of flags, and stores of
// whole packets to every peer at once.
//
// The grid stores args.bytes bytes to each peer. All of them are the sentinel, so that slots at rest stay empty. The
// first thread sends one flag to each peer, and waits for a flag from each peer. So this operation, like the others,
// sends at least one packet between every pair of ranks: see one_shot.cu, rotation. With args.bytes == 0 it is a
// barrier.
#include <packets.cuh>

KERNEL(limit, 1024, 1)(KERNEL_ARGS args) {
  const u64 row = row_bytes(1);
  const bool first = thread_in_grid() == 0;
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);
  bool alive = epoch.alive;
  const u64 half = parity_half_offset(args, epoch);

  if (first && alive) send_flags(args, half, row, 0);
  const u32 packets = (u32)(args.bytes / kPacketBytes);
  for (u32 index = thread_in_grid(); index < packets; index += threads_in_grid())
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      store_packet_relaxed_sys(args.peers[i] + half + (kRanks - 1) * row + (u64)kPacketBytes * index,
                               {{kSentinel, kSentinel, kSentinel, kSentinel}});

  trigger_programmatic_launch();
  advance_epochs(args, epoch);
  if (first) wait_for_flags(args, args.peers[0] + half, row, 0, alive);
}
