// Start-up check of the links: do every peer's data reach this rank, from the right peer, and do 16 bytes arrive as one
// access?
//
// Block b exchanges args.bytes rounds of packets with peer b + 1, in lockstep, through two slots in turn. It polls as
// the all-reduces do. A packet is split if a poll sees only one of its 8-byte parts new. The verdict on rank r goes to
// word r of args.out.
#include <packets.cuh>

// The verdicts. If the lanes of a warp differ, the first one in this order counts: kWrong, kNoData, kSplit, kWhole.
constexpr u32 kNoData = 0, kWhole = 1, kSplit = 2, kWrong = 3;  // ipcreduce/ipc/peers.py has the same

KERNEL(verify, 32, 1)(KERNEL_ARGS args) {
  const int i = (int)block_in_grid() + 1;
  const u32 lane = thread_in_block(), peer = peer_rank(i);
  const auto slot = [&](u32 from, u32 round) { return (u64)kPacketBytes * ((from * 2 + (round & 1)) * 32 + lane); };
  const auto pattern = [&](u32 from, u32 round) { return from << 28 | lane << 20 | round; };

  const u64 started = globaltimer_ns();
  u32 verdict = kWhole, polls = 0;
  for (u32 round = 1; round <= (u32)args.bytes; ++round) {
    const u32 mine = pattern(kRank, round), theirs = pattern(peer, round);
    store_packet_relaxed_sys(args.peers[i] + slot(kRank, round), {{mine, mine, mine, mine}});
    Packet p;
    do {
      p = load_packet_relaxed_sys(args.peers[0] + slot(peer, round));
      if (p.word[3] != p.word[1] && verdict == kWhole) verdict = kSplit;
      if (p.word[1] != p.word[0] || p.word[3] != p.word[2]) verdict = kWrong;
      spin_pause();
      // A rank that leaves start-up raises the abort word. To read it takes so long that a split packet might be missed.
      if (++polls % kSpinsBetweenChecks == 0 && load_u32_relaxed_sys(args.abort)) break;
    } while (p.word[3] != theirs && globaltimer_ns() - started < args.timeout_ns);
    if (p.word[3] != theirs) {
      verdict = p.word[3] == kSentinel ? kNoData : kWrong;
      break;
    }
  }
  const u32 wrong = warp_ballot(verdict == kWrong), no_data = warp_ballot(verdict == kNoData);
  const u32 split = warp_ballot(verdict == kSplit);
  if (lane == 0) store_weak<u32>(args.out + 4 * peer, wrong ? kWrong : no_data ? kNoData : split ? kSplit : kWhole);
}
