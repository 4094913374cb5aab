// What no all-reduce can beat on a machine, for `python -m ipcreduce bench`: a barrier of flags, and stores of whole
// packets to every peer at once.
//
// Every block stores args.bytes bytes to each peer, of the empty mark, so that slots at rest stay so. One flag a peer,
// sent and awaited by the first block, makes it an operation like the others: see one_shot.cu, rotation. The flags alone,
// with args.bytes == 0, are the barrier.
#include <exchange.cuh>

KERNEL(limit, 1024, 1)(KERNEL_ARGS args) {
  const u64 row = row_bytes(1);
  const bool first = thread_in_grid() == 0;
  await_predecessor();

  const Epoch epoch = read_epoch(args);
  bool alive = epoch.alive;
  const u64 half = half_of_epoch(args, epoch);

  if (first && alive)
#pragma unroll
    for (int i = 1; i < kRanks; ++i) store_packet_sys(args.peers[i] + half + row_at_peer(i, row), {{0, 0, 0, 0}});
  const u32 packets = (u32)(args.bytes / kPacketBytes);
  for (u32 index = thread_in_grid(); index < packets; index += threads_in_grid())
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      store_packet_sys(args.peers[i] + half + (kRanks - 1) * row + (u64)kPacketBytes * index,
                       {{kEmpty, kEmpty, kEmpty, kEmpty}});

  trigger_dependents();
  advance_epochs(args, epoch);
  if (first) get_flags(args, args.peers[0] + half, row, 0, alive);
}
