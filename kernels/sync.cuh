// The hardware layer of the kernels: all inline assembly, memory scopes and orders, and launch attributes.
//
// The tests compile the kernels for the CPU with a stand-in for this file (tests/simulated/include), so no other file
// in kernels/ may assume a GPU. Include it as <sync.cuh>: with quotes the compiler would never find the stand-in.
//
// Accessors are named after the PTX memory model: order (relaxed, or weak for plain accesses), then scope (gpu, sys).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The number of ranks and the rank are compile-time constants, so that loops over the ranks unroll and arrays of
// packets stay in registers.
constexpr int kRanks = IPCREDUCE_RANKS;
constexpr int kRank = IPCREDUCE_RANK;
constexpr int kMaxRanks = IPCREDUCE_RANKS;  // array bound; in the stand-in, kRanks is a run-time value

// max_threads: the most threads in a block. blocks: the compiler limits registers so that this number of blocks of that
// size fits on a multiprocessor. The plan relies on it for grids that must be resident at once.
#define KERNEL(name, max_threads, blocks) extern "C" __global__ void __launch_bounds__(max_threads, blocks) name
#define KERNEL_ARGS const __grid_constant__ Args
// A kernel whose blocks form clusters of IPCREDUCE_CLUSTER blocks (sm_90 on).
#if IPCREDUCE_CLUSTER > 1
#define CLUSTER_KERNEL(name, max_threads, blocks) \
  extern "C" __global__ void __launch_bounds__(max_threads, blocks) __cluster_dims__(IPCREDUCE_CLUSTER, 1, 1) name
#else
#define CLUSTER_KERNEL(name, max_threads, blocks) KERNEL(name, max_threads, blocks)
#endif
#define SHARED(Type, name) __shared__ Type name  // a block's one variable in shared memory
// The same for more than 48 KB, which the launch has to ask for: kLargeSharedBytes.
#define LARGE_SHARED(Type, name)                            \
  extern __shared__ __align__(128) u8 name##_bytes[];       \
  Type& name = *(Type*)name##_bytes
constexpr u32 kStageBytes = 32 << 10, kLargeSharedBytes = 193 << 10;  // of bulk.cu
#define DEVICE __device__ __forceinline__
#define DEVICE_NOINLINE __device__ __noinline__

// The unit of every transfer between GPUs. It is one 128-bit access, which is one instruction in SASS, so data and
// sentinel word arrive together. The start-up check detects links that split it. docs/protocol.md says what is
// documented about this.
struct alignas(16) Packet {
  u32 word[4];
};

DEVICE u32 thread_in_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u32 threads_in_grid() { return gridDim.x * blockDim.x; }
DEVICE u32 thread_in_block() { return threadIdx.x; }
DEVICE u32 threads_in_block() { return blockDim.x; }
DEVICE u32 block_in_grid() { return blockIdx.x; }
DEVICE u32 blocks_in_grid() { return gridDim.x; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE bool warp_any(bool mine) { return __any_sync(0xFFFFFFFFu, mine); }
DEVICE u32 warp_or(u32 mine) { return __reduce_or_sync(0xFFFFFFFFu, mine); }
DEVICE u32 warp_max(u32 mine) { return __reduce_max_sync(0xFFFFFFFFu, mine); }
DEVICE u32 warp_ballot(bool mine) { return __ballot_sync(0xFFFFFFFFu, mine); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
DEVICE bool is_first_active_lane() { return thread_in_block() % 32 == (u32)__ffs((int)__activemask()) - 1; }
DEVICE void spin_pause() {}  // once per poll; the stand-in switches to another thread here
// Some 30 ms. All waiting warps check at about the same time. With 256 polls, data that came from a rank that was late by
// more than 0.1 ms were seen up to 0.8 ms after they had come (benchmarks/NOTES.md).
constexpr u32 kSpinsBetweenChecks = 1 << 15;

// ---- programmatic dependent launch (sm_90 on): no-ops in a launch without that attribute
// As cudaGridDependencySynchronize(). Work that needs no memory goes before it, which saves 0.03 us
// (benchmarks/NOTES.md).
DEVICE void grid_dependency_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// As cudaTriggerProgrammaticLaunchCompletion(). It goes after the first sends. If it came earlier, the blocks of the
// next kernel would delay them (benchmarks/NOTES.md).
DEVICE void trigger_programmatic_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- packets: relaxed, system scope. Kernel boundaries take the place of fences (see one_shot.cu, visibility).
DEVICE Packet load_packet_relaxed_sys(u64 at) {
  Packet p;
  asm volatile("{ .reg .b128 t; .reg .b64 low, high; ld.relaxed.sys.global.b128 t, [%4]; mov.b128 {low, high}, t;"
               " mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
               : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3]) : "l"(at) : "memory");
  return p;
}
// Predicated, without a branch, so that the address is ready by the time the data arrive.
DEVICE void store_packet_relaxed_sys(u64 at, const Packet& p, bool active = true) {
  const u64 low = (u64)p.word[1] << 32 | p.word[0], high = (u64)p.word[3] << 32 | p.word[2];
  asm volatile("{ .reg .b128 t; .reg .pred p; setp.ne.u32 p, %3, 0;"
               " mov.b128 t, {%1, %2}; @p st.relaxed.sys.global.b128 [%0], t; }"
               :: "l"(at), "l"(low), "l"(high), "r"((u32)active) : "memory");
}

