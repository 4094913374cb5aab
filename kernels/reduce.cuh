// The reduction of one packet, for any dtype and op. An element is always reduced in rank order, so that every rank and
// every algorithm gets the same bits. A kernel is compiled for one pair, as by -DIPCREDUCE_DTYPE=bfloat16
// -DIPCREDUCE_OP=sum.
#pragma once
#include <vec.cuh>

// ---- dtypes: storage type (Bits) and accumulator type (Acc)
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
  DEVICE static Acc load(Bits b) { return half_to_float(b); }
  DEVICE static Bits store(Acc a) { return float_to_half(a); }
  DEVICE static u32 store_two(Acc low, Acc high) { return floats_to_halves(low, high); }
  DEVICE static u32 add_two(u32 a, u32 b) { return add_halves(a, b); }
};
struct bfloat16 : Float<float, u16> {
  DEVICE static Acc load(Bits b) { return bfloat16_to_float(b); }
  DEVICE static Bits store(Acc a) { return float_to_bfloat16(a); }
  DEVICE static u32 store_two(Acc low, Acc high) { return floats_to_bfloat16s(low, high); }
  DEVICE static u32 add_two(u32 a, u32 b) { return add_bfloat16s(a, b); }
};
// All NaNs become the same one: the compiler chooses which operand's NaN an instruction keeps, and kernels of different
// ranks may differ.
struct float32 : Float<float, u32> {
  DEVICE static Acc load(Bits b) { return bits_to_float(b); }
  DEVICE static Bits store(Acc a) { return a == a ? to_bits(a) : 0x7FC00000u; }
};
struct float64 : Float<double, u64> {
  DEVICE static Acc load(Bits b) { return bits_to_double(b); }
  DEVICE static Bits store(Acc a) { return a == a ? to_bits(a) : 0x7FF8000000000000ull; }
};
}  // namespace dtype

using Dtype = dtype::IPCREDUCE_DTYPE;
using Acc = Dtype::Acc;
constexpr bool kFloat = Dtype::kFloat;
constexpr int kElementBytes = sizeof(Dtype::Bits);

// ---- ops: init(a) of rank 0's element, combine(value, b) for each further rank, then finalize(value) once
namespace op {
// Integers wrap around, as in NumPy. They are computed in an unsigned type of at least 32 bits, for which C++ has
// neither overflow nor integer promotion.
template <int kBytes> struct Wrapping { using type = u32; };
template <> struct Wrapping<8> { using type = u64; };
using Wide = Wrapping<sizeof(Acc)>::type;

struct Elementwise {
  using Value = Acc;
  DEVICE static Value init(Acc a) { return a; }
  DEVICE static Acc finalize(Value a) { return a; }
};
struct sum : Elementwise {
  DEVICE static Acc combine(Acc a, Acc b) {
    if constexpr (kFloat) return a + b;
    else return (Acc)((Wide)a + (Wide)b);
  }
};
struct prod : Elementwise {
  DEVICE static Acc combine(Acc a, Acc b) {
    if constexpr (kFloat) return a * b;
    else return (Acc)((Wide)a * (Wide)b);
  }
};
struct min : Elementwise {  // NaN propagates, as in numpy.minimum; of equal values (-0, +0), the lower rank's
  DEVICE static Acc combine(Acc a, Acc b) { return a != a ? a : b != b || b < a ? b : a; }
};
struct max : Elementwise {
  DEVICE static Acc combine(Acc a, Acc b) { return a != a ? a : b != b || b > a ? b : a; }
};
struct FloatAvg : sum {
  DEVICE static Acc finalize(Acc a) { return a / (Acc)kRanks; }
};
// The exact sum divided by n, truncated toward zero. The sum may not fit the type, so quotients and remainders are
// summed separately: sum = n * quotients + remainders, with |remainders| < n * n.
template <class T> struct IntegerAvg {
  struct Value {
    T quotients;
    int remainders;
  };
  DEVICE static Value init(T a) { return {(T)(a / (T)kRanks), (int)(a % (T)kRanks)}; }
  DEVICE static Value combine(Value v, T b) {
    return {(T)(v.quotients + b / (T)kRanks), v.remainders + (int)(b % (T)kRanks)};
  }
  DEVICE static T finalize(Value v) {
    T result = (T)(v.quotients + v.remainders / kRanks);
    const int rest = v.remainders % kRanks;  // not divided yet; it matters if its sign is opposite to that of result
    if (rest < 0 && result > 0) --result;
    if (rest > 0 && (T)-1 < 0 && result < 0) ++result;
    return result;
  }
};
template <class T, bool kIsFloat> struct Avg : FloatAvg {};
template <class T> struct Avg<T, false> : IntegerAvg<T> {};
struct avg : Avg<Acc, kFloat> {};
}  // namespace op

// The packet whose elements are those of v[0], v[1], ... v[kRanks - 1], reduced in this order.
DEVICE Packet reduce(const Packet (&v)[kMaxRanks]) {
  using Op = op::IPCREDUCE_OP;
  using Bits = Dtype::Bits;
  Packet result = {};
#pragma unroll
  for (int j = 0; j < (int)kPacketBytes / kElementBytes; ++j) {
    auto value = Op::init(Dtype::load((Bits)get_element_bits<kElementBytes>(v[0], j)));
#pragma unroll
    for (int rank = 1; rank < kRanks; ++rank)
      value = Op::combine(value, Dtype::load((Bits)get_element_bits<kElementBytes>(v[rank], j)));
    set_element_bits<kElementBytes>(result, j, Dtype::store(Op::finalize(value)));
  }
  return result;
}
