// RMSNorm of rows, with a residual added before and e4m3 made after: what the fused kernels and rmsnorm.cu share.
//
// The contract. T is the dtype, and every step is in float32 and rounded to it, unless another rounding is named:
//
//   residual_out = T(reduced + residual)                 without a residual the reduced value
//   sum          = squares of residual_out, rounded, added in the order below
//   rstd         = 1 / sqrt(fma(sum, 1 / hidden, eps))   correctly rounded as a whole
//   y            = T((residual_out * (weight + weight_bias)) * rstd)
//   quantised    = e4m3(y / scale)                       of the rounded y, at most +-448; NaN stays NaN
//   scale        = max(max |y| / 448, 1e-10)             of a row, or of 128 elements; NaN wins
//   quantised    = e4m3(y * (1 / scale))                 where the scale is given
//
// The order of the sum depends on an element's place in its row alone. A unit has 8 elements: those at even places are
// added in order, then those at odd places, then both. A group has 8 units, which are added as a tree (three shuffles).
// A chunk has 128 groups: lane l of a warp adds groups 4 l to 4 l + 3 as (a + b) + (c + d), for one chunk after the
// other. At last the 32 lanes are added as a tree (five shuffles). What lies beyond the row is +0. Addition commutes,
// so all lanes of a tree get the same bits. So a row has the same bits on every rank and GPU, in every run, batch, grid
// and algorithm, and on the host (ipcreduce/host/rmsnorm.py).
//
// Why (x * w) * rstd, and not (x * rstd) * w: x * w needs no sum, so it is computed while the sum is on its way. And as
// rounding is monotonic, max |y| = T(max |x * w| * rstd). So a row's scale crosses the threads together with the sum.
// There is one exception: if rstd is infinite, y is infinite, or NaN where x * w is 0. Then the scales of rows and of
// groups are NaN.
//
// The fused kernels of FlashInfer, TensorRT-LLM, vLLM and SGLang add the squares in an order that depends on their
// launch shape.
#pragma once
#include <reduce.cuh>

// What all these kernels need; ipcreduce/device/norm_kernels.py fills it in by index.
struct NormArgs {
  u64 residual;                // 0: none is added
  u64 residual_out, weight;    // an output of these kernels that is 0 is not written: `out` of struct Args
  u64 quantised;               // e4m3
  u64 scales;                  // float32: the given one, or an output
  u64 rows, hidden;
  u64 scale_strides;           // in numbers: from a row's scale to the next row's, and in the high word to the next one
  u64 numbers;                 // two floats: eps, and weight_bias in the high word
  u64 reciprocal_of_hidden;    // a float
};

constexpr int kNoScale = 0, kGivenScale = 1, kTokenScale = 2, kGroupScale = 3;  // norm_kernels.py has the same
constexpr int kScale = IPCREDUCE_SCALE;
constexpr int kCluster = IPCREDUCE_CLUSTER;  // blocks that have a row together: 1, 2, 4 or 8

// ---- units of 8 elements
constexpr u32 kUnitElements = 8;
constexpr int kUnitPackets = kUnitElements * kElementBytes / kPacketBytes;
constexpr int kPerPacket = kPacketBytes / kElementBytes;
constexpr u32 kNan = 0x7FC00000u;  // every NaN among scales
constexpr u32 kGroupUnits = 8, kScaleUnits = 16;  // of the sum, and of a scale every 128 elements
struct Unit {
  Packet packet[kUnitPackets];
};

DEVICE float element(const Unit& unit, int j) {
  return Dtype::load((Dtype::Bits)get_element_bits<kElementBytes>(unit.packet[j / kPerPacket], j % kPerPacket));
}
// Elements j and j + 1, rounded; j is even. By itself, the compiler rounds one at a time. D is there because float32
// has no store_two.
template <class D = Dtype> DEVICE void set_two(Unit& unit, int j, float x, float next) {
  u32* word = unit.packet[j / kPerPacket].word + j % kPerPacket * kElementBytes / 4;
  if constexpr (kElementBytes == 2) {
    word[0] = D::store_two(x, next);
  } else {
    word[0] = D::store(x);
    word[1] = D::store(next);
  }
}