// Orders the plain stores that this thread has made or observed before its next packet store, and its last packet load
// before its next plain loads.
DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- this rank's own memory: weak accesses, ordered by the stream
// Read once only, so not kept in L1. Where active is false, each word is `otherwise`.
DEVICE Packet load_packet_weak(u64 at, bool active, u32 otherwise = 0) {
  Packet p = {{otherwise, otherwise, otherwise, otherwise}};
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;"
               " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(p.word[0]), "+r"(p.word[1]), "+r"(p.word[2]), "+r"(p.word[3])
               : "l"(at), "r"((u32)active) : "memory");
  return p;
}
DEVICE void store_packet_weak(u64 at, const Packet& p, bool active) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }"
               :: "l"(at), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3]), "r"((u32)active) : "memory");
}
template <int kBytes> DEVICE u64 load_element_weak(u64 at, bool active) {  // zero-extended; 0 where active is false
  u64 wide = 0;
  u32 bits = 0;
  if constexpr (kBytes == 8)
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u64 %0, [%1]; }"
                 : "+l"(wide) : "l"(at), "r"((u32)active) : "memory");
  else if constexpr (kBytes == 4)
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
                 : "+r"(bits) : "l"(at), "r"((u32)active) : "memory");
  else if constexpr (kBytes == 2)
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                 : "+r"(bits) : "l"(at), "r"((u32)active) : "memory");
  else
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u8 %0, [%1]; }"
                 : "+r"(bits) : "l"(at), "r"((u32)active) : "memory");
  return kBytes == 8 ? wide : bits;
}
template <class T> DEVICE void store_weak(u64 at, T value) { *(T*)at = value; }
DEVICE void store_8_bytes_weak(u64 at, u32 low, u32 high, bool active) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {%1, %2}; }"
               :: "l"(at), "r"(low), "r"(high), "r"((u32)active) : "memory");
}

// ---- single words: epochs (scope of this GPU), and the control page in host memory (system scope)
DEVICE u32 load_u32_relaxed_gpu(u64 at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE u64 load_u64_relaxed_gpu(u64 at) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void store_u32_relaxed_gpu(u64 at, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(at), "r"(v) : "memory");
}
// Stores `to` if `from` is there still. Returns true for the one thread that has stored.
DEVICE bool replace_u32_relaxed_gpu(u64 at, u32 from, u32 to) {
  u32 found;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(found) : "l"(at), "r"(from), "r"(to)
               : "memory");
  return found == from;
}
DEVICE u32 load_u32_relaxed_sys(u64 at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void store_u32_relaxed_sys(u64 at, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(at), "r"(v) : "memory");
}
DEVICE u64 globaltimer_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// What the compiler knows of a value ends here.
DEVICE void hide_from_compiler(u32& word) { asm("" : "+r"(word)); }

