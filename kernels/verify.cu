// Start-up check: does every peer's data reach this rank, from the right one, and do 16 bytes arrive whole?
// Block b exchanges args.bytes rounds of packets with peer b + 1, in lockstep, through two slots in turn, polling as
// the all-reduces do; a packet that is seen half new is a torn one. The verdict on rank r goes to word r of args.out.
#include <exchange.cuh>

constexpr u32 kNothing = 0, kWhole = 1, kHalves = 2, kWrong = 3;  // setup.py knows them

KERNEL(verify, 32, 1)(KERNEL_ARGS args) {
  const int i = (int)block_in_grid() + 1;
  const u32 lane = thread_in_block(), peer = source(i);
  const auto slot = [&](u32 from, u32 round) { return (u64)kPacketBytes * ((from * 2 + (round & 1)) * 32 + lane); };
  const auto tag = [&](u32 from, u32 round) { return from << 28 | lane << 20 | round; };

  const u64 started = nanoseconds();
  u32 verdict = kWhole;
  for (u32 round = 1; round <= (u32)args.bytes; ++round) {
    const u32 mine = tag(kRank, round), theirs = tag(peer, round);
    store_packet_sys(args.peers[i] + slot(kRank, round), {{mine, mine, mine, mine}});
    Packet p;
    do {
      p = load_packet_sys(args.peers[0] + slot(peer, round));
      if (p.word[3] != p.word[1] && verdict == kWhole) verdict = kHalves;
      if (p.word[1] != p.word[0] || p.word[3] != p.word[2]) verdict = kWrong;
      relax();
    } while (p.word[3] != theirs && nanoseconds() - started < args.timeout_ns);
    if (p.word[3] != theirs) {
      verdict = p.word[3] == kEmpty ? kNothing : kWrong;
      break;
    }
  }
  const u32 wrong = warp_ballot(verdict == kWrong), nothing = warp_ballot(verdict == kNothing);
  const u32 halves = warp_ballot(verdict == kHalves);
  if (lane == 0) store_local<u32>(args.out + 4 * peer, wrong ? kWrong : nothing ? kNothing : halves ? kHalves : kWhole);
}
