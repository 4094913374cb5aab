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
    p.word[2 * j] = (u32)bits;
    p.word[2 * j + 1] = (u32)(bits >> 32);
  } else if constexpr (kBytes == 4) {
    p.word[j] = (u32)bits;
  } else {
    p.word[j * kBytes / 4] |= (u32)bits << (8 * (j * kBytes % 4));
  }
}

template <int kBytes> struct Unsigned;
template <> struct Unsigned<1> { using type = u8; };
template <> struct Unsigned<2> { using type = u16; };
template <> struct Unsigned<4> { using type = u32; };
template <> struct Unsigned<8> { using type = u64; };

DEVICE bool whole(u64 at, u64 begin, u64 bytes) { return at % kPacketBytes == 0 && begin + kPacketBytes <= bytes; }

// Packet `index` of the message of `bytes` bytes at `base`; what lies beyond its end reads as zero.
template <int kElementBytes> DEVICE Packet load_message(u64 base, u64 index, u64 bytes) {
  using Bits = typename Unsigned<kElementBytes>::type;
  const u64 begin = index * kPacketBytes, at = base + begin;
  if (whole(at, begin, bytes)) return load_packet_local(at);
  Packet p = {};
#pragma unroll
  for (u32 j = 0; j < kPacketBytes / kElementBytes; ++j)
    if (begin + (j + 1) * kElementBytes <= bytes)
      set_bits<kElementBytes>(p, j, load_local<Bits>(at + j * kElementBytes));
  return p;
}

// The reverse; nothing beyond the end is written.
template <int kElementBytes> DEVICE void store_message(u64 base, u64 index, u64 bytes, const Packet& p) {
  using Bits = typename Unsigned<kElementBytes>::type;
  const u64 begin = index * kPacketBytes, at = base + begin;
  if (whole(at, begin, bytes)) return store_packet_local(at, p);
#pragma unroll
  for (u32 j = 0; j < kPacketBytes / kElementBytes; ++j)
    if (begin + (j + 1) * kElementBytes <= bytes)
      store_local<Bits>(at + j * kElementBytes, (Bits)get_bits<kElementBytes>(p, j));
}