// kAligned: all arrays begin at a multiple of 16 (quantised: of 8), and rows have whole units. Where active is false,
// each word is `otherwise`.
template <bool kAligned> DEVICE Unit load_unit(u64 row, u32 hidden, u32 index, bool active, u32 otherwise = 0) {
  Unit unit = {};
#pragma unroll
  for (int i = 0; i < kUnitPackets; ++i) {
    const u32 packet = index * kUnitPackets + i;
    const u64 at = row + (u64)kPacketBytes * packet;
    const int left = (int)(hidden - packet * kPerPacket) * kElementBytes;
    if (kAligned) unit.packet[i] = load_packet_weak(at, active, otherwise);
    else if (active) load_elements<kElementBytes>(unit.packet[i], at, left);
    else unit.packet[i] = {{otherwise, otherwise, otherwise, otherwise}};
  }
  return unit;
}
template <bool kAligned> DEVICE void store_unit(u64 row, u32 hidden, u32 index, const Unit& unit, bool active) {
#pragma unroll
  for (int i = 0; i < kUnitPackets; ++i) {
    const u32 packet = index * kUnitPackets + i;
    const u64 at = row + (u64)kPacketBytes * packet;
    const int left = (int)(hidden - packet * kPerPacket) * kElementBytes;
    if (kAligned) store_packet_weak(at, unit.packet[i], active);
    else if (active && left > 0) store_elements<kElementBytes>(at, left, unit.packet[i]);
  }
}
DEVICE u64 row_at(u64 array, const NormArgs& args, u32 row) {
  return array + (u64)row * (u32)args.hidden * kElementBytes;
}

// Of the residual; where there is none -0, which leaves every number as it is.
template <bool kAligned> DEVICE Unit load_residual(const NormArgs& args, u32 row, u32 index, bool active) {
  const bool present = args.residual != 0;
  const u32 signs = kElementBytes == 2 ? 0x80008000u : 0x80000000u;
  return load_unit<kAligned>(row_at(args.residual, args, row), (u32)args.hidden, index, active && present, signs);
}

// Halves are added two at a time, and rounded once. That gives the bits of their sum in float32, rounded to a half: the
// first of two roundings changes nothing if it leaves at least 2 p + 2 bits, and the second p (S. A. Figueroa, "When is
// double rounding innocuous?", SIGNUM Newsletter 30 (3), 1995). Here p is 8 or 11, and float32 has 24 bits.
template <class D = Dtype> DEVICE Packet add(const Packet& a, const Packet& b) {
  Packet sum = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kElementBytes == 2) sum.word[i] = D::add_two(a.word[i], b.word[i]);
    else sum.word[i] = D::store(bits_to_float(a.word[i]) + bits_to_float(b.word[i]));
  }
  return sum;
}
DEVICE Unit add(const Unit& a, const Unit& b) {
  Unit sum = {};
#pragma unroll
  for (int i = 0; i < kUnitPackets; ++i) sum.packet[i] = add(a.packet[i], b.packet[i]);
  return sum;
}
// What reduce() gives, in fewer instructions for two ranks.
DEVICE Packet reduce_halves(const Packet (&v)[kMaxRanks]) {
  return kRanks == 2 ? add(v[0], v[1]) : reduce(v);
}

DEVICE float sum_of_squares(const Unit& x) {
  const auto square = [&](int j) { return multiply_rounded(element(x, j), element(x, j)); };
  float even = square(0), odd = square(1);
#pragma unroll
  for (int j = 2; j < (int)kUnitElements; j += 2) {
    even = add_rounded(even, square(j));
    odd = add_rounded(odd, square(j + 1));
  }
  return add_rounded(even, odd);
}

