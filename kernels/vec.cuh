// A message is a row of 16-byte packets, whatever its type, length and alignment.
#pragma once
#include <sync.cuh>

constexpr u32 kPacketBytes = 16;

// Element j of a packet, as bits. All indices are constants after unrolling, so these are shifts and moves.
template <int kBytes> DEVICE u64 get_bits(const Packet& p, int j) {
  if constexpr (kBytes == 8) return (u64)p.word[2 * j + 1] << 32 | p.word[2 * j];
  else if constexpr (kBytes == 4) return p.word[j];
  else return (p.word[j * kBytes / 4] >> (8 * (j * kBytes % 4))) & ((1u << (8 * kBytes)) - 1);
}
template <int kBytes> DEVICE void set_bits(Packet& p, int j, u64 bits) {  // into a packet that was zero there
  if constexpr (kBytes == 8) {
    p.word[2 * j] |= (u32)bits;
    p.word[2 * j + 1] |= (u32)(bits >> 32);
  } else if constexpr (kBytes == 4) {
    p.word[j] |= (u32)bits;
  } else {
    p.word[j * kBytes / 4] |= (u32)bits << (8 * (j * kBytes % 4));
  }
}

template <int kBytes> struct Unsigned;
template <> struct Unsigned<1> { using type = u8; };
template <> struct Unsigned<2> { using type = u16; };
template <> struct Unsigned<4> { using type = u32; };
template <> struct Unsigned<8> { using type = u64; };

// An array in this rank's memory: where it is aligned, its first `whole` packets are loaded and stored as such. In a plain
// one all packets are. Kernels are compiled for both: they are 100 to 300 instructions long, and each one that is jumped
// over takes its part of the 1.5 us of a small message (0.1 us for those below).
template <bool kPlain> struct Message {
  u64 base;
  u32 bytes, whole;
};
template <bool kPlain> DEVICE Message<kPlain> message_at(u64 base, u64 bytes) {
  return {base, (u32)bytes, kPlain || base % kPacketBytes == 0 ? (u32)bytes / kPacketBytes : 0};
}
DEVICE bool is_plain(u64 in, u64 out, u64 bytes) { return (in | out | bytes) % kPacketBytes == 0; }

// The other packets, of which `left` bytes are the message's: what lies beyond its end reads as zero, and is not written.
// Elements smaller than a word are stored by words as far as they can be: three lie within any whole packet.
template <int kElementBytes> DEVICE void load_elements(Packet& p, u64 at, int left) {
#pragma unroll
  for (int j = 0; j < (int)kPacketBytes / kElementBytes; ++j)
    set_bits<kElementBytes>(
        p, j, load_element_local<kElementBytes>(at + j * kElementBytes, (j + 1) * kElementBytes <= left));
}
template <int kElementBytes> DEVICE void store_elements(u64 at, int left, Packet p) {
  using Bits = typename Unsigned<kElementBytes>::type;
  const int lead = 4 - (int)(at % 4);  // bytes before the first of the three words
  const bool by_words = kElementBytes < 4 && left >= (int)kPacketBytes;
#pragma unroll
  for (int j = 0; j < (int)kPacketBytes / kElementBytes; ++j) {
    const bool in_words = by_words && j * kElementBytes >= lead && j * kElementBytes < lead + 12;
    if ((j + 1) * kElementBytes <= left && !in_words)
      store_local<Bits>(at + j * kElementBytes, (Bits)get_bits<kElementBytes>(p, j));
  }
  if (by_words)
#pragma unroll
    for (int k = 0; k < 3; ++k)
      store_local<u32>(at + lead + 4 * k, (u32)(((u64)p.word[k + 1] << 32 | p.word[k]) >> 8 * lead));
}

// Packet `index`; zero where active is false. kBranch: warps that have no packet of elements go round these loads. That is
// for threads of several packets; for those of one, all loads are to be under way before anything waits, at a branch too.
template <int kElementBytes, bool kBranch, bool kPlain>
DEVICE Packet load_message(const Message<kPlain>& m, u32 index, bool active) {
  const u64 at = m.base + (u64)kPacketBytes * index;
  Packet p = load_packet_local(at, active && index < m.whole);
  const bool elements = active && index >= m.whole;
  if (!kPlain && (!kBranch || elements))
    load_elements<kElementBytes>(p, at, elements ? (int)(m.bytes - kPacketBytes * index) : 0);
  return p;
}

template <int kElementBytes, bool kPlain>
DEVICE void store_message(const Message<kPlain>& m, u32 index, const Packet& p, bool active) {
  const u64 at = m.base + (u64)kPacketBytes * index;
  store_packet_local(at, p, active && index < m.whole);
  if (!kPlain && active && index >= m.whole) store_elements<kElementBytes>(at, (int)(m.bytes - kPacketBytes * index), p);
}
