// Reduce-scatter of a long array from few multiprocessors, for calls that run beside other kernels: scatter.cu for one
// row (see parts.cuh), by the exchange of tiles.cuh.
//
// A rank brings the parts of its peers into its area, in which each has room for a whole ring of tiles. It loads its part
// from the peers' areas and from its own array, reduces it onto the first tile of a stage, and stores it in its output.
// The copy unit moves what the program's arrays have, if all places there are aligned, and else the threads do. In place
// is safe: a packet of the own part is loaded before its result is stored, by the same step of the same block.
#include <packets.cuh>
constexpr u32 kStageTiles = kMaxRanks;  // those of all ranks
#include <tiles.cuh>

template <bool kAligned> struct Scatter {
  static constexpr bool kCopies = false;
  const Args& args;
  Stages& stages;

  DEVICE Place source(int i, u32 index) const { return place_of<true>(args.table, peer_rank(i), index); }
  DEVICE Place target(u32 index) const { return place_of<false>(args.table, kRank, index); }

  DEVICE void load_own(u32 stage, u32 tile) const {
    u32 due = 0;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) due += part_packets(args, i, tile);
    expect_at_gate(stages.full[stage], kAligned ? kPacketBytes * due : 0);
    if (!kAligned) return;
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (const u32 bytes = kPacketBytes * part_packets(args, i, tile))
        bulk_load(stages.tile[stage][i], source(i, first_packet(tile)).at, bytes, stages.full[stage]);
  }
  DEVICE void work_own(u32 stage, u32 tile) const {
    if (kAligned) return;
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      for (u32 column = thread_in_block(); column < part_packets(args, i, tile); column += threads_in_block())
        stages.tile[stage][i][column] = load_place<kElementBytes, false>(source(i, first_packet(tile) + column), true);
  }
  DEVICE void store_own(u32 stage, u32 tile) const {
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (const u32 bytes = kPacketBytes * part_packets(args, i, tile))
        bulk_store(args.outs[0] + row_offset(i, ring_bytes(args)) + offset_in_ring(args, tile), stages.tile[stage][i],
                   bytes);
  }

  DEVICE void load(u32 stage, u32 tile) const {
    const u32 bytes = kPacketBytes * part_packets(args, 0, tile);
    expect_at_gate(stages.full[stage], (kAligned ? kRanks : kRanks - 1) * bytes);
    if (!bytes) return;
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      bulk_load(stages.tile[stage][peer_rank(i)],
                args.outs[i] + row_offset_at_peer(i, ring_bytes(args)) + offset_in_ring(args, tile), bytes,
                stages.full[stage]);
    if (kAligned) bulk_load(stages.tile[stage][kRank], source(0, first_packet(tile)).at, bytes, stages.full[stage]);
  }
  DEVICE void work(u32 stage, u32 tile) const {
    const u32 count = part_packets(args, 0, tile), first = first_packet(tile);
    for (u32 column = thread_in_block(); column < count; column += threads_in_block()) {
      Packet v[kMaxRanks];
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) v[rank] = stages.tile[stage][rank][column];
      if (!kAligned) v[kRank] = load_place<kElementBytes, false>(source(0, first + column), true);
      const Packet result = reduce(v);
      if (kAligned) stages.tile[stage][0][column] = result;
      else store_place<kElementBytes, false>(target(first + column), result, true);
    }
  }
  DEVICE void store(u32 stage, u32 tile) const {
    const u32 bytes = kPacketBytes * part_packets(args, 0, tile);
    if (kAligned && bytes) bulk_store(target(first_packet(tile)).at, stages.tile[stage][0], bytes);
  }
  DEVICE void poison_tile(u32 tile) const {
    for (u32 column = thread_in_block(); column < part_packets(args, 0, tile); column += threads_in_block())
      store_place<kElementBytes, kAligned>(target(first_packet(tile) + column), poison(), true);
  }
};

KERNEL(bulk_scatter, 512, 1)(KERNEL_ARGS args) {
  LARGE_SHARED(Stages, stages);
  const u32 packets = (u32)args.bytes / kPacketBytes;
  if (args.in % kPacketBytes == 0) exchange_tiles(args, stages, packets, Scatter<true>{args, stages});
  else exchange_tiles(args, stages, packets, Scatter<false>{args, stages});
}