// Of a unit, a group, a chunk or a row: the sum of squares, and for a scale a row the largest |x * w|.
constexpr bool kWithMost = kScale == kTokenScale;
struct Totals {
  float sum, most;
};
DEVICE Totals combine(const Totals& a, const Totals& b) {
  return {add_rounded(a.sum, b.sum), kWithMost ? max_nan(a.most, b.most) : 0};
}
// The sum of kLanes lanes, and what is largest in the whole warp, whose lanes have the same row. Numbers that are not
// negative compare as their bits do, and NaN is above infinity.
template <int kLanes> DEVICE Totals over_lanes(const Totals& x) {
  float sum = x.sum;
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) sum = add_rounded(sum, shuffle_xor(sum, mask));
  return {sum, kWithMost ? bits_to_float(warp_max(to_bits(x.most))) : 0};
}
DEVICE bool is_infinite(float x) { return to_bits(x) == 0x7F800000u; }  // and positive

// ---- numbers that every thread has
struct Numbers {
  float eps, weight_bias, reciprocal_of_hidden;
  float given;  // 1 / scale, where that is given
};
DEVICE Numbers numbers_of(const NormArgs& args) {
  return {bits_to_float((u32)args.numbers), bits_to_float((u32)(args.numbers >> 32)),
          bits_to_float((u32)args.reciprocal_of_hidden), 0};
}
DEVICE void load_given_scale(const NormArgs& args, Numbers& numbers) {  // long before it is used
  if constexpr (kScale == kGivenScale)
    numbers.given = reciprocal(bits_to_float((u32)load_element_weak<4>(args.scales, true)));
}
DEVICE float rstd_of(float sum, const Numbers& numbers) {
  return reciprocal_square_root(multiply_add(sum, numbers.reciprocal_of_hidden, numbers.eps));
}

// x * w of a unit, and the largest of their absolute values.
struct Products {
  float of[kUnitElements];
  float most;
};
DEVICE Products multiply(const Unit& x, const Unit& weight, const Numbers& numbers) {
  Products products = {};
  float most[2] = {};  // of those at even and at odd places, as one maximum waits for the other
#pragma unroll
  for (int j = 0; j < (int)kUnitElements; ++j) {
    products.of[j] = multiply_rounded(element(x, j), add_rounded(element(weight, j), numbers.weight_bias));
    if constexpr (kScale >= kTokenScale) {
      const float size = absolute(products.of[j]);
      most[j % 2] = j < 2 ? size : max_nan(most[j % 2], size);
    }
  }
  products.most = max_nan(most[0], most[1]);
  return products;
}

// ---- e4m3
// In software, for GPUs without the instruction. Below 2^-6, e4m3 has multiples of 2^-9: so has float32 at 2^14.
DEVICE u32 float_to_e4m3(float x) {
  const u32 bits = to_bits(x), sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return 0x7F;
  if (size < 0x3C800000u) return sign | (to_bits(add_rounded(bits_to_float(size), 16384.0f)) - 0x46800000u);
  const u32 rounded = ((size + 0x7FFFFu + (size >> 20 & 1)) >> 20) - (120 << 3);
  return sign | (rounded < 0x7E ? rounded : 0x7E);
}
DEVICE u32 two_to_e4m3(float low, float high) {
  if constexpr (kConvertsToE4m3) return floats_to_e4m3(low, high);
  else return float_to_e4m3(low) | float_to_e4m3(high) << 8;
}

// x / y, correctly rounded, by Markstein's theorem: `inverse` is 1 / y, correctly rounded. With an infinite y pass 0 in
// its place, and `inverse` 0: the remainder is then x, and x * 0 is 0, or NaN where x is infinite. The remainder is
// subtracted, and not its negative added, because that would lose the sign of -0. It is not correct where the remainder
// underflows, which is where the quotient is far below what e4m3 can hold.
DEVICE float divide(float x, float y, float inverse) {
  const float quotient = multiply_rounded(x, inverse);
  return multiply_add(-multiply_add(quotient, y, -x), inverse, quotient);
}

// The scale for elements of which the largest |x * w| is `most`.
DEVICE float scale_of(float most, float rstd) {
  Unit unit = {};
  set_two(unit, 0, multiply_rounded(most, rstd), 0);
  const float rounded = element(unit, 0);
  const float largest = is_infinite(rstd) ? bits_to_float(kNan) : rounded;
  return max_nan(is_infinite(largest) ? largest : divide(largest, 448.0f, 1.0f / 448.0f), 1e-10f);
}

