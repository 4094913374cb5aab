// Packet exchange between ranks: slot layout, arrival detection, and bounded waits.
//
// Each rank owns a workspace, which its peers have mapped and store packets into. A workspace has two halves, and
// operations alternate between them by the parity of the epoch. A half holds groups of rows of slots. A slot holds one
// packet, and a row the packets of one peer: row i - 1 is that of peer_rank(i). Rows are row_bytes() apart. A slot at
// rest is empty: its flag words hold kSentinel. The reader restores the sentinel after the load, so every slot is empty
// again when the reader's kernel ends.
//
// Related protocols:
// * NCCL LL stores a 4-byte flag beside each 4 bytes of data, in 8-byte accesses. LL128 keeps 8 bytes of flag in a line
//   of 128 bytes, and relies on the link to deliver that line whole.
// * Lamport buffers (TensorRT-LLM, FlashInfer) also poll the data for a sentinel, -0.0. They rotate three buffers.
// * The custom all-reduces of vLLM and SGLang place barriers of separate flags around plain loads of the peers' data.
// Here the last word of a 16-byte packet is data and flag at once, and the packet is one 128-bit access. So arrival
// needs no fence, and floats need no byte beside the data. Integers have no spare value, so each warp sends an escape
// packet, which says which words were equal to the sentinel (see send_packet). Each rank counts epochs in its own GPU's
// memory, and no packet carries an epoch. Two buffers are enough, because the reader restores the sentinel (see
// one_shot.cu, rotation).
#pragma once
#include <list.cuh>
#include <map.cuh>
#include <parts.cuh>
#include <reduce.cuh>
#ifdef IPCREDUCE_SCALE
#include <rmsnorm.cuh>
#endif

// The arguments of every kernel, all 64-bit words; ipcreduce/device/arguments.py has their indices.
struct Args {
  u64 in, out;          // this rank's arrays; may be the same
  u64 bytes;            // of the message, the same on every rank
  u64 peers[8];         // workspace of peer_rank(i), as mapped in this process; peers[0] is this rank's own
  u64 half_bytes;       // from one half of a workspace to the other
  u64 epochs;           // in this GPU's memory: kEpochSlots pairs of words (epoch, abandoned), then check_wait's three
  u64 abort;            // word in the control page (host memory, shared by all ranks): non-zero ends every wait
  u64 missing;          // this rank's two words there: a bit r if a wait for rank r's data passed its deadline; then
                        // non-zero if a wait of this rank has ended without data: the epoch of that kernel, plus 1
  u64 timeout_ns;       // deadline of a wait, from its start
  u64 outs[8];          // direct.cu: output of peer_rank(i), as mapped in this process; bulk*.cu: its area;
                        // spread.cu: the root in outs[0]; copy.cu: three numbers
#ifdef IPCREDUCE_PARTS  // a list: in and out are all addresses or-ed together, and bytes counts whole packets
  ListTable parts;
#endif
#ifdef IPCREDUCE_MAP
  OperandTable operands;
#endif
#ifdef IPCREDUCE_SCALE  // a fused kernel
  NormArgs norm;
#endif
#ifdef IPCREDUCE_MEMBERS  // arrays in parts: in is all addresses and steps or-ed together, out is not used, and bytes
  SplitTable table;       // counts the packets of the longest message
#endif
};

// This rank's input and output, for load_message() and store_message().
#ifdef IPCREDUCE_PARTS
template <bool kAligned> DEVICE List<kAligned> input_of(const Args& args) { return {args.parts, true}; }
template <bool kAligned> DEVICE List<kAligned> output_of(const Args& args) { return {args.parts, false}; }
#else
template <bool kAligned> DEVICE auto input_of(const Args& args) { return message_at<kAligned>(args.in, args.bytes); }
template <bool kAligned> DEVICE auto output_of(const Args& args) { return message_at<kAligned>(args.out, args.bytes); }
#endif

// The operands of packet `index` for map_packet(), and whether all can be loaded as kAligned says.
#ifdef IPCREDUCE_MAP
template <bool kAligned> DEVICE Operands operands_of(const Args& args, u32 index, bool active) {
  return load_operands<kAligned>(args.operands, (u32)args.bytes, index, active);
}
DEVICE bool operands_aligned(const Args& args) { return operands_are_aligned(args.operands); }
#else
template <bool kAligned> DEVICE Operands operands_of(const Args&, u32, bool) { return {}; }
#define operands_aligned(args) true  // a function would change the order of instructions
#endif

