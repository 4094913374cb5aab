// A user's element-wise expression behind the reduction: comm.allreduce(x, then=Map("v * s + a", a=..., s=...)).
//
// Two macros, and the body of map_element(), stand in the source before the kernel (ipcreduce/cuda/expressions.py):
//   IPCREDUCE_MAP       there is an expression
//   IPCREDUCE_OPERANDS  its operands, as OPERAND(a, bfloat16, row) OPERAND(s, float32, scalar)
// Every rank applies it to the reduced packets, where it stores them into its own output. No packet of another rank
// holds a mapped value, so operands may differ between the ranks.
#pragma once
#include <reduce.cuh>

#ifdef IPCREDUCE_MAP
constexpr int kElements = kPacketBytes / kElementBytes;  // of the message, in a packet

enum OperandKind { full, row, scalar };  // an array of the message's shape, or of its last dimension; a number

// The expression's arguments in the kernel's arguments: addresses of arrays, and the bits of numbers.
struct OperandTable {
  u64 columns, first;  // elements in a row of the message, and the column of this launch's first element
#define OPERAND(name, type, kind) u64 operand_##name;
  IPCREDUCE_OPERANDS
#undef OPERAND
};

// Loads up to 16 bytes of an operand by elements: its elements from `at` on, modulo `columns`, of which the first
// 16 k / kBytes are left out. The message has `left` elements from there on. It is not inlined, because it is long, and
// a kernel has it many times.
template <int kBytes> DEVICE_NOINLINE Packet load_operand_elements(u64 base, u64 at, u64 columns, u32 left, int k) {
  constexpr int kCount = kPacketBytes / kBytes < kElements ? kPacketBytes / kBytes : kElements;
  const u32 skipped = k * kCount;
  Packet p = {};
  at = (at + skipped) % columns;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    set_element_bits<kBytes>(p, j, load_element_weak<kBytes>(base + at * kBytes, skipped + j < left));
    if (++at == columns) at = 0;
  }
  return p;
}

// The elements of an operand that belong to one packet of the message.
template <class D, OperandKind kKind> struct Operand {
  using Bits = typename D::Bits;
  using Value = typename D::Acc;
  static constexpr int kBytes = sizeof(Bits), kSpan = kElements * kBytes;
  static constexpr bool kWhole = kSpan % kPacketBytes == 0;  // the elements of a packet fill whole packets
  static constexpr int kPackets = kKind == scalar ? 0 : (kSpan + kPacketBytes - 1) / kPacketBytes;

  u64 word;
  Packet packets[kPackets ? kPackets : 1];

  DEVICE static bool is_aligned(u64 address, const OperandTable& table) {
    if (kKind == scalar) return true;
    return address % kPacketBytes == 0 && (kKind == full || (table.columns | table.first) % kElements == 0);
  }

  // kAligned: is_aligned() is true, and every packet of the message is whole.
  // left: the elements of the message from this packet on.
  template <bool kAligned> DEVICE void load(u64 argument, const OperandTable& table, u32 index, u32 left) {
    word = argument;
    if constexpr (kKind != scalar) {
      const bool by_packets = kWhole && (kAligned || (is_aligned(word, table) && left >= kElements));
      if (by_packets) {
        const u32 at = kKind == full ? index : ((u32)(table.first / kElements) + index) % (u32)(table.columns / kElements);
#pragma unroll
        for (int k = 0; k < kPackets; ++k)
          packets[k] = load_packet_weak(word + (u64)at * kSpan + k * kPacketBytes, left > 0);
        return;
      }
      const u64 at = (u64)index * kElements, columns = kKind == row ? table.columns : ~0ull;
#pragma unroll
      for (int k = 0; k < kPackets; ++k)
        packets[k] = load_operand_elements<kBytes>(word, (kKind == row ? table.first : 0) + at, columns, left, k);
    }
  }

  DEVICE Value get(int j) const {
    if constexpr (kKind == scalar) return D::load((Bits)word);
    else
      return D::load((Bits)get_element_bits<kBytes>(packets[j * kBytes / (int)kPacketBytes],
                                                    j % ((int)kPacketBytes / kBytes)));
  }
};

#define OPERAND(name, type, kind) using operandtype_##name = Operand<dtype::type, kind>;
IPCREDUCE_OPERANDS
#undef OPERAND

// The operands of one packet.
struct Operands {
#define OPERAND(name, type, kind) operandtype_##name operand_##name;
  IPCREDUCE_OPERANDS
#undef OPERAND
#define OPERAND(name, type, kind) +operandtype_##name::kPackets
  enum { kPackets = 0 IPCREDUCE_OPERANDS };
#undef OPERAND
};

DEVICE bool operands_are_aligned(const OperandTable& table) {
  bool aligned = true;
#define OPERAND(name, type, kind) aligned &= operandtype_##name::is_aligned(table.operand_##name, table);
  IPCREDUCE_OPERANDS
#undef OPERAND
  return aligned;
}

// Packet `index` of every operand; nothing is read where active is false. `bytes`: of the message.
template <bool kAligned>
DEVICE Operands load_operands(const OperandTable& table, u32 bytes, u32 index, bool active) {
  Operands operands;
  const u32 at = kPacketBytes * index, left = active && at < bytes ? (bytes - at) / kElementBytes : 0;
  (void)left;  // without arrays
#define OPERAND(name, type, kind) operands.operand_##name.load<kAligned>(table.operand_##name, table, index, left);
  IPCREDUCE_OPERANDS
#undef OPERAND
  return operands;
}

// The expression's value. It is defined in the source before the kernel.
#define OPERAND(name, type, kind) , operandtype_##name::Value name
#define MAP_ELEMENT DEVICE Acc map_element(Acc v IPCREDUCE_OPERANDS)
MAP_ELEMENT;
#undef OPERAND

// `reduced` has been rounded to the dtype. It is hidden from the compiler, which else could contract a product that the
// reduction ends with and a sum that the expression begins with, and round once where two roundings are promised.
DEVICE Packet map_packet(Packet reduced, const Operands& operands) {
  (void)operands;
  Packet result = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) hide_from_compiler(reduced.word[i]);
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    const Acc v = Dtype::load((Dtype::Bits)get_element_bits<kElementBytes>(reduced, j));
#define OPERAND(name, type, kind) , operands.operand_##name.get(j)
    set_element_bits<kElementBytes>(result, j, Dtype::store(map_element(v IPCREDUCE_OPERANDS)));
#undef OPERAND
  }
  return result;
}
#define OPERAND(name, type, kind) , operandtype_##name::Value name  // for MAP_ELEMENT, before the expression
#else

// The same without an expression.
struct Operands {
  enum { kPackets = 0 };  // a static member would be a symbol in every kernel
};
#define map_packet(reduced, operands) (reduced)  // a function would change the order of instructions
#endif