// y of a unit, of its products with the weight, which become y too.
DEVICE Unit finish(Products& products, float rstd) {
  Unit y = {};
#pragma unroll
  for (int j = 0; j < (int)kUnitElements; j += 2)
    set_two(y, j, multiply_rounded(products.of[j], rstd), multiply_rounded(products.of[j + 1], rstd));
  if constexpr (kScale) {
#pragma unroll
    for (int j = 0; j < (int)kUnitElements; ++j) products.of[j] = element(y, j);
  }
  return y;
}

// `scale`: where it is given, 1 / scale.
template <bool kAligned>
DEVICE void store_quantised(const NormArgs& args, u32 row, u32 index, const Products& y, float scale, bool active) {
  const float divisor = is_infinite(scale) ? 0 : scale, inverse = is_infinite(scale) ? 0 : reciprocal_of_normal(scale);
  const auto scaled = [&](float x) {
    return kScale == kGivenScale ? multiply_rounded(x, scale) : divide(x, divisor, inverse);
  };
  u32 word[2] = {};
#pragma unroll
  for (int j = 0; j < (int)kUnitElements; j += 2)
    word[j / 4] |= two_to_e4m3(scaled(y.of[j]), scaled(y.of[j + 1])) << 16 * (j / 2 % 2);
  const u64 at = args.quantised + (u64)row * args.hidden + kUnitElements * index;
  if (kAligned) return store_8_bytes_weak(at, word[0], word[1], active);
#pragma unroll
  for (u32 j = 0; j < kUnitElements; ++j)
    if (active && kUnitElements * index + j < (u32)args.hidden)
      store_weak<u8>(at + j, (u8)(word[j / 4] >> 8 * (j % 4)));
}

// The results of a unit, when the sum of its row is known. `most` is the largest product of all that share a scale.
template <bool kAligned>
DEVICE void store_results(u64 out, const NormArgs& args, u32 row, u32 index, Products products, float most, float rstd,
                          const Numbers& numbers, bool active) {
  const Unit y = finish(products, rstd);
  store_unit<kAligned>(row_at(out, args, row), (u32)args.hidden, index, y, active && out);
  if constexpr (kScale == kGivenScale) store_quantised<kAligned>(args, row, index, products, numbers.given, active);
  if constexpr (kScale >= kTokenScale) {
    const float scale = scale_of(most, rstd);
    store_quantised<kAligned>(args, row, index, products, scale, active);
    const u32 number = kScale == kTokenScale ? index : index % kScaleUnits;  // the first one stores the scale
    const u64 column = kScale == kTokenScale ? 0 : index / kScaleUnits * (args.scale_strides >> 32);
    const u64 at = args.scales + 4 * (row * (u64)(u32)args.scale_strides + column);
    if (active && number == 0) store_weak<u32>(at, scale == scale ? to_bits(scale) : kNan);
  }
}
DEVICE float most_of_scale(float most) {  // of the units of a scale every 128 elements, whose lanes lie together
  if constexpr (kScale == kGroupScale) {
#pragma unroll
    for (int mask = 1; mask < (int)kScaleUnits; mask *= 2) most = max_nan(most, shuffle_xor(most, mask));
  }
  return most;
}

// ---- totals of a row's groups, which cross the threads of a block, or of a cluster, through shared memory
constexpr u32 kChunkGroups = 128;
constexpr u32 kMostGroups = 256;  // of the rows that the threads hold at once

struct alignas(16) GroupSums {
  float sum[2][kMostGroups];  // by turns: a fast warp may be one row ahead
  float most[2][kWithMost ? kMostGroups : 4];
  Gate gate;                  // of a cluster
};

// Before anything else: where a row's groups are no whole fours, the entries that a lane loads with the last ones are
// zero. And the gate is prepared.
DEVICE void prepare(GroupSums& sums, u32 groups) {
  const u32 i = groups + thread_in_block();
  if (i < ceil_div(groups, 4) * 4) {
    sums.sum[0][i] = sums.sum[1][i] = 0;
    if (kWithMost) sums.most[0][i] = sums.most[1][i] = 0;
  }
  if constexpr (kCluster > 1) {
    if (thread_in_block() == 0) prepare_gate(sums.gate);
    cluster_arrive();
  }
}
// Before the first sum: the other blocks of the cluster have prepared theirs.
DEVICE void meet_cluster(GroupSums& sums, u32 groups) {
  if constexpr (kCluster > 1) {
    cluster_wait();
    if (thread_in_block() == 0) expect_at_gate(sums.gate, groups * 4 * (1 + kWithMost));
  }
}