constexpr u32 kEpochSlots = 512;  // upper bound of the grid, in blocks; plan.EPOCH_SLOTS is the same
constexpr u32 kSentinel = 0xFFFFFFFFu;
constexpr u32 kReplacementNan = 0x7FFF7FFFu;  // in a flag word, a NaN of every float type

// True if the links deliver 16 bytes as one access. Then the last word of a packet is the flag for all of it. Otherwise
// each 8-byte part of a packet arrives by itself, and its last word is its flag. The ranks agree on this at start-up.
constexpr bool kWholePackets = IPCREDUCE_WHOLE_PACKETS;

// Peers are numbered from this rank on: peer i is rank kRank + i, modulo kRanks, and peer 0 is this rank.
DEVICE u32 peer_rank(int i) { return (kRank + i) % kRanks; }
// Offsets within a group: of peer i's row in this rank's workspace, and of this rank's row in peer i's workspace.
DEVICE u64 row_offset(int i, u64 stride) { return (i - 1) * stride; }
DEVICE u64 row_offset_at_peer(int i, u64 stride) { return row_offset(kRanks - i, stride); }

// ---- epochs: every launch advances every slot by one, on every rank, so a block needs to read its own slot only.
struct Epoch {
  u32 number;
  bool alive;  // false once a wait on this GPU was abandoned: see wait_for_peers()
};
DEVICE Epoch load_epoch(const Args& args) {  // one load for both, and for a whole warp: its lanes see the same alive
  const u64 slot = load_u64_relaxed_gpu(args.epochs + 8 * block_in_grid());
  return {(u32)slot, slot >> 32 == 0};
}
DEVICE u64 parity_half_offset(const Args& args, Epoch epoch) { return epoch.number & 1 ? args.half_bytes : 0; }

// Called after the block's sends and before its polls. After the barrier, all threads have read the slot.
DEVICE void advance_epochs(const Args& args, Epoch epoch) {
  sync_block();
  for (u32 j = block_in_grid() + thread_in_block() * blocks_in_grid(); j < kEpochSlots;
       j += blocks_in_grid() * threads_in_block())
    store_u32_relaxed_gpu(args.epochs + 8 * j, epoch.number + 1);
}

// ---- waits: a poll loads data. After every kSpinsBetweenChecks polls, a wait also reads the clock and the abort word.
// It reads a copy of that word in this GPU's memory: if every waiting warp read host memory, the reads would queue for
// milliseconds. Warps check at about the same time, so one of them claims the next read of host memory.
constexpr u32 kMicrosecondsBetweenAbortReads = 16;  // by the whole GPU
// Waits go on for this long after the abort word was seen. The abort may concern a later call, while packets of this
// one have not arrived yet: from a rank that is slower than the one that aborted, or waits for its time slice of a
// shared GPU.
constexpr u32 kGraceMicroseconds = 100000;

// Returns the start time of the wait, or 0 if it is abandoned. Then every later wait on this GPU is abandoned, too,
// until a reset.
DEVICE_NOINLINE u64 check_wait(u64 started, u32 missing, const Args& args) {
  const u64 epochs = args.epochs, abandoned = epochs + 8 * kEpochSlots;
  const u64 abort_read_at = abandoned + 4, abort_seen_at = abandoned + 8;
  const u64 now = globaltimer_ns();
  const u32 microseconds = (u32)(now >> 10);
  if (!started) started = now;
  const bool late = now - started > args.timeout_ns;
  if (late) {
    // Or-ed into the word, because warps may miss different ranks.
    store_u32_relaxed_sys(args.missing, load_u32_relaxed_sys(args.missing) | missing);
    store_u32_relaxed_sys(args.abort, 1);
  }
  const u32 seen = load_u32_relaxed_gpu(abort_seen_at);  // 0, or a time, which may be ahead of this thread's
  const u32 read_at = load_u32_relaxed_gpu(abort_read_at);
  if (!seen && microseconds - read_at > kMicrosecondsBetweenAbortReads && is_first_active_lane() &&
      replace_u32_relaxed_gpu(abort_read_at, read_at, microseconds) && load_u32_relaxed_sys(args.abort))
    store_u32_relaxed_gpu(abort_seen_at, microseconds | 1);
  const bool known = load_u32_relaxed_gpu(abandoned);
  if (!late && !known && !(seen && (int)(microseconds - seen) > (int)kGraceMicroseconds)) return started;
  store_u32_relaxed_gpu(epochs + 8 * block_in_grid() + 4, 1);  // before this block's next barrier
  // By now this block has advanced its slot. If the store is not visible here yet, the host takes the kernel before
  // this one for the first without data, which does no harm. 0 would say that there is none.
  const u32 next_epoch = load_u32_relaxed_gpu(epochs + 8 * block_in_grid());
  store_u32_relaxed_sys(args.missing + 4, next_epoch ? next_epoch : kSentinel);
  if (!known) {
    store_u32_relaxed_gpu(abandoned, 1);
#pragma unroll 1
    for (u32 j = 0; j < kEpochSlots; ++j) store_u32_relaxed_gpu(epochs + 8 * j + 4, 1);
  }
  return 0;
}

