// A list of arrays as one message. The arrays, each padded to whole packets, lie one behind the other in it.
//
// The arguments of the kernel hold a table of the arrays, so that a thread finds the array of its packet without a load
// from memory. A launch has one part for each array that has bytes in it.
//
// NCCL's group calls and PyTorch's coalesced all-reduce send array by array. Horovod and PyTorch's DDP copy the arrays
// into a bucket, and back. Here one launch takes all of them from where they lie.
#pragma once
#include <vec.cuh>

#ifdef IPCREDUCE_PARTS
constexpr u32 kParts = IPCREDUCE_PARTS;

struct ListTable {
  u64 in[kParts], out[kParts];  // where a part begins in this rank's memory; may be the same
  u32 first[kParts];            // the first packet of a part in the message, in ascending order; 0xFFFFFFFF: no part
  u32 bytes[kParts];            // of a part
};

// The part that holds packet `index`: the last one that begins at or before it.
DEVICE u32 find_part(const ListTable& parts, u32 index) {
  u32 part = 0;
#pragma unroll
  for (u32 step = largest_power_of_two_below(kParts); step; step /= 2)
    if (part + step < kParts && parts.first[part + step] <= index) part += step;
  return part;
}

// The arrays of a list, as the input or the output.
template <bool kAligned> struct List {
  const ListTable& parts;
  bool in;
};

// The array that holds packet `index`, as a message in which that packet has the same index.
template <bool kAligned> DEVICE Message<kAligned> array_with(const List<kAligned>& list, u32 index) {
  const u32 part = find_part(list.parts, index), bytes_before = kPacketBytes * list.parts.first[part];
  const u64 base = list.in ? list.parts.in[part] : list.parts.out[part];
  return message_at<kAligned>(base - bytes_before, bytes_before + list.parts.bytes[part]);
}

template <int kElementBytes, bool kBranch, bool kAligned>
DEVICE Packet load_message(const List<kAligned>& list, u32 index, bool active) {
  return load_message<kElementBytes, kBranch>(array_with(list, index), index, active);
}
template <int kElementBytes, bool kAligned>
DEVICE void store_message(const List<kAligned>& list, u32 index, const Packet& p, bool active) {
  store_message<kElementBytes>(array_with(list, index), index, p, active);
}
#endif

// The same for a message of one array.
template <bool kAligned> DEVICE const Message<kAligned>& array_with(const Message<kAligned>& m, u32) { return m; }
