// Stand-in for kernels/sync.cuh in CPU builds of the kernels: the same names, over the fibers of runtime.cpp.
//
// Memory is as strong as the kernels claim to need and no stronger, so that ThreadSanitizer can judge them. Packet
// stores release and packet loads acquire: on the GPU they are relaxed, and the kernel boundaries order them. Single
// words are relaxed atomics. All else is plain.
#pragma once
#include <runtime.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kMaxRanks = 8;  // kRanks and kRank are run-time values: one build serves every rank of every world size

// Exported beside each kernel for the launcher to check: its limit of threads a block, and the size of Args in bytes.
#define KERNEL(name, max_threads, blocks)                          \
  extern "C" {                                                     \
  extern const u32 name##_limits[2];                               \
  const u32 name##_limits[2] = {max_threads, (u32)sizeof(Args)};   \
  }                                                                \
  extern "C" void name
#define KERNEL_ARGS const Args&
#define CLUSTER_KERNEL(name, max_threads, blocks) KERNEL(name, max_threads, blocks)
#define SHARED(Type, name) Type& name = *(Type*)sim_shared(sim_thread->block, sizeof(Type))
#define LARGE_SHARED(Type, name) SHARED(Type, name)
#define DEVICE inline
#define DEVICE_NOINLINE

struct alignas(16) Packet {
  u32 word[4];
};

DEVICE u32 thread_in_grid() { return sim_thread->block * sim_thread->threads + sim_thread->thread; }
DEVICE u32 threads_in_grid() { return sim_thread->blocks * sim_thread->threads; }
DEVICE u32 thread_in_block() { return sim_thread->thread; }
DEVICE u32 threads_in_block() { return sim_thread->threads; }
DEVICE u32 block_in_grid() { return sim_thread->block; }
DEVICE u32 blocks_in_grid() { return sim_thread->blocks; }
DEVICE void sync_block() { sim_sync_block(); }
DEVICE void fence_acq_rel_sys() {}  // not needed: packet stores release and packet loads acquire
DEVICE void sync_warp() { sim_sync_warp(); }
DEVICE bool warp_any(bool mine) { return sim_vote(mine) != 0; }
DEVICE u32 warp_or(u32 mine) {
  u32 all = 0;
  for (int bit = 0; bit < 32; ++bit) all |= sim_vote(mine >> bit & 1) ? 1u << bit : 0;
  return all;
}
DEVICE u32 warp_ballot(bool mine) { return sim_vote(mine); }
template <class To, class From> DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
DEVICE float shuffle_xor(float x, int mask) { return bit_cast<float>(sim_shuffle_xor(bit_cast<u32>(x), (u32)mask)); }
DEVICE u32 warp_max(u32 mine) {
  for (u32 mask = 1; mask < 32; mask *= 2) {
    const u32 other = sim_shuffle_xor(mine, mask);
    mine = mine > other ? mine : other;
  }
  return mine;
}
DEVICE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
DEVICE bool is_first_active_lane() { return true; }
DEVICE void spin_pause() { sim_relax(); }
constexpr u32 kStageBytes = 2 << 10, kLargeSharedBytes = 16 << 10;  // short tiles, so that short messages have several
constexpr u32 kSpinsBetweenChecks = 16;  // a poll takes longer here
DEVICE void grid_dependency_sync() { sim_await_predecessor(); }
DEVICE void trigger_programmatic_launch() {}

// ---- packets. A whole packet is a single 16-byte access. Not by GCC's __atomic, which would call libatomic, whose
// locks other processes do not see. Kernels built for split packets always get split ones.
DEVICE bool split_packets() { return !IPCREDUCE_WHOLE_PACKETS || sim_split_packets; }

DEVICE Packet load_packet_relaxed_sys(u64 at) {
  sim_touch();
  sim_loads((const void*)at, sizeof(Packet));
  Packet p;
  if (split_packets()) {
    const u64 low = __atomic_load_n((const u64*)at, __ATOMIC_ACQUIRE);
    const u64 high = __atomic_load_n((const u64*)at + 1, __ATOMIC_ACQUIRE);
    return {{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)}};
  }
#if defined(__SANITIZE_THREAD__)
  const unsigned __int128 whole = __atomic_load_n((const unsigned __int128*)at, __ATOMIC_ACQUIRE);
  __builtin_memcpy(&p, &whole, sizeof p);
#elif defined(__x86_64__)  // x86 loads acquire and stores release anyway
  asm volatile("movdqa %1, %%xmm0\n\tmovdqa %%xmm0, %0" : "=m"(p) : "m"(*(const Packet*)at) : "xmm0", "memory");