// True if a wait of this block was abandoned, or, as far as this block knows, one of another block or kernel on this
// GPU.
DEVICE bool wait_abandoned(const Args& args) {
  return load_u32_relaxed_gpu(args.epochs + 8 * block_in_grid() + 4) != 0;
}

// True if any wait on this GPU was abandoned before this kernel began.
DEVICE bool was_abandoned(const Args& args) { return load_u32_relaxed_gpu(args.epochs + 8 * kEpochSlots) != 0; }

// Polls until the data of every peer have arrived. `alive` becomes false once a wait on this GPU was abandoned. From
// then on, kernels neither wait nor send. Kernels that are queued behind the abandoned one must not send either: a
// slower rank may still be in that operation, and packets sent two operations later would go into the same half.
// load_slots() loads, and arrived_from(i) says if all data of peer i were in that load. The missing ranks are collected
// for check_wait only: in every poll, this would double the instructions between the loads and the reduction.
//
// kWarp: the lanes of a warp wait together. If each lane went on when its own packet arrived, the late lanes would poll
// again only after the early lanes had reduced and stored: that costs 0.1 us of 2 us (H200).
template <bool kWarp, class LoadSlots, class ArrivedFrom>
DEVICE void wait_for_peers(bool& alive, const Args& args, const LoadSlots& load_slots,
                           const ArrivedFrom& arrived_from) {
  const auto any = [](bool mine) { return kWarp ? warp_any(mine) : mine; };
  u64 started = 0;
  while (alive) {
#pragma unroll 1
    for (u32 spins = 0; spins < kSpinsBetweenChecks; ++spins) {
      load_slots();
      bool waiting = false;
#pragma unroll
      for (int i = 1; i < kRanks; ++i) waiting |= !arrived_from(i);
      if (!any(waiting)) return;
      spin_pause();
    }
    u32 missing = 0;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) missing |= arrived_from(i) ? 0 : 1u << peer_rank(i);
    started = check_wait(started, kWarp ? warp_or(missing) : missing, args);  // one value, as lanes store in any order
    alive = !any(!started);
  }
}

// ---- rows of slots
// The packets of a row are followed by its escape packets, one for each warp (see send_packet). A row begins at a line
// of 128 bytes.
DEVICE u64 escape_at(u64 row, u32 packets, u32 index) {
  return row + kPacketBytes * ((u64)ceil_div(packets, 32) * 32 + index / 32);
}
DEVICE u64 row_bytes(u32 packets) {
  const u32 warps = ceil_div(packets, 32);
  return kPacketBytes * (u64)(warps * 32 + ceil_div(warps, 8) * 8);
}

// The escape packet of a warp: for each lane, a bit says whether a word was equal to the sentinel. Its words are, in
// order: the last words of lanes 0 to 15, of lanes 16 to 31, and then the second words in the same way. Each word uses
// 16 bits, so no word equals the sentinel, and each is its own flag. That is needed because a compiler may narrow a
// load to the words in use, and two loads see different moments.
DEVICE Packet make_escape(u32 last, u32 second) {
  return {{last & 0xFFFF, last >> 16, second & 0xFFFF, second >> 16}};
}

DEVICE bool has_arrived(const Packet& p) { return p.word[3] != kSentinel && (kWholePackets || p.word[1] != kSentinel); }

// Floats: a flag word equal to the sentinel belongs to a NaN, and is sent as another NaN. Results never contain
// such a word, as their NaNs are others. A rank's own input passes through here, too, so that all ranks reduce the same
// bits. Integers: see send_packet().
DEVICE Packet replace_sentinel_nan(Packet p) {
  if constexpr (kFloat) {
    if (p.word[3] == kSentinel) p.word[3] = kReplacementNan;
    if (!kWholePackets && p.word[1] == kSentinel) p.word[1] = kReplacementNan;
  }
  return p;
}

