// Tiles of long arrays in parts, moved from few multiprocessors: what bulk_gather.cu and bulk_scatter.cu have in common.
//
// They run beside other kernels, as bulk.cu does, and with its means: one thread of a block orders copies of whole tiles,
// and the multiprocessor's copy unit makes them, through stages in shared memory. A block takes the tiles b, b + grid, ...
// of a message, and each peer's block b takes the same ones. So a block waits for the peers' blocks b only.
//
// A block brings tiles into `area`, memory of this package that the peers have mapped, from where their blocks b load them.
// It has room for kRounds rounds of T tiles there. While it exchanges the tiles of a round, it brings those of the round
// after the next:
//
//     bring rounds 0 and 1;  flag 0;  wait for flag 0;
//     exchange round 0, bring round 2;  flag 1;
//     exchange round 1, bring round 3;  flag 2;
//     wait for flag 1;  exchange round 2, bring round 4 over round 0;  flag 3;
//     ...
//     exchange round R-1;  flag R;  wait for flags R-1 and R.
//
// * Arrival. Flag k is sent when rounds 0 to k+1 have been brought. Round k is loaded behind flag k-1 of every peer, and
//   round 0 behind flag 0.
//
// * Room. Flag k is sent when this block has loaded all of rounds 0 to k-1. Round k+2 takes the place of round k-2, and is
//   brought behind flag k-1. At the end flag R has come from each peer: none reads this area any more.
//
// * Visibility. Before a flag the thread waits until its copies have been made (wait_group, without .read: the writes are
//   then visible to this thread). Fences order them before the flag. A flag is observed by a relaxed load. The fence
//   behind it orders the loads of this thread behind it, and fence.proxy.async does so for those of the copy unit, which
//   is another proxy.
//
// * Flags are packets, as in direct.cu, in kRounds slots of each block. They lie in the half of this epoch, and their
//   reader restores the sentinel, so the rotation of one_shot.cu holds. Flag k takes the slot of flag k-4. It is sent
//   behind flag k-2 of the peer, which the peer has sent behind its wait for flag k-4.
//
// * Progress. Loads are ordered kStages - 1 steps ahead, where each tile takes two steps. These are less than a round, as
//   T >= kLeastTiles. So when a block waits for flag k-1, it has sent its own.
//
// * Within a stage. The copy unit writes it, and the gate's phase ends when all bytes have come: the threads that wait for
//   it see them. What a thread has done becomes visible to the copy unit by its fence.proxy.async, and the barrier orders
//   this before the thread that orders the stores. The stage is filled again after these have read it. Where the copy
//   unit does everything (kCopies), the other threads touch no stage, and need no barrier.
//
// * A wait that is abandoned. The block takes the steps whose loads it has ordered: they lie behind flags that have come.
//   Then it neither brings nor sends, and gives the program bytes 0xFF in place of the tiles that are left. A late peer may
//   still load what earlier flags say is here. So later kernels bring nothing, until the host resets the epochs, when every
//   kernel has ended on every rank.
#pragma once

constexpr u32 kStages = 6, kRounds = 4, kRoundsAhead = 2;
constexpr u32 kLeastTiles = kStages / 2;
constexpr u32 kLine = 128 / kPacketBytes;
constexpr u32 kTile = kStageBytes / kStageTiles / kPacketBytes / kLine * kLine;  // packets

struct Stages {
  Packet tile[kStages][kStageTiles][kTile];
  Gate full[kStages];
  u32 stop[kStages];  // nothing has come, as a wait was abandoned
  u32 taken;          // steps, in the end
};
static_assert(sizeof(Stages) <= kLargeSharedBytes, "a block has no more shared memory");

// Where this block's tile lies in the area, if a message begins there, and the room of a message.
DEVICE u32 ring_tiles(const Args& args) { return kRounds * (u32)args.out; }  // args.out: T
DEVICE u64 offset_in_ring(const Args& args, u32 tile) {
  return (u64)kPacketBytes * kTile * (tile % ring_tiles(args) * blocks_in_grid() + block_in_grid());
}
DEVICE u64 ring_bytes(const Args& args) { return (u64)kPacketBytes * kTile * ring_tiles(args) * blocks_in_grid(); }
DEVICE u32 first_packet(u32 tile) { return (block_in_grid() + tile * blocks_in_grid()) * kTile; }
DEVICE u32 part_packets(const Args& args, int i, u32 tile) {  // those of peer i's part
  const u32 packets = ceil_div(args.table.members[0].width[peer_rank(i)], kPacketBytes), first = first_packet(tile);
  return packets > first ? min_u32(kTile, packets - first) : 0;
}