#endif
  return p;
}
DEVICE void store_packet_relaxed_sys(u64 at, const Packet& p, bool active = true) {
  if (!active) return;
  sim_touch();
  if (split_packets()) {  // last word first: a reader that takes its flag for the whole packet gets stale data
    __atomic_store_n((u64*)at + 1, (u64)p.word[3] << 32 | p.word[2], __ATOMIC_RELEASE);
    sim_make_way();
    __atomic_store_n((u64*)at, (u64)p.word[1] << 32 | p.word[0], __ATOMIC_RELEASE);
    return;
  }
#if defined(__SANITIZE_THREAD__)
  unsigned __int128 whole;
  __builtin_memcpy(&whole, &p, sizeof p);
  __atomic_store_n((unsigned __int128*)at, whole, __ATOMIC_RELEASE);
#elif defined(__x86_64__)
  asm volatile("movdqa %1, %%xmm0\n\tmovdqa %%xmm0, %0" : "=m"(*(Packet*)at) : "m"(p) : "xmm0", "memory");
#endif
}

// ---- this rank's own memory. A GPU faults at an address that is no multiple of the bytes; this processor would not.
template <class T> T load_weak(u64 at) {
  sim_touch();
  if (at % sizeof(T)) sim_misaligned();
  return *(const T*)at;
}
template <int kBytes> DEVICE u64 load_element_weak(u64 at, bool active) {
  if (!active) return 0;
  if constexpr (kBytes == 8) return load_weak<u64>(at);
  else if constexpr (kBytes == 4) return load_weak<u32>(at);
  else if constexpr (kBytes == 2) return load_weak<u16>(at);
  else return load_weak<u8>(at);
}
template <class T> DEVICE void store_weak(u64 at, T value) {
  sim_touch();
  if (at % sizeof(T)) sim_misaligned();
  *(T*)at = value;
}
DEVICE Packet load_packet_weak(u64 at, bool active, u32 otherwise = 0) {
  return active ? load_weak<Packet>(at) : Packet{{otherwise, otherwise, otherwise, otherwise}};
}
DEVICE void store_packet_weak(u64 at, const Packet& p, bool active) {
  if (active) store_weak(at, p);
}
DEVICE void store_8_bytes_weak(u64 at, u32 low, u32 high, bool active) {
  if (active) store_weak(at, (u64)high << 32 | low);
}

