// Packets between ranks: where they lie, how a reader knows that one has arrived, and how every wait ends.
//
// A rank's workspace has two halves, used in turn by the parity of the epoch. In a half there are groups of rows of slots,
// a row for each other rank, row_bytes() apart: row i - 1 is that of source(i). A slot at rest is empty: its mark words are
// all ones. The reader puts the mark back once it has read, so the invariant holds again when its kernel ends.
#pragma once
#include <reduce.cuh>

struct Args {
  u64 in, out;          // this rank's arrays; may be the same
  u64 bytes;            // of the message, the same on every rank
  u64 peers[8];         // workspace of rank (kRank + i) % kRanks, as mapped here; peers[0] is our own
  u64 half_bytes;       // from one half of a workspace to the other
  u64 epochs;           // on this GPU: kEpochSlots pairs of words (epoch, given up), then three words of check_wait
  u64 abort;            // word in the control page (host memory, shared by all ranks): non-zero ends every wait
  u64 missing;          // this rank's word there: bit r is set if a wait for rank r's data passed its deadline. The word
                        // behind it is set if a wait of this rank has ended without data
  u64 timeout_ns;
  u64 outs[8];          // direct.cu: the output of rank (kRank + i) % kRanks, as mapped here
};

constexpr u32 kEpochSlots = 512;  // so many blocks at most; the plan knows it too
constexpr u32 kEmpty = 0xFFFFFFFFu;
constexpr u32 kOtherNan = 0x7FFF7FFFu;  // a NaN in every float type, whichever of its words this is

// The halves of a packet that arrive whole. With 16-byte atomicity one mark in the last word covers all; over a link
// that splits packets, each 8 bytes carry their own. The ranks agree on it at start-up.
constexpr bool kWholePackets = IPCREDUCE_WHOLE_PACKETS;

DEVICE u32 source(int i) { return (kRank + i) % kRanks; }
DEVICE u64 row_of(int i, u64 stride) { return (i - 1) * stride; }                   // of source(i), in our groups
DEVICE u64 row_at_peer(int i, u64 stride) { return row_of(kRanks - i, stride); }  // ours in the groups of peer i
DEVICE u32 divide_up(u32 a, u32 b) { return (a + b - 1) / b; }

// ---- epochs: every launch advances every slot by one, on every rank alike, so each block needs only its own slot.
struct Epoch {
  u32 number;
  bool alive;  // false: see await()
};
DEVICE Epoch read_epoch(const Args& args) {  // both by one load, which the lanes of a warp share: alive is theirs together
  const u64 slot = load_words_gpu(args.epochs + 8 * block_in_grid());
  return {(u32)slot, slot >> 32 == 0};
}
DEVICE u64 half_of_epoch(const Args& args, Epoch epoch) { return epoch.number & 1 ? args.half_bytes : 0; }

// After the block's sends and before its polls: the barrier is what lets the slot change.
DEVICE void advance_epochs(const Args& args, Epoch epoch) {
  sync_block();
  for (u32 j = block_in_grid() + thread_in_block() * blocks_in_grid(); j < kEpochSlots;
       j += blocks_in_grid() * threads_in_block())
    store_word_gpu(args.epochs + 8 * j, epoch.number + 1);
}

// ---- waits: a poll looks at data. Now and then it looks at the clock and, through a copy in this GPU's memory, at the
// abort word: if every waiting warp read host memory itself, the reads would queue for milliseconds.
constexpr u32 kSpinsBetweenChecks = 256;
constexpr u32 kMicrosecondsBetweenReads = 16;  // of the abort word, by the whole GPU
// Once it is up, waits go on for so long: it is about a later call than the one whose packets are under way to a rank
// that is slower than the one that raised it, or has no time slice of a shared GPU just now.
constexpr u32 kGraceMicroseconds = 100000;

// Returns when the wait began, or 0 if it is over without data: then so are all others on this GPU, until a reset.
DEVICE_COLD u64 check_wait(u64 started, u32 missing, const Args& args) {
  const u64 epochs = args.epochs, given_up = epochs + 8 * kEpochSlots, read_last = given_up + 4, seen_up = given_up + 8;
  const u64 now = nanoseconds();
  const u32 microseconds = (u32)(now >> 10);
  if (!started) started = now;
  const bool late = now - started > args.timeout_ns;
  if (late) {
    store_word_sys(args.missing, load_word_sys(args.missing) | missing);  // warps may miss different ranks
    store_word_sys(args.abort, 1);
  }
  const u32 seen = load_word_gpu(seen_up);  // when, or 0; another thread's clock may be ahead of ours
  if (!seen && microseconds - load_word_gpu(read_last) > kMicrosecondsBetweenReads) {
    store_word_gpu(read_last, microseconds);
    if (load_word_sys(args.abort)) store_word_gpu(seen_up, microseconds | 1);
  }
  const bool known = load_word_gpu(given_up);
  if (!late && !known && !(seen && (int)(microseconds - seen) > (int)kGraceMicroseconds)) return started;
  store_word_gpu(epochs + 8 * block_in_grid() + 4, 1);  // before this block's next barrier
  store_word_sys(args.missing + 4, 1);
  if (!known) {
    store_word_gpu(given_up, 1);
#pragma unroll 1
    for (u32 j = 0; j < kEpochSlots; ++j) store_word_gpu(epochs + 8 * j + 4, 1);
  }
  return 0;
}

