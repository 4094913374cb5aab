// Messages as sequences of 16-byte packets, for any element type, length and alignment.
#pragma once
#include <sync.cuh>

constexpr u32 kPacketBytes = 16;
DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
DEVICE constexpr u32 largest_power_of_two_below(u32 n) {
  u32 power = 1;
  while (2 * power < n) power *= 2;
  return power;
}

// Bits of element j of a packet. All indices are constants after unrolling, so these compile to shifts and moves.
template <int kBytes> DEVICE u64 get_element_bits(const Packet& p, int j) {
  if constexpr (kBytes == 8) return (u64)p.word[2 * j + 1] << 32 | p.word[2 * j];
  else if constexpr (kBytes == 4) return p.word[j];
  else return (p.word[j * kBytes / 4] >> (8 * (j * kBytes % 4))) & ((1u << (8 * kBytes)) - 1);
}
template <int kBytes> DEVICE void set_element_bits(Packet& p, int j, u64 bits) {  // those bits of p must be zero
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

// An array in this rank's memory. Its first `vector_packets` packets are loaded and stored by 16-byte accesses, and the
// other packets by elements. kAligned: base and bytes are multiples of 16, so that all are loaded by 16-byte accesses.
// Kernels are compiled for both cases: they are 100 to 300 instructions long, and even an instruction that is jumped
// over takes its share of the 1.5 us of a small message (0.1 us for the functions below).
template <bool kAligned> struct Message {
  u64 base;
  u32 bytes, vector_packets;
};
template <bool kAligned> DEVICE Message<kAligned> message_at(u64 base, u64 bytes) {
  return {base, (u32)bytes, kAligned || base % kPacketBytes == 0 ? (u32)bytes / kPacketBytes : 0};
}
DEVICE bool is_aligned(u64 in, u64 out, u64 bytes) { return (in | out | bytes) % kPacketBytes == 0; }

// Load and store a packet by elements. The message has `left` bytes from there on: bytes beyond its end read as zero,
// and are not written. Elements smaller than a 32-bit word are stored by aligned words as far as possible: any 16 bytes
// contain three.
template <int kElementBytes> DEVICE void load_elements(Packet& p, u64 at, int left) {
#pragma unroll
  for (int j = 0; j < (int)kPacketBytes / kElementBytes; ++j)
    set_element_bits<kElementBytes>(
        p, j, load_element_weak<kElementBytes>(at + j * kElementBytes, (j + 1) * kElementBytes <= left));
}
template <int kElementBytes> DEVICE void store_elements(u64 at, int left, Packet p) {
  using Bits = typename Unsigned<kElementBytes>::type;
  const int lead = 4 - (int)(at % 4);  // bytes before the first of the three words
  const bool by_words = kElementBytes < 4 && left >= (int)kPacketBytes;
#pragma unroll
  for (int j = 0; j < (int)kPacketBytes / kElementBytes; ++j) {
    const bool in_words = by_words && j * kElementBytes >= lead && j * kElementBytes < lead + 12;
    if ((j + 1) * kElementBytes <= left && !in_words)
      store_weak<Bits>(at + j * kElementBytes, (Bits)get_element_bits<kElementBytes>(p, j));
  }
  if (by_words)
#pragma unroll
    for (int k = 0; k < 3; ++k)
      store_weak<u32>(at + lead + 4 * k, (u32)(((u64)p.word[k + 1] << 32 | p.word[k]) >> 8 * lead));
}

// Packet `index`; zero where active is false. kBranch: warps that load no packet by elements branch around those loads.
// That suits threads with several packets. If each thread has one packet, all loads should be under way before anything
// waits, and a branch would wait for its condition.
template <int kElementBytes, bool kBranch, bool kAligned>
DEVICE Packet load_message(const Message<kAligned>& m, u32 index, bool active) {
  const u64 at = m.base + (u64)kPacketBytes * index;
  Packet p = load_packet_weak(at, active && index < m.vector_packets);
  const bool elements = active && index >= m.vector_packets;
  if (!kAligned && (!kBranch || elements))
    load_elements<kElementBytes>(p, at, elements ? (int)(m.bytes - kPacketBytes * index) : 0);
  return p;
}

template <int kElementBytes, bool kAligned>
DEVICE void store_message(const Message<kAligned>& m, u32 index, const Packet& p, bool active) {
  const u64 at = m.base + (u64)kPacketBytes * index;
  store_packet_weak(at, p, active && index < m.vector_packets);
  if (!kAligned && active && index >= m.vector_packets)
    store_elements<kElementBytes>(at, (int)(m.bytes - kPacketBytes * index), p);
}