// ---- single words
DEVICE u32 load_u32_relaxed_sys(u64 at) {
  sim_touch();
  sim_loads((const void*)at, sizeof(u32));
  return __atomic_load_n((const u32*)at, __ATOMIC_RELAXED);
}
DEVICE void store_u32_relaxed_sys(u64 at, u32 v) {
  sim_touch();
  __atomic_store_n((u32*)at, v, __ATOMIC_RELAXED);
}
DEVICE u32 load_u32_relaxed_gpu(u64 at) { return load_u32_relaxed_sys(at); }
DEVICE u64 load_u64_relaxed_gpu(u64 at) {
  sim_touch();
  return __atomic_load_n((const u64*)at, __ATOMIC_RELAXED);
}
DEVICE void store_u32_relaxed_gpu(u64 at, u32 v) { store_u32_relaxed_sys(at, v); }
DEVICE bool replace_u32_relaxed_gpu(u64 at, u32 from, u32 to) {
  sim_touch();
  return __atomic_compare_exchange_n((u32*)at, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
DEVICE u64 globaltimer_ns() {
  return sim_timer();
}

DEVICE void hide_from_compiler(u32& word) { asm("" : "+r"(word)); }

// ---- conversions
DEVICE float bits_to_float(u32 bits) { return bit_cast<float>(bits); }
DEVICE u32 to_bits(float x) { return bit_cast<u32>(x); }
DEVICE double bits_to_double(u64 bits) { return bit_cast<double>(bits); }
DEVICE u64 to_bits(double x) { return bit_cast<u64>(x); }
DEVICE float bfloat16_to_float(u16 bits) { return bits_to_float((u32)bits << 16); }
DEVICE u16 float_to_bfloat16(float x) {  // round to nearest, ties to even; NaN as on the GPU
  const u32 bits = to_bits(x);
  return x != x ? 0x7FFF : (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
DEVICE float half_to_float(u16 bits) {
  const u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000 | fraction << 13);
  if (exponent == 0) return bits_to_float(sign | to_bits((float)fraction * 0x1p-24f));
  return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}
DEVICE u16 float_to_half(float x) {  // round to nearest, ties to even; NaN as on the GPU
  const u32 bits = to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (x != x) return 0x7FFF;
  if (size >= 0x477FF000) return (u16)(sign | 0x7C00);  // 65520 and more round to infinity
  if (size < 0x38800000)  // a subnormal result: adding 0.5 makes the processor round at the right bit
    return (u16)(sign | (to_bits(bits_to_float(size) + 0.5f) - 0x3F000000));
  return (u16)(sign | ((size + 0xFFF + (size >> 13 & 1)) - 0x38000000) >> 13);
}
DEVICE u32 floats_to_bfloat16s(float low, float high) {
  return (u32)float_to_bfloat16(high) << 16 | float_to_bfloat16(low);
}
DEVICE u32 floats_to_halves(float low, float high) { return (u32)float_to_half(high) << 16 | float_to_half(low); }

// By float32: rmsnorm.cuh says why that is the sum rounded once.
DEVICE u32 add_bfloat16s(u32 a, u32 b) {
  return floats_to_bfloat16s(bfloat16_to_float((u16)a) + bfloat16_to_float((u16)b),
                             bfloat16_to_float((u16)(a >> 16)) + bfloat16_to_float((u16)(b >> 16)));
}
DEVICE u32 add_halves(u32 a, u32 b) {
  return floats_to_halves(half_to_float((u16)a) + half_to_float((u16)b),
                          half_to_float((u16)(a >> 16)) + half_to_float((u16)(b >> 16)));
}

// ---- arithmetic: g++ contracts nothing here (-ffp-contract=off)
DEVICE float add_rounded(float a, float b) { return a + b; }
DEVICE float multiply_rounded(float a, float b) { return a * b; }
DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float reciprocal(float x) { return 1 / x; }
DEVICE float reciprocal_of_normal(float x) { return 1 / x; }
DEVICE float reciprocal_square_root(float x) {  // right for every x: see reciprocal_root() of ipcreduce/host/rmsnorm.py
  return (float)(1 / __builtin_sqrt((double)x));
}
DEVICE float absolute(float x) { return __builtin_fabsf(x); }
DEVICE float max_nan(float a, float b) { return a != a || b != b ? bits_to_float(0x7FFFFFFF) : a > b ? a : b; }
constexpr bool kConvertsToE4m3 = false;
DEVICE u32 floats_to_e4m3(float, float) { return 0; }

// ---- gates and bulk copies. Loads are made when they are ordered, and stores then or when their thread waits for them.
struct Gate {
  u32 left;   // bytes, and the highest bit until it is known how many are due
  u32 phase;  // of bulk copies
};
DEVICE void prepare_gate(Gate& gate) {
  __atomic_store_n(&gate.left, 1u << 31, __ATOMIC_RELAXED);
  __atomic_store_n(&gate.phase, 0, __ATOMIC_RELAXED);
}
DEVICE void expect_at_gate(Gate& gate, u32 bytes) {
  if (bytes) __atomic_fetch_add(&gate.left, bytes - (1u << 31), __ATOMIC_RELEASE);
  else __atomic_fetch_add(&gate.phase, 1, __ATOMIC_RELEASE);
}
DEVICE void bulk_load(void* to, u64 from, u32 bytes, Gate& gate) {
  sim_touch();
  if ((from | (u64)to | bytes) % sizeof(Packet)) sim_misaligned();
  for (u32 i = 0; i < bytes / sizeof(Packet); ++i) ((Packet*)to)[i] = ((const Packet*)from)[i];
  if (__atomic_sub_fetch(&gate.left, bytes, __ATOMIC_ACQ_REL)) return;
  __atomic_store_n(&gate.left, 1u << 31, __ATOMIC_RELAXED);
  __atomic_fetch_add(&gate.phase, 1, __ATOMIC_RELEASE);
}
DEVICE void wait_for_bytes(const Gate& gate, u32 parity) {
  while (__atomic_load_n(&gate.phase, __ATOMIC_ACQUIRE) % 2 == parity) sim_relax();
}
DEVICE void make_store(const SimStore& one) {
  sim_touch();
  for (u32 i = 0; i < one.bytes / sizeof(Packet); ++i) ((Packet*)one.to)[i] = ((const Packet*)one.from)[i];
}
DEVICE void bulk_store(u64 to, const void* from, u32 bytes) {
  if ((to | (u64)from | bytes) % sizeof(Packet)) sim_misaligned();
  const SimStore one = {(void*)to, from, bytes};
  if (!sim_store_later(one)) make_store(one);
}
DEVICE void commit_bulk_stores() { sim_store_later({}); }
template <int kGroups> DEVICE void wait_until_stores_have_read() {
  for (SimStore one; sim_store_now(kGroups, one);) make_store(one);
}
DEVICE void wait_until_stores_are_made() { wait_until_stores_have_read<0>(); }
DEVICE void fence_proxy_async() {}
DEVICE void fence_proxy_async_shared() {}

// ---- clusters
#ifdef IPCREDUCE_CLUSTER
DEVICE u32 block_in_cluster() { return sim_thread->block % IPCREDUCE_CLUSTER; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() { sim_sync_cluster(IPCREDUCE_CLUSTER); }
DEVICE void wait_at_gate(const Gate& gate) {
  while (__atomic_load_n(&gate.left, __ATOMIC_ACQUIRE)) sim_relax();
}
DEVICE void store_to_block(float& at, Gate& gate, u32 block, float x, bool active) {
  if (!active) return;
  const u32 own = sim_thread->block, other = own - own % IPCREDUCE_CLUSTER + block;
  const char* const here = (const char*)sim_shared(own, 0);
  char* const there = (char*)sim_shared(other, 0);
  *(float*)(there + ((const char*)&at - here)) = x;
  __atomic_fetch_sub((u32*)(there + ((const char*)&gate - here)), 4, __ATOMIC_RELEASE);
}
#endif