// Whether a wait of this block has ended without data, or one of another block or kernel on this GPU, as far as is known.
DEVICE bool gave_up(const Args& args) { return load_word_gpu(args.epochs + 8 * block_in_grid() + 4) != 0; }

// Polls until every other rank's data have come. `alive` is false once a wait on this GPU has ended without data: then
// nothing is waited for, and nothing sent. Kernels that are queued behind one that gave up must not send either: a slower
// rank may still be in that operation, and two operations later their packets would come into the same half.
//
// look() loads, came(i) says whether all of source(i)'s data were in what it has loaded. Which ranks are missing is found
// out for check_wait only: in every turn, it would double the instructions between the loads and the fold.
//
// kWarp: the lanes of a warp wait together. If each went on by itself as its packet came, those that are late would poll
// again only after the early ones have folded and stored theirs: 0.1 us of 2 (H200).
template <bool kWarp, class Look, class Came>
DEVICE void await(bool& alive, const Args& args, const Look& look, const Came& came) {
  const auto any = [](bool mine) { return kWarp ? warp_any(mine) : mine; };
  u64 started = 0;
  while (alive) {
#pragma unroll 1
    for (u32 spins = 0; spins < kSpinsBetweenChecks; ++spins) {
      look();
      bool waiting = false;
#pragma unroll
      for (int i = 1; i < kRanks; ++i) waiting |= !came(i);
      if (!any(waiting)) return;
      relax();
    }
    u32 missing = 0;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) missing |= came(i) ? 0 : 1u << source(i);
    started = check_wait(started, kWarp ? warp_or(missing) : missing, args);  // stores of lanes are in no order
    alive = !any(!started);
  }
}

// ---- rows of slots
// After the packets of a row come its escapes, one a warp (see put). Rows begin at 128-byte lines.
DEVICE u64 escape_at(u64 row, u32 packets, u32 index) {
  return row + kPacketBytes * ((u64)divide_up(packets, 32) * 32 + index / 32);
}
DEVICE u64 row_bytes(u32 packets) {
  const u32 warps = divide_up(packets, 32);
  return kPacketBytes * (u64)(warps * 32 + divide_up(warps, 8) * 8);
}

// Which words of a warp's packets were equal to the mark, a bit a lane: the last words of lanes 0 to 15 and 16 to 31, then
// the second ones. Half words, so that none looks like the mark and each arrives by itself: a compiler may narrow a load
// to the words that are used, and two loads see different moments.
DEVICE Packet escape_of(u32 last, u32 second) {
  return {{last & 0xFFFF, last >> 16, second & 0xFFFF, second >> 16}};
}

DEVICE bool arrived(const Packet& p) { return p.word[3] != kEmpty && (kWholePackets || p.word[1] != kEmpty); }

// Floats: a word that looks like the mark is a NaN, and is sent as another NaN; what fold() makes of floats never looks
// so. What a rank folds of its own goes through here too, so that all fold the same bits. Integers: see put().
DEVICE Packet canonical(Packet p) {
  if constexpr (kFloat) {
    if (p.word[3] == kEmpty) p.word[3] = kOtherNan;
    if (!kWholePackets && p.word[1] == kEmpty) p.word[1] = kOtherNan;
  }
  return p;
}

// Stores packet `index` of a row of `packets` in a peer's workspace. All lanes of a warp call it, those with nothing
// to send with active == false. Integers have no spare value, so a word equal to the mark is sent as zero, and one
// extra packet a warp, always sent, tells which words were: 1/32 more on the wire, no epoch in the data.
DEVICE void put(u64 row, u32 packets, u32 index, Packet p, bool active) {
  if constexpr (!kFloat) {
    const u32 last = warp_ballot(active && p.word[3] == kEmpty);
    const u32 second = kWholePackets ? 0 : warp_ballot(active && p.word[1] == kEmpty);
    if (p.word[3] == kEmpty) p.word[3] = 0;
    if (!kWholePackets && p.word[1] == kEmpty) p.word[1] = 0;
    store_packet_sys(escape_at(row, packets, index), escape_of(last, second), active && index % 32 == 0);
  }
  store_packet_sys(row + (u64)kPacketBytes * index, p, active);
}

// What a thread takes at a time: packets index, index + threads_in_grid(), ... of a row, those that exist.
DEVICE u32 nth(u32 index, int d) { return index + d * threads_in_grid(); }
DEVICE bool warp_has_some(u32 index, u32 packets) { return index - index % 32 < packets; }

// What a wait that ended without data leaves: NaN, or -1.
DEVICE Packet poison() { return {{kEmpty, kEmpty, kEmpty, kEmpty}}; }