// Stores packet `index` of a row of `packets` in a peer's workspace. All lanes of a warp call it. Lanes with nothing to
// send pass active == false. Integers have no spare value, so a flag word equal to the sentinel is sent as zero, and
// each warp always sends one escape packet, which says which words these were. That adds 1/32 to the bytes sent, and
// the data need no epoch.
DEVICE void send_packet(u64 row, u32 packets, u32 index, Packet p, bool active) {
  if constexpr (!kFloat) {
    const u32 last = warp_ballot(active && p.word[3] == kSentinel);
    const u32 second = kWholePackets ? 0 : warp_ballot(active && p.word[1] == kSentinel);
    if (p.word[3] == kSentinel) p.word[3] = 0;
    if (!kWholePackets && p.word[1] == kSentinel) p.word[1] = 0;
    store_packet_relaxed_sys(escape_at(row, packets, index), make_escape(last, second), active && index % 32 == 0);
  }
  store_packet_relaxed_sys(row + (u64)kPacketBytes * index, p, active);
}

// A thread handles up to kDepth packets of a row at a time: index, index + threads_in_grid(), and so on.
DEVICE u32 packet_index(u32 index, int d) { return index + d * threads_in_grid(); }
DEVICE bool warp_has_packet(u32 index, u32 packets) { return index - index % 32 < packets; }

// Stands in the output for data that did not arrive: NaN, or -1.
DEVICE Packet poison() { return {{kSentinel, kSentinel, kSentinel, kSentinel}}; }

// How many packets come from peer i. Rows of slots have room for the longest message.
struct SamePackets {
  static constexpr bool kSame = true;
  u32 packets;
  DEVICE u32 operator()(int) const { return packets; }
};
#ifdef IPCREDUCE_MEMBERS
struct PartPackets {  // every rank sends its part
  static constexpr bool kSame = false;
  const SplitTable& table;
  DEVICE u32 operator()(int i) const { return table.packets[peer_rank(i)]; }
};
#endif

// Waits for kDepth packets from the row of every peer, and loads them into v[d][rank]. The group of rows, for messages of
// up to `longest` packets, begins at `rows`. Each poll issues all its loads before it tests the first. v[d][kRank] is not
// touched. If the wait is abandoned, alive is false and v must not be used. If a warp has any packet to wait for, all its
// lanes call this.
template <int kDepth, class PacketsOf>
DEVICE void receive_packets(Packet (&v)[kDepth][kMaxRanks], const Args& args, u64 rows, u32 longest,
                            const PacketsOf& packets_of, u32 index, bool& alive) {
  const u64 stride = row_bytes(longest);
  const u32 lane = index % 32;
  u32 last[kDepth][kMaxRanks], second[kDepth][kMaxRanks];  // this lane's words of the escape packets
  const auto spare_of = [&](int i) { return index < packets_of(i) ? index : index - lane; };
  const u32 same_spare = spare_of(1);  // lanes without a packet poll one that their warp polls
  const auto load_slots = [&] {
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 1; i < kRanks; ++i) {
        const u32 spare = PacketsOf::kSame ? same_spare : spare_of(i);
        const u32 slot = packet_index(index, d) < packets_of(i) ? packet_index(index, d) : spare;
        const u64 row = rows + row_offset(i, stride);
        v[d][peer_rank(i)] = load_packet_relaxed_sys(row + (u64)kPacketBytes * slot);
        if (kFloat) continue;
        const u64 escape = escape_at(row, longest, slot) + lane / 16 * 4;
        last[d][peer_rank(i)] = load_u32_relaxed_sys(escape);
        if (!kWholePackets) second[d][peer_rank(i)] = load_u32_relaxed_sys(escape + 8);
      }
  };
  const auto arrived_from = [&](int i) {
    const u32 rank = peer_rank(i);
    bool all = true;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      all &= has_arrived(v[d][rank]) &&
             (kFloat || (last[d][rank] != kSentinel && (kWholePackets || second[d][rank] != kSentinel)));
    if (PacketsOf::kSame) return all;
    return all || !warp_has_packet(index, packets_of(i));
  };
  wait_for_peers<true>(alive, args, load_slots, arrived_from);
  if (kFloat || !alive) return;  // if v could be used after an abandoned wait, every poll would copy it
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      const u32 rank = peer_rank(i);
      if (last[d][rank] >> lane % 16 & 1) v[d][rank].word[3] = kSentinel;
      if (!kWholePackets && (second[d][rank] >> lane % 16 & 1)) v[d][rank].word[1] = kSentinel;
    }
}

// The same for messages of one length.
template <int kDepth>
DEVICE void receive_packets(Packet (&v)[kDepth][kMaxRanks], const Args& args, u64 rows, u32 packets, u32 index,
                            bool& alive) {
  receive_packets(v, args, rows, packets, SamePackets{packets}, index, alive);
}

