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
DEVICE u32 warp_ballot(bool mine) { return __ballot_sync(0xFFFFFFFFu, mine); }
DEVICE void spin_pause() {}  // once per poll; the stand-in switches to another thread here

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
DEVICE Packet load_packet_weak(u64 at, bool active) {  // read once only, so not kept in L1
  Packet p = {};
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
