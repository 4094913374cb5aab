// Packets between ranks: where they lie, how a reader knows that one has arrived, and how every wait ends.
//
// A rank's workspace has two halves, used in turn by the parity of the epoch. In a half, each source has a row of
// slots (row_packets() apart). A slot at rest is empty: its mark words are all ones. The reader puts the mark back
// once it has read, so the invariant holds again when its kernel ends.
#pragma once
#include <reduce.cuh>

struct Args {
  u64 in, out;          // this rank's arrays; may be the same
  u64 bytes;            // of the message, the same on every rank
  u64 peers[8];         // workspace of rank (kRank + i) % kRanks, as mapped here; peers[0] is our own
  u64 half_bytes;       // from one half of a workspace to the other
  u64 epochs;           // kEpochSlots words on this GPU, then three of check_wait
  u64 abort;            // word in the control page (host memory, shared by all ranks): non-zero ends every wait
  u64 missing;          // this rank's word there: bit r is set if a wait for rank r's data passed its deadline
  u64 timeout_ns;
  u64 trigger_early;    // let the next kernel's blocks come in before we wait for the one before us
  u64 outs[8];          // direct.cu: the output of rank (kRank + i) % kRanks, as mapped here
};

constexpr u32 kEpochSlots = 512;  // so many blocks at most; the plan knows it too
constexpr u32 kEmpty = 0xFFFFFFFFu;
constexpr u32 kOtherNan = 0x7FFF7FFFu;  // a NaN in every float type, whichever of its words this is

// The halves of a packet that arrive whole. With 16-byte atomicity one mark in the last word covers all; over a link
// that splits packets, each 8 bytes carry their own. The ranks agree on it at start-up.
constexpr bool kWholePackets = IPCREDUCE_WHOLE_PACKETS;

DEVICE u32 source(int i) { return (kRank + i) % kRanks; }
DEVICE u32 divide_up(u32 a, u32 b) { return (a + b - 1) / b; }

// ---- epochs: every launch advances every slot by one, on every rank alike, so each block needs only its own slot.
DEVICE u32 read_epoch(const Args& args) { return load_word_gpu(args.epochs + 4 * block_in_grid()); }

// After the block's sends and before its polls: the barrier is what lets the slot change.
DEVICE void advance_epochs(const Args& args, u32 epoch) {
  sync_block();
  for (u32 j = block_in_grid() + thread_in_block() * blocks_in_grid(); j < kEpochSlots;
       j += blocks_in_grid() * threads_in_block())
    store_word_gpu(args.epochs + 4 * j, epoch + 1);
}

// ---- waits: a poll looks at data. Now and then it looks at the clock and, through a copy in this GPU's memory, at the
// abort word: if every waiting warp read host memory itself, the reads would queue for milliseconds.
constexpr u32 kSpinsBetweenChecks = 256;
constexpr u32 kMicrosecondsBetweenReads = 16;  // of the abort word, by the whole GPU
// Once it is up, waits go on for so long: it is about a later call than the one whose packets are under way to a rank
// that is slower than the one that raised it, or has no time slice of a shared GPU just now.
constexpr u32 kGraceMicroseconds = 100000;

// Returns when the wait began, or 0 if it is over without data.
DEVICE_COLD u64 check_wait(u64 started, u32 missing, u64 epochs, u64 abort, u64 report, u64 timeout_ns) {
  const u64 aborted_here = epochs + 4 * kEpochSlots, read_last = aborted_here + 4, seen_up = aborted_here + 8;
  const u64 now = nanoseconds();
  const u32 microseconds = (u32)(now >> 10);
  if (!started) started = now;
  if (now - started > timeout_ns) {
    store_word_sys(report, load_word_sys(report) | missing);  // threads may miss different ranks
    store_word_sys(abort, 1);
    store_word_gpu(aborted_here, 1);
    return 0;
  }
  const u32 seen = load_word_gpu(seen_up);  // when, or 0; another thread's clock may be ahead of ours
  if (seen && (int)(microseconds - seen) > (int)kGraceMicroseconds) store_word_gpu(aborted_here, 1);
  if (!seen && microseconds - load_word_gpu(read_last) > kMicrosecondsBetweenReads) {
    store_word_gpu(read_last, microseconds);
    if (load_word_sys(abort)) store_word_gpu(seen_up, microseconds | 1);
  }
  return load_word_gpu(aborted_here) ? 0 : started;
}