// Exchanges messages of up to `packets` packets. `both` has, for bringing a tile and for exchanging it:
//   load_own(stage, tile), load(stage, tile): called by one thread, which says at the gate how many bytes are due;
//   work_own(stage, tile), work(stage, tile): called by all threads;
//   store_own(stage, tile), store(stage, tile): called by one thread;
// and poison_tile(tile), called by all threads, for a tile that was not exchanged. Both::kCopies: work_own() and work() do
// nothing, so that the one thread need not wait for the others.
template <class Both> DEVICE void exchange_tiles(const Args& args, Stages& stages, u32 packets, const Both& both) {
  const u32 tiles = ceil_div(packets, kTile), round_tiles = (u32)args.out;
  const u32 count = tiles > block_in_grid() ? ceil_div(tiles - block_in_grid(), blocks_in_grid()) : 0;
  const u32 early = min_u32(kRoundsAhead * round_tiles, count), rounds = ceil_div(count, round_tiles);
  const u32 steps = early + 2 * count;  // tiles are brought, and then each is exchanged and another one brought
  const u64 flag_row = row_bytes(kEpochSlots), own_workspace = args.peers[0];
  const bool orders = thread_in_block() == 0;
  grid_dependency_sync();

  const Epoch epoch = load_epoch(args);
  const u64 flags = parity_half_offset(args, epoch);
  bool alive = epoch.alive;  // as `orders` knows
  const auto flag_index = [&](u32 flag) { return block_in_grid() + flag % kRounds * blocks_in_grid(); };
  const auto send_flag = [&](u32 flag) {
    wait_until_stores_are_made();
    fence_proxy_async();
    fence_acq_rel_sys();
    send_flags(args, flags, flag_row, flag_index(flag), alive);
  };
  const auto wait_for_flag = [&](u32 flag) {
    wait_for_flags(args, own_workspace + flags, flag_row, flag_index(flag), alive);
    fence_acq_rel_sys();
    fence_proxy_async();
  };
  const auto load = [&](u32 step) {
    const u32 stage = step % kStages, tile = (step - early) / 2, round = tile / round_tiles;
    const bool brings = step < early || (step - early) % 2;
    if (!brings && tile % round_tiles == 0 && round > 1) wait_for_flag(round - 1);
    stages.stop[stage] = !alive;
    if (!alive) expect_at_gate(stages.full[stage], 0);
    else if (brings) both.load_own(stage, step < early ? step : tile + early);
    else both.load(stage, tile);
  };
  // Takes the steps from `begin` to `end`. Returns the first one that was not taken.
  const auto take = [&](u32 begin, u32 end) {
    if (orders)
      for (u32 step = begin; step < end && step < begin + kStages - 1; ++step) load(step);
    for (u32 step = begin; step < end; ++step) {
      if (Both::kCopies && !orders) return end;
      const u32 stage = step % kStages, tile = (step - early) / 2;
      const bool brings = step < early || (step - early) % 2;
      const u32 brought = step < early ? step : tile + early;
      wait_for_bytes(stages.full[stage], step / kStages % 2);
      if (stages.stop[stage]) return step;
      if (brings) both.work_own(stage, brought);
      else both.work(stage, tile);
      fence_proxy_async_shared();
      if (!Both::kCopies) sync_block();
      if (!orders) continue;
      if (brings) both.store_own(stage, brought);
      else both.store(stage, tile);
      commit_bulk_stores();
      if (step >= early && brings && ((tile + 1) % round_tiles == 0 || tile + 1 == count))
        send_flag(tile / round_tiles + 1);
      if (step + kStages - 1 >= end) continue;
      wait_until_stores_have_read<1>();  // those of the step before, whose stage is filled next
      load(step + kStages - 1);
    }
    return end;
  };

  if (orders) {
    for (u32 stage = 0; stage < kStages; ++stage) prepare_gate(stages.full[stage]);
    fence_acq_rel_sys();
  }
  advance_epochs(args, epoch);
  u32 taken = 0;
#pragma unroll 1
  for (u32 phase = 0; phase < 2; ++phase) {
    taken = take(taken, phase ? steps : early);
    if (phase || taken < early) break;
    if (!orders) continue;
    send_flag(0);
    wait_for_flag(0);
  }
  if (orders) stages.taken = taken;
  sync_block();
  taken = stages.taken;
  if (taken < steps) {
    if (orders) wait_until_stores_are_made();
    for (u32 tile = taken <= early ? 0 : (taken - early + 1) / 2; tile < count; ++tile) both.poison_tile(tile);
    return;
  }
  if (orders)
#pragma unroll 1
    for (u32 flag = rounds > 1 ? rounds - 1 : 1; flag <= rounds && alive; ++flag) wait_for_flag(flag);
}