// Waits for kDepth packets of the row of every other rank, v[d][rank]; the group begins at `rows`. All loads of a turn are
// issued before the first is tested. v[d][kRank] is left alone. If the wait ends without data, alive is false and v is
// not to be used. All lanes of a warp call it, if that has some packet to wait for.
template <int kDepth>
DEVICE void get(Packet (&v)[kDepth][kMaxRanks], const Args& args, u64 rows, u32 packets, u32 index, bool& alive) {
  const u64 stride = row_bytes(packets);
  const u32 lane = index % 32;
  u32 last[kDepth][kMaxRanks], second[kDepth][kMaxRanks];  // of the escapes: this lane's words
  // Where there is no packet, one that this warp waits for is looked at once more.
  const u32 spare = index < packets ? index : index - lane;
  const auto look = [&] {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const u32 slot = nth(index, d) < packets ? nth(index, d) : spare;
#pragma unroll
      for (int i = 1; i < kRanks; ++i) {
        const u64 row = rows + row_of(i, stride);
        v[d][source(i)] = load_packet_sys(row + (u64)kPacketBytes * slot);
        if (kFloat) continue;
        const u64 escape = escape_at(row, packets, slot) + lane / 16 * 4;
        last[d][source(i)] = load_word_sys(escape);
        if (!kWholePackets) second[d][source(i)] = load_word_sys(escape + 8);
      }
    }
  };
  const auto came = [&](int i) {
    bool all = true;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      all &= arrived(v[d][source(i)]) &&
             (kFloat || (last[d][source(i)] != kEmpty && (kWholePackets || second[d][source(i)] != kEmpty)));
    return all;
  };
  await<true>(alive, args, look, came);
  if (kFloat || !alive) return;  // nobody uses v after a failed wait: if one did, each poll would copy it
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      if (last[d][source(i)] >> lane % 16 & 1) v[d][source(i)].word[3] = kEmpty;
      if (!kWholePackets && (second[d][source(i)] >> lane % 16 & 1)) v[d][source(i)].word[1] = kEmpty;
    }
}

// Empties what get() read, where active; all lanes of a warp call it. Never after a wait that failed: a late packet would
// fill the slot again, so the host does it when every kernel has ended (workspace.py, resync).
DEVICE void clear(u64 rows, u32 packets, u32 index, bool active) {
  const Packet empty = {{kEmpty, kEmpty, kEmpty, kEmpty}};
  const u64 stride = row_bytes(packets), at = rows + (u64)kPacketBytes * index;
  sync_warp();  // other lanes have read this packet (see get), and all the escape
#pragma unroll
  for (int i = 1; i < kRanks; ++i) {
    store_packet_local(at + row_of(i, stride), empty, active);
    if (!kFloat)
      store_packet_local(escape_at(rows + row_of(i, stride), packets, index), empty, active && index % 32 == 0);
  }
}

// ---- the first hop of two_shot.cu and direct.cu: rank r's chunk is packets r * columns, ... of the message
DEVICE u32 columns_of(const Args& args) { return divide_up(divide_up((u32)args.bytes, kPacketBytes), kRanks); }

template <bool kPlain, int kDepth>
DEVICE void load_chunks(Packet (&chunk)[kDepth][kMaxRanks], const Message<kPlain>& in, u32 columns, u32 column) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      chunk[d][i] = load_message<kElementBytes, true>(in, source(i) * columns + nth(column, d), nth(column, d) < columns);
}
template <int kDepth>
DEVICE void push_chunks(const Packet (&chunk)[kDepth][kMaxRanks], const Args& args, u64 rows, u32 columns, u32 column,
                        bool alive) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      put(args.peers[i] + rows + row_at_peer(i, row_bytes(columns)), columns, nth(column, d), canonical(chunk[d][i]),
          nth(column, d) < columns && alive);
}

// Columns of our own chunk, of every rank. As for get(): v is not to be used after a failed wait.
template <bool kPlain, int kDepth>
DEVICE void get_columns(Packet (&v)[kDepth][kMaxRanks], const Args& args, const Message<kPlain>& in, u64 rows, u32 columns,
                        u32 column, bool& alive) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
    v[d][kRank] = canonical(
        load_message<kElementBytes, true>(in, kRank * columns + nth(column, d), nth(column, d) < columns));
  get(v, args, args.peers[0] + rows, columns, column, alive);
}

// ---- flags (direct.cu)
// Waits for a flag of every other rank, a packet at `index` of its row, and empties it: for one thread, whose block then
// takes the fence (see direct.cu).
DEVICE void get_flags(const Args& args, u64 rows, u64 stride, u32 index, bool& alive) {
  const u64 at = rows + (u64)kPacketBytes * index;
  Packet flag[kMaxRanks];
  const auto look = [&] {
#pragma unroll
    for (int i = 1; i < kRanks; ++i) flag[i] = load_packet_sys(at + row_of(i, stride));
  };
  await<false>(alive, args, look, [&](int i) { return arrived(flag[i]); });
  if (!alive) return;
#pragma unroll
  for (int i = 1; i < kRanks; ++i)
    store_packet_local(at + row_of(i, stride), {{kEmpty, kEmpty, kEmpty, kEmpty}}, true);
}