// Whether a wait on this GPU has ended without data since the last reset: every wait that did is in it.
DEVICE bool aborted(const Args& args) { return load_word_gpu(args.epochs + 4 * kEpochSlots) != 0; }

// A thread's waits. By value in registers: only the cold function above may see memory.
struct Wait {
  u64 started = 0;  // of the present wait; 0 before its first check
  u32 spins = 0;
  bool alive;       // false: give up here and in every later wait of this thread

  // Kernels that are queued behind one that gave up send nothing: a slower rank may still be in that operation, and two
  // operations later their packets would come into the same half.
  DEVICE explicit Wait(const Args& args) : alive(!aborted(args)) {}

  DEVICE void spin(const Args& args, u32 missing) {
    relax();
    if (++spins % kSpinsBetweenChecks) return;
    started = check_wait(started, missing, args.epochs, args.abort, args.missing, args.timeout_ns);
    alive = started != 0;
  }
};

// ---- rows of slots
// After the packets of a row come its escapes, one a warp (see put). Rows begin at 128-byte lines.
DEVICE u64 escape_at(u64 row, u32 packets, u32 index) {
  return row + kPacketBytes * ((u64)divide_up(packets, 32) * 32 + index / 32);
}
DEVICE u64 row_bytes(u32 packets) {
  const u32 warps = divide_up(packets, 32);
  return kPacketBytes * (u64)(warps * 32 + divide_up(warps, 8) * 8);
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
// extra packet a warp, always sent, tells by a bit a lane which words were: 1/32 more on the wire, no epoch in the data.
DEVICE void put(u64 row, u32 packets, u32 index, Packet p, bool active) {
  if constexpr (!kFloat) {
    const u32 last = warp_ballot(active && p.word[3] == kEmpty);
    const u32 middle = kWholePackets ? 0 : warp_ballot(active && p.word[1] == kEmpty);
    if (p.word[3] == kEmpty) p.word[3] = 0;
    if (!kWholePackets && p.word[1] == kEmpty) p.word[1] = 0;
    if (active && index % 32 == 0) store_packet_sys(escape_at(row, packets, index), {{last, 0, middle, 0}});
  }
  if (active) store_packet_sys(row + (u64)kPacketBytes * index, p);
}

// What a thread takes at a time: packets index, index + threads_in_grid(), ... of a row, those that exist.
DEVICE u32 nth(u32 index, int d) { return index + d * threads_in_grid(); }

// Waits for kDepth packets of the row of every other rank, v[d][rank]; rows lie row_bytes(packets) apart from `rows` on,
// by rank. All loads of a turn are issued before the first is tested. v[d][kRank] is left alone. If the wait ends without
// data, wait.alive is false and v is not to be used.
template <int kDepth>
DEVICE void get(Packet (&v)[kDepth][kMaxRanks], const Args& args, u64 rows, u32 packets, u32 index, Wait& wait) {
  const u64 stride = row_bytes(packets);
  Packet escape[kDepth][kMaxRanks];
  while (wait.alive) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      if (nth(index, d) < packets) {
#pragma unroll
        for (int i = 1; i < kRanks; ++i) {
          const u64 row = rows + source(i) * stride;
          v[d][source(i)] = load_packet_sys(row + (u64)kPacketBytes * nth(index, d));
          if (!kFloat) escape[d][source(i)] = load_packet_sys(escape_at(row, packets, nth(index, d)));
        }
      }
    u32 missing = 0;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      if (nth(index, d) < packets) {
#pragma unroll
        for (int i = 1; i < kRanks; ++i)
          if (!arrived(v[d][source(i)]) || (!kFloat && !arrived(escape[d][source(i)]))) missing |= 1u << source(i);
      }
    if (!missing) {
      wait.started = 0;  // the deadline is for a single wait
      break;
    }
    wait.spin(args, missing);
  }
  if (!kFloat && wait.alive) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      if (nth(index, d) < packets) {
#pragma unroll
        for (int i = 1; i < kRanks; ++i) {
          const Packet &mark = escape[d][source(i)];
          const u32 bit = nth(index, d) % 32;
          if (mark.word[0] >> bit & 1) v[d][source(i)].word[3] = kEmpty;
          if (!kWholePackets && (mark.word[2] >> bit & 1)) v[d][source(i)].word[1] = kEmpty;
        }
      }
  }
}