// Gives the totals of a group, which its 8 lanes hold, to every block of the cluster. All lanes of a warp call it.
DEVICE void give(GroupSums& sums, u32 turn, u32 group, const Totals& of_unit, bool active) {
  const Totals totals = over_lanes<kGroupUnits>(of_unit);
  const u32 lane = thread_in_block() % kGroupUnits;
  const auto to = [&](float& entry, float value) {
    if constexpr (kCluster > 1)
      store_to_block(entry, sums.gate, lane % kCluster, value, active && lane < kCluster);
    else if (active && lane == 0) entry = value;
  };
  to(sums.sum[turn][group], totals.sum);
  if constexpr (kWithMost) to(sums.most[turn][group], totals.most);
}

// This lane's part of the chunk that begins at group `first`: 0 beyond the row.
DEVICE Totals part_of_chunk(const GroupSums& sums, u32 turn, u32 first, u32 groups) {
  const u32 group = first + 4 * (thread_in_block() % 32);
  Packet sum = {}, most = {};
  if (group < groups) {
    sum = *(const Packet*)(sums.sum[turn] + group);
    if constexpr (kWithMost) most = *(const Packet*)(sums.most[turn] + group);
  }
  const auto of = [&](int i) { return Totals{bits_to_float(sum.word[i]), bits_to_float(most.word[i])}; };
  return combine(combine(of(0), of(1)), combine(of(2), of(3)));
}
DEVICE Totals over_groups(const GroupSums& sums, u32 turn, u32 groups) {
  Totals part = part_of_chunk(sums, turn, 0, groups);
  if (groups > kChunkGroups) part = combine(part, part_of_chunk(sums, turn, kChunkGroups, groups));
  return over_lanes<32>(part);
}

// ---- the units of a row that a thread holds, from the reduced values to the results. All threads of the block, or of
// the cluster, call it. Of `kUnits` units `count` are in use. meanwhile() runs while the sums are on their way.
template <bool kAligned, int kUnits, class Meanwhile>
DEVICE void normalise(u64 out, const NormArgs& args, GroupSums& sums, u32 turn, u32 row, const Numbers& numbers,
                      const Unit (&reduced)[kUnits], const Unit (&residual)[kUnits], const Unit (&weight)[kUnits],
                      const u32 (&index)[kUnits], const bool (&active)[kUnits], int count, const Meanwhile& meanwhile) {
  Unit x[kUnits];
  Products products[kUnits];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    x[i] = add(reduced[i], residual[i]);
    if constexpr (kWithMost) products[i] = multiply(x[i], weight[i], numbers);
    const Totals of_unit = {sum_of_squares(x[i]), kWithMost ? products[i].most : 0};
    give(sums, turn, index[i] / kGroupUnits, active[i] ? of_unit : Totals{}, active[i]);
  }
  float most[kUnits];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if constexpr (!kWithMost) products[i] = multiply(x[i], weight[i], numbers);
    most[i] = most_of_scale(active[i] ? products[i].most : 0);
    store_unit<kAligned>(row_at(args.residual_out, args, row), (u32)args.hidden, index[i], x[i], active[i]);
  }
  meanwhile();
  if constexpr (kCluster > 1) wait_at_gate(sums.gate);
  else sync_block();
  const Totals of_row = over_groups(sums, turn, ceil_div((u32)args.hidden, kUnitElements * kGroupUnits));
  const float rstd = rstd_of(of_row.sum, numbers);
#pragma unroll
  for (int i = 0; i < count; ++i)
    store_results<kAligned>(out, args, row, index[i], products[i], kWithMost ? of_row.most : most[i], rstd, numbers,
                            active[i]);
}