// Restores the sentinel in the slots that receive_packets() has read, while alive. All lanes of a warp call it. It does
// nothing after an abandoned wait: a late packet would fill the slot again, so the host empties the slots when every
// kernel has ended (Workspace.reset, in the resynchronisation).
template <class PacketsOf>
DEVICE void restore_sentinels(u64 rows, u32 longest, const PacketsOf& packets_of, u32 index, bool active) {
  const Packet empty = {{kSentinel, kSentinel, kSentinel, kSentinel}};
  const u64 stride = row_bytes(longest), at = rows + (u64)kPacketBytes * index;
  sync_warp();  // other lanes have read this packet as their spare, and all lanes the escape packet
#pragma unroll
  for (int i = 1; i < kRanks; ++i) {
    const bool has = PacketsOf::kSame ? active : active && index < packets_of(i);
    store_packet_weak(at + row_offset(i, stride), empty, has);
    if (!kFloat)
      store_packet_weak(escape_at(rows + row_offset(i, stride), longest, index), empty, has && index % 32 == 0);
  }
}
DEVICE void restore_sentinels(u64 rows, u32 packets, u32 index, bool active) {
  restore_sentinels(rows, packets, SamePackets{packets}, index, active);
}

// ---- the first hop of two_shot.cu and direct.cu: the chunk of rank r begins at packet r * columns of the message
DEVICE u32 columns_per_chunk(const Args& args) { return ceil_div(ceil_div((u32)args.bytes, kPacketBytes), kRanks); }

template <class Input, int kDepth>
DEVICE void load_chunks(Packet (&chunk)[kDepth][kMaxRanks], const Input& in, u32 columns, u32 column) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    const u32 own_column = packet_index(column, d);
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      chunk[d][i] = load_message<kElementBytes, true>(in, peer_rank(i) * columns + own_column, own_column < columns);
  }
}
template <int kDepth>
DEVICE void push_chunks(const Packet (&chunk)[kDepth][kMaxRanks], const Args& args, u64 rows, u32 columns, u32 column,
                        bool alive) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    const u32 own_column = packet_index(column, d);
#pragma unroll
    for (int i = 1; i < kRanks; ++i)
      send_packet(args.peers[i] + rows + row_offset_at_peer(i, row_bytes(columns)), columns, own_column,
                  replace_sentinel_nan(chunk[d][i]), own_column < columns && alive);
  }
}

// Loads kDepth columns of this rank's own chunk and waits for those of every peer. As for receive_packets(), v must not
// be used after an abandoned wait.
template <class Input, int kDepth>
DEVICE void receive_columns(Packet (&v)[kDepth][kMaxRanks], const Args& args, const Input& in, u64 rows, u32 columns,
                            u32 column, bool& alive) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    const u32 own_column = packet_index(column, d);
    v[d][kRank] = replace_sentinel_nan(
        load_message<kElementBytes, true>(in, kRank * columns + own_column, own_column < columns));
  }
  receive_packets(v, args, args.peers[0] + rows, columns, column, alive);
}

// ---- flags (direct.cu, limit.cu, bulk.cu and its like): each is the packet at `index` of its sender's row. One thread
// calls these for its block. A fence, if needed, is up to the caller (see direct.cu).
DEVICE void send_flags(const Args& args, u64 rows, u64 stride, u32 index, bool active = true) {  // rows: within peers
#pragma unroll
  for (int i = 1; i < kRanks; ++i)
    store_packet_relaxed_sys(args.peers[i] + rows + row_offset_at_peer(i, stride) + kPacketBytes * index, {{0, 0, 0, 0}},
                             active);
}
// Waits for a flag of every peer, and restores the sentinel.
DEVICE void wait_for_flags(const Args& args, u64 rows, u64 stride, u32 index, bool& alive) {
  const u64 at = rows + (u64)kPacketBytes * index;
  Packet flag[kMaxRanks];
  const auto load_slots = [&] {
#pragma unroll
    for (int i = 1; i < kRanks; ++i) flag[i] = load_packet_relaxed_sys(at + row_offset(i, stride));
  };
  wait_for_peers<false>(alive, args, load_slots, [&](int i) { return has_arrived(flag[i]); });
  if (!alive) return;
#pragma unroll
  for (int i = 1; i < kRanks; ++i)
    store_packet_weak(at + row_offset(i, stride), {{kSentinel, kSentinel, kSentinel, kSentinel}}, true);
}