// Empties what get() read. All lanes of a warp call it. Nothing is emptied after a wait that failed: a late packet
// would fill the slot again, so the host does it when every kernel has ended (workspace.py, resync).
DEVICE void clear(u64 rows, u32 packets, u32 index, bool active, const Wait& wait) {
  const Packet empty = {{kEmpty, kEmpty, kEmpty, kEmpty}};
  const u64 stride = row_bytes(packets), at = rows + (u64)kPacketBytes * index;
  if constexpr (!kFloat) sync_warp();  // every lane has read the escape before lane 0 empties it
  if (!active || !wait.alive) return;
#pragma unroll
  for (int i = 1; i < kRanks; ++i) {
    store_packet_local(at + source(i) * stride, empty);
    if (!kFloat && index % 32 == 0) store_packet_local(escape_at(rows + source(i) * stride, packets, index), empty);
  }
}

// What a wait that ended without data leaves in the output: NaN, or -1.
DEVICE Packet poison() { return {{kEmpty, kEmpty, kEmpty, kEmpty}}; }

// ---- the first hop of two_shot.cu and direct.cu: rank r's chunk is packets r * columns, ... of the message
template <int kDepth>
DEVICE void push_chunks(const Args& args, u64 rows, u32 columns, u32 column, const Wait& wait) {
  Packet chunk[kDepth][kMaxRanks] = {};
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
    if (nth(column, d) < columns) {
#pragma unroll
      for (int i = 1; i < kRanks; ++i)
        chunk[d][i] = load_message<kElementBytes>(args.in, (u64)source(i) * columns + nth(column, d), args.bytes);
    }
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      put(args.peers[i] + rows + kRank * row_bytes(columns), columns, nth(column, d), canonical(chunk[d][i]),
          nth(column, d) < columns && wait.alive);
}

// The folds of columns of our own chunk, once the peers' packets are there; poison if the wait ended without them.
template <int kDepth>
DEVICE void fold_columns(Packet (&results)[kDepth], const Args& args, u64 rows, u32 columns, u32 column, Wait& wait) {
  Packet v[kDepth][kMaxRanks];
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
    if (nth(column, d) < columns)
      v[d][kRank] =
          canonical(load_message<kElementBytes>(args.in, (u64)kRank * columns + nth(column, d), args.bytes));
  get(v, args, args.peers[0] + rows, columns, column, wait);
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
    results[d] = wait.alive && nth(column, d) < columns ? fold(v[d]) : poison();
}

// ---- flags (direct.cu)
// Waits for a flag of every other rank, a packet at `index` of its row, and empties it: for one thread, whose block then
// takes the fence (see direct.cu).
DEVICE void get_flags(const Args& args, u64 rows, u64 stride, u32 index, Wait& wait) {
  const u64 at = rows + (u64)kPacketBytes * index;
  while (wait.alive) {
    u32 missing = 0;
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      if (!arrived(load_packet_sys(at + source(i) * stride))) missing |= 1u << source(i);
    if (!missing) break;
    wait.spin(args, missing);
  }
  if (!wait.alive) return;
#pragma unroll
  for (int i = 1; i < kRanks; ++i)
    store_packet_local(at + source(i) * stride, {{kEmpty, kEmpty, kEmpty, kEmpty}});
}
