// dtype x op: one fold over the ranks' values of an element, always in the order of the ranks, so that every rank and
// every algorithm gets the same bits. Compiled for one pair: -DIPCREDUCE_DTYPE=bfloat16 -DIPCREDUCE_OP=sum.
#pragma once
#include <vec.cuh>

// ---- dtypes: how an element is stored (Bits) and what it is accumulated in (Acc)
namespace dtype {
template <class T, class U> struct Integer {
  using Acc = T;
  using Bits = U;
  static constexpr bool kFloat = false;
  DEVICE static Acc load(Bits b) { return (Acc)b; }
  DEVICE static Bits store(Acc a) { return (Bits)a; }
};
struct int8 : Integer<signed char, u8> {};
struct int16 : Integer<short, u16> {};
struct int32 : Integer<int, u32> {};
struct int64 : Integer<long long, u64> {};
struct uint8 : Integer<u8, u8> {};
struct uint16 : Integer<u16, u16> {};
struct uint32 : Integer<u32, u32> {};
struct uint64 : Integer<u64, u64> {};

template <class A, class U> struct Float {
  using Acc = A;
  using Bits = U;
  static constexpr bool kFloat = true;
};
struct float16 : Float<float, u16> {  // half types accumulate in float32 and round once
  DEVICE static Acc load(Bits b) { return float_of_half(b); }
  DEVICE static Bits store(Acc a) { return half_of(a); }
};
struct bfloat16 : Float<float, u16> {
  DEVICE static Acc load(Bits b) { return float_of_bfloat(b); }
  DEVICE static Bits store(Acc a) { return bfloat_of(a); }
};
// One NaN for all: which operand's payload an instruction keeps is the compiler's choice, and differs between ranks.
struct float32 : Float<float, u32> {
  DEVICE static Acc load(Bits b) { return float_of(b); }
  DEVICE static Bits store(Acc a) { return a == a ? bits_of(a) : 0x7FC00000u; }
};
struct float64 : Float<double, u64> {
  DEVICE static Acc load(Bits b) { return double_of(b); }
  DEVICE static Bits store(Acc a) { return a == a ? bits_of(a) : 0x7FF8000000000000ull; }
};
}  // namespace dtype

using Dtype = dtype::IPCREDUCE_DTYPE;
using Acc = Dtype::Acc;
constexpr bool kFloat = Dtype::kFloat;
constexpr int kElementBytes = sizeof(Dtype::Bits);

// ---- ops: combine(a, b) of two values, then finish(a) once
namespace op {
// Integers wrap as NumPy's: in an unsigned type no narrower than 32 bits, where C++ neither overflows nor promotes.
template <int kBytes> struct Wrapping { using type = u32; };
template <> struct Wrapping<8> { using type = u64; };
using Wide = Wrapping<sizeof(Acc)>::type;

struct Plain {
  using Value = Acc;
  DEVICE static Value first(Acc a) { return a; }
  DEVICE static Acc finish(Value a) { return a; }
};
struct sum : Plain {
  DEVICE static Acc combine(Acc a, Acc b) {
    if constexpr (kFloat) return a + b;
    else return (Acc)((Wide)a + (Wide)b);
  }
};
struct prod : Plain {
  DEVICE static Acc combine(Acc a, Acc b) {
    if constexpr (kFloat) return a * b;
    else return (Acc)((Wide)a * (Wide)b);
  }
};
struct min : Plain {  // NaN wins, as in numpy.minimum; of equals (-0, +0) the lower rank's
  DEVICE static Acc combine(Acc a, Acc b) { return a != a ? a : b != b || b < a ? b : a; }
};
struct max : Plain {
  DEVICE static Acc combine(Acc a, Acc b) { return a != a ? a : b != b || b > a ? b : a; }
};
struct FloatAvg : sum {
  DEVICE static Acc finish(Acc a) { return a / (Acc)kRanks; }
};
// The exact sum over n, truncated toward zero. The sum itself may not fit the type, so quotients and remainders are
// summed apart: sum = n * quotients + remainders, and |remainders| < n * n.
template <class T> struct IntegerAvg {
  struct Value {
    T quotients;
    int remainders;
  };
  DEVICE static Value first(T a) { return {(T)(a / (T)kRanks), (int)(a % (T)kRanks)}; }
  DEVICE static Value combine(Value v, T b) { return {(T)(v.quotients + b / (T)kRanks), v.remainders + (int)(b % (T)kRanks)}; }
  DEVICE static T finish(Value v) {
    T result = (T)(v.quotients + v.remainders / kRanks);
    const int left = v.remainders % kRanks;  // still to be divided: matters if it pulls the result toward zero
    if (left < 0 && result > 0) --result;
    if (left > 0 && (T)-1 < 0 && result < 0) ++result;
    return result;
  }
};
template <class T, bool kIsFloat> struct Avg : FloatAvg {};
template <class T> struct Avg<T, false> : IntegerAvg<T> {};
struct avg : Avg<Acc, kFloat> {};
}  // namespace op

// The packet whose elements are the fold of v[0], v[1], ... v[kRanks - 1].
DEVICE Packet fold(const Packet (&v)[kMaxRanks]) {
  using Op = op::IPCREDUCE_OP;
  using Bits = Dtype::Bits;
  Packet result = {};
#pragma unroll
  for (int j = 0; j < (int)kPacketBytes / kElementBytes; ++j) {
    auto value = Op::first(Dtype::load((Bits)get_bits<kElementBytes>(v[0], j)));
#pragma unroll
    for (int rank = 1; rank < kRanks; ++rank)
      value = Op::combine(value, Dtype::load((Bits)get_bits<kElementBytes>(v[rank], j)));
    set_bits<kElementBytes>(result, j, Dtype::store(Op::finish(value)));
  }
  return result;
}
