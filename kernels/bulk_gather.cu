// All-gather and broadcast of a long array from few multiprocessors, for calls that run beside other kernels: gather.cu
// for one row (see parts.cuh), by the exchange of tiles.cuh.
//
// A rank brings its own part into its area, and puts it into its place in the output, too, if it does not lie there. It
// loads the parts of the peers from their areas. The copy unit moves what the program's arrays have, if all places there
// are aligned, and else the threads do.
#include <packets.cuh>
constexpr u32 kStageTiles = kMaxRanks - 1;  // those of the peers, or one of this rank's own
#include <tiles.cuh>

template <bool kAligned> struct Gather {
  static constexpr bool kCopies = kAligned;
  const Args& args;
  Stages& stages;
  bool is_there;  // this rank's part lies in its place

  DEVICE Place target(int i, u32 index) const { return place_of<true>(args.table, peer_rank(i), index); }
  DEVICE Place source(u32 index) const { return place_of<false>(args.table, kRank, index); }

  DEVICE void load_own(u32 stage, u32 tile) const {
    const u32 bytes = kPacketBytes * part_packets(args, 0, tile);
    expect_at_gate(stages.full[stage], kAligned ? bytes : 0);
    if (kAligned && bytes) bulk_load(stages.tile[stage][0], source(first_packet(tile)).at, bytes, stages.full[stage]);
  }
  DEVICE void work_own(u32 stage, u32 tile) const {
    if (kAligned) return;
    const u32 count = part_packets(args, 0, tile), first = first_packet(tile);
    for (u32 column = thread_in_block(); column < count; column += threads_in_block()) {
      const Packet p = load_place<kElementBytes, false>(source(first + column), true);
      stages.tile[stage][0][column] = p;
      store_place<kElementBytes, false>(target(0, first + column), p, !is_there);
    }
  }
  DEVICE void store_own(u32 stage, u32 tile) const {
    const u32 bytes = kPacketBytes * part_packets(args, 0, tile);
    if (bytes) bulk_store(args.outs[0] + offset_in_ring(args, tile), stages.tile[stage][0], bytes);
    if (kAligned && bytes && !is_there) bulk_store(target(0, first_packet(tile)).at, stages.tile[stage][0], bytes);
  }

  DEVICE void load(u32 stage, u32 tile) const {
    u32 due = 0;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) due += part_packets(args, i, tile);
    expect_at_gate(stages.full[stage], kPacketBytes * due);
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (const u32 bytes = kPacketBytes * part_packets(args, i, tile))
        bulk_load(stages.tile[stage][i - 1], args.outs[i] + offset_in_ring(args, tile), bytes, stages.full[stage]);
  }
  DEVICE void work(u32 stage, u32 tile) const {
    if (kAligned) return;
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      for (u32 column = thread_in_block(); column < part_packets(args, i, tile); column += threads_in_block())
        store_place<kElementBytes, false>(target(i, first_packet(tile) + column), stages.tile[stage][i - 1][column], true);
  }
  DEVICE void store(u32 stage, u32 tile) const {
    if (!kAligned) return;
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (const u32 bytes = kPacketBytes * part_packets(args, i, tile))
        bulk_store(target(i, first_packet(tile)).at, stages.tile[stage][i - 1], bytes);
  }
  DEVICE void poison_tile(u32 tile) const {
#pragma unroll
    for (int i = 0; i < kRanks; ++i)
      for (u32 column = thread_in_block(); column < part_packets(args, i, tile); column += threads_in_block())
        store_place<kElementBytes, kAligned>(target(i, first_packet(tile) + column), poison(), i || !is_there);
  }
};

KERNEL(bulk_gather, 512, 1)(KERNEL_ARGS args) {
  LARGE_SHARED(Stages, stages);
  const bool is_there = place_of<true>(args.table, kRank, 0).at == place_of<false>(args.table, kRank, 0).at;
  const u32 packets = (u32)args.bytes / kPacketBytes;
  if (args.in % kPacketBytes == 0) exchange_tiles(args, stages, packets, Gather<true>{args, stages, is_there});
  else exchange_tiles(args, stages, packets, Gather<false>{args, stages, is_there});
}
