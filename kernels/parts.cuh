// Arrays that are split along an axis into a part for each rank, as messages of packets.
//
// A whole array has rows of `pitch` bytes, and in each row rank r's part takes width[r] bytes from offset[r] on. For the
// first axis of a contiguous array that is one row, and for the last axis, as in logits of a split vocabulary, there are
// as many rows as the other axes have elements. A part by itself is contiguous: its rows lie one behind the other.
//
// Rank r's message holds the rows of its parts, array by array, each row padded to whole packets. So a packet never has
// bytes of two rows, and a row of any number of bytes lies where it belongs without a copy that transposes. Messages
// differ in length. An empty one is a packet without bytes: the rotation of one_shot.cu needs a packet from every rank.
#pragma once
#include <vec.cuh>

#ifdef IPCREDUCE_MEMBERS
constexpr u32 kMembers = IPCREDUCE_MEMBERS;

struct Member {                // an array of the call, or what a launch takes of it
  u64 part, whole;             // this rank's part by itself, and the array with a part of each rank
  u64 pitch;                   // of the whole array
  u64 offset[8];               // of rank r's part in a row of the whole array
  u32 width[8];                // the bytes of a row of rank r's part
  u32 first[8];                // the packet of rank r's message with which this array begins, in ascending order
};
struct SplitTable {
  u32 packets[8];              // of rank r's message, at least one
  Member members[kMembers];    // those that are not in use begin at packet 0xFFFFFFFF
};

// A packet of a message, in one of the two arrays: its address, and its bytes, of which there may be none.
struct Place {
  u64 at;
  int left;  // in its row, from there on
};

DEVICE u32 find_member(const SplitTable& table, u32 rank, u32 index) {
  u32 member = 0;
#pragma unroll
  for (u32 step = largest_power_of_two_below(kMembers); step; step /= 2)
    if (member + step < kMembers && table.members[member + step].first[rank] <= index) member += step;
  return member;
}

template <bool kWhole> DEVICE Place place_of(const SplitTable& table, u32 rank, u32 index) {
  const Member& member = table.members[kMembers > 1 ? find_member(table, rank, index) : 0];
  const u32 width = member.width[rank], packets = ceil_div(width, kPacketBytes);
  u32 column = kMembers > 1 ? index - member.first[rank] : index, row = 0;
  if (packets && column >= packets) {  // a division, which arrays of one row do without
    row = column / packets;
    column -= row * packets;
  }
  const u32 skipped = kPacketBytes * column;
  const u64 begin = kWhole ? member.whole + row * member.pitch + member.offset[rank] : member.part + (u64)row * width;
  return {begin + skipped, (int)(width - skipped)};
}

// kAligned: all addresses, offsets, pitches and widths are multiples of 16.
template <int kElementBytes, bool kAligned> DEVICE Packet load_place(const Place& place, bool active) {
  const bool vector = active && place.left >= (int)kPacketBytes && (kAligned || place.at % kPacketBytes == 0);
  Packet p = load_packet_weak(place.at, vector);
  if (!kAligned && active && !vector) load_elements<kElementBytes>(p, place.at, place.left);
  return p;
}
template <int kElementBytes, bool kAligned>
DEVICE void store_place(const Place& place, const Packet& p, bool active) {
  const bool vector = active && place.left >= (int)kPacketBytes && (kAligned || place.at % kPacketBytes == 0);
  store_packet_weak(place.at, p, vector);
  if (!kAligned && active && !vector) store_elements<kElementBytes>(place.at, place.left, p);
}
#endif