// ---- conversions between bits and numbers: without a toolkit, NVRTC has no cuda_fp16.h
DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 to_bits(float x) { return __float_as_uint(x); }
DEVICE double bits_to_double(u64 bits) { return __longlong_as_double((long long)bits); }
DEVICE u64 to_bits(double x) { return (u64)__double_as_longlong(x); }
DEVICE float half_to_float(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
DEVICE u16 float_to_half(float x) {  // round to nearest, ties to even
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEVICE float bfloat16_to_float(u16 bits) { return bits_to_float((u32)bits << 16); }
DEVICE u16 float_to_bfloat16(float x) {  // round to nearest, ties to even
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// Two at once, the first in the low half. The instruction for one is slower (benchmarks/NOTES.md).
DEVICE u32 floats_to_halves(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
DEVICE u32 floats_to_bfloat16s(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// The sums of two pairs of halves, each rounded once.
DEVICE u32 add_halves(u32 a, u32 b) {
  u32 sums;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
  return sums;
}
DEVICE u32 add_bfloat16s(u32 a, u32 b) {  // by a * 1 + b, as sm_80 has no addition
  u32 sums;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(0x3F803F80u), "r"(b));
  return sums;
}

// ---- arithmetic whose rounding is part of a contract (rmsnorm.cuh): the compiler contracts none of it into an fma
DEVICE float add_rounded(float a, float b) { return __fadd_rn(a, b); }
DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }  // rounded once
DEVICE float reciprocal(float x) { return __frcp_rn(x); }
// 1 / x, correctly rounded, for x from 2^-125 to 2^125, or NaN: what __frcp_rn() does behind its test for the others.
DEVICE float reciprocal_of_normal(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  return multiply_add(guess, -multiply_add(x, guess, -1), guess);
}
DEVICE float reciprocal_square_root(float x) { return __frsqrt_rn(x); }  // correctly rounded
DEVICE float absolute(float x) { return fabsf(x); }  // part of the instruction that takes the result
DEVICE float max_nan(float a, float b) {  // NaN wins
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}
// Two e4m3 numbers, the first in the low byte: rounded to nearest, ties to even, at most +-448, and NaN is 0x7F.
#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsToE4m3 = true;
DEVICE u32 floats_to_e4m3(float low, float high) {
  u16 both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}
#else
constexpr bool kConvertsToE4m3 = false;
DEVICE u32 floats_to_e4m3(float, float) { return 0; }
#endif

// ---- clusters of blocks, which run at once and reach each other's shared memory
#if __CUDA_ARCH__ >= 900
DEVICE u32 block_in_cluster() {
  u32 r;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
  return r;
}
// A barrier of all threads of a cluster, in two parts. Of what they did before the first part, it orders only what a
// fence has published: here the preparation of a gate. A release would compile to a fence of the whole GPU, for which a
// kernel that cannot start early waits 0.3 us (benchmarks/NOTES.md).
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// In a block's shared memory: opens once, when so many bytes have come by store_to_block(). One thread prepares it, the
// other blocks may store after the cluster's barrier, and behind that barrier one thread says how many bytes are due.
// Bytes may come before that: the gate stays shut until the thread has said it.
struct Gate {
  u64 mbarrier;
};
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void prepare_gate(Gate& gate) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(&gate.mbarrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void expect_at_gate(Gate& gate, u32 bytes) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }"
               :: "r"(shared_address(&gate.mbarrier)), "r"(bytes) : "memory");
}
// What has come lies in shared memory, and to acquire that alone keeps L1. An acquire of all memory empties L1, for
// which large calls wait up to 0.1 us. NVRTC has the fence from 12.8 on.
DEVICE void wait_at_gate(const Gate& gate) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%0], 0;"
               " @!p bra again; fence.acquire.sync_restrict::shared::cluster.cluster; }"
               :: "r"(shared_address(&gate.mbarrier)) : "memory");
#else
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;"
               " @!p bra again; }" :: "r"(shared_address(&gate.mbarrier)) : "memory");
#endif
}
// Stores x where block `block` of the cluster has what `at` is in this block, and counts 4 bytes at its gate. The other
// block's addresses are found by all lanes, so that those that store do not wait for them.
DEVICE void store_to_block(float& at, Gate& gate, u32 block, float x, bool active) {
  asm volatile("{ .reg .pred p; .reg .b32 there, gate; setp.ne.u32 p, %4, 0;"
               " mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 gate, %1, %2;"
               " @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [gate]; }"
               :: "r"(shared_address(&at)), "r"(shared_address(&gate.mbarrier)), "r"(block), "r"(to_bits(x)),
                  "r"((u32)active) : "memory");
}

// ---- bulk copies: one thread orders them, and the copy unit makes them. Addresses and bytes are multiples of 16.
// Loads into shared memory, and counts the bytes at a gate. All copies of a phase of the gate follow expect_at_gate().
DEVICE void bulk_load(void* to, u64 from, u32 bytes, Gate& gate) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&gate.mbarrier)) : "memory");
}
// Waits for the end of a gate's phase of this parity: 0 for the first one, then in turns.
DEVICE void wait_for_bytes(const Gate& gate, u32 parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
               :: "r"(shared_address(&gate.mbarrier)), "r"(parity) : "memory");
}
DEVICE void bulk_store(u64 to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
DEVICE void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all stores of this thread, but for the last kGroups groups that it has committed, have read their source.
template <int kGroups> DEVICE void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kGroups) : "memory");
}
// Waits until this thread's stores are made, and visible to it.
DEVICE void wait_until_stores_are_made() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders the memory accesses of this thread and those of the copy unit, which the memory model keeps apart (proxies).
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
struct Gate {};
DEVICE u32 block_in_cluster() { return 0; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() {}
DEVICE void prepare_gate(Gate&) {}
DEVICE void expect_at_gate(Gate&, u32) {}
DEVICE void wait_at_gate(const Gate&) {}
DEVICE void store_to_block(float&, Gate&, u32, float, bool) {}
DEVICE void bulk_load(void*, u64, u32, Gate&) {}
DEVICE void wait_for_bytes(const Gate&, u32) {}
DEVICE void bulk_store(u64, const void*, u32) {}
DEVICE void commit_bulk_stores() {}
template <int> DEVICE void wait_until_stores_have_read() {}
DEVICE void wait_until_stores_are_made() {}
DEVICE void fence_proxy_async() {}
DEVICE void fence_proxy_async_shared() {}
#endif
