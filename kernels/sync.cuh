// What the kernels need from the machine: every line of inline assembly, every memory scope, every launch attribute.
//
// The tests compile the kernels for the CPU with a stand-in for this one file (tests/sim), so nothing else here may
// assume a GPU. Kernels include it as <sync.cuh>: with quotes the stand-in would never be found.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// NVRTC gets the world as constants, so that loops over the ranks unroll and arrays of packets stay in registers.
constexpr int kRanks = IPCREDUCE_RANKS;
constexpr int kRank = IPCREDUCE_RANK;
constexpr int kMaxRanks = IPCREDUCE_RANKS;  // array bound; the stand-in has kRanks at run time

// At most so many threads a block; and registers are kept few enough for so many of such blocks a multiprocessor, which
// is what the plan counts on for grids that are resident at once.
#define KERNEL(name, max_threads, blocks) extern "C" __global__ void __launch_bounds__(max_threads, blocks) name
#define KERNEL_ARGS const __grid_constant__ Args
#define DEVICE __device__ __forceinline__
#define DEVICE_COLD __device__ __noinline__

// The unit of everything that crosses a link: one 128-bit access, which PTX keeps whole (memory consistency model,
// "scalar data-types ... with a maximum size and alignment of 128 bits"), so its data and its mark arrive together.
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
DEVICE void relax() {}  // a turn of a poll loop; the stand-in lets other threads run here

// ---- programmatic dependent launch (sm_90): a no-op where the launch had no such attribute
DEVICE void await_predecessor() {  // what needs no memory comes before it: 0.03 us less (NOTES.md)
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void trigger_dependents() {  // after the first sends: before, the next kernel's blocks hold these up (NOTES.md)
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- packets: relaxed, system scope. Kernel boundaries are the fences (see one_shot.cu).
DEVICE Packet load_packet_sys(u64 at) {
  Packet p;
  asm volatile("{ .reg .b128 t; .reg .b64 low, high; ld.relaxed.sys.global.b128 t, [%4]; mov.b128 {low, high}, t;"
               " mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
               : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3]) : "l"(at) : "memory");
  return p;
}
// By predicate, not by branch: the address is then ready when the data come.
DEVICE void store_packet_sys(u64 at, const Packet& p, bool active = true) {
  const u64 low = (u64)p.word[1] << 32 | p.word[0], high = (u64)p.word[3] << 32 | p.word[2];
  asm volatile("{ .reg .b128 t; .reg .pred p; setp.ne.u32 p, %3, 0;"
               " mov.b128 t, {%1, %2}; @p st.relaxed.sys.global.b128 [%0], t; }"
               :: "l"(at), "l"(low), "l"(high), "r"((u32)active) : "memory");
}

// Makes plain stores that this thread has made or seen precede the next packet, and the packet before precede plain loads.
DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- this rank's own memory, ordered by the stream
DEVICE Packet load_packet_local(u64 at, bool active) {  // each packet is read once: it need not stay in L1
  Packet p = {};
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;"
               " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(p.word[0]), "+r"(p.word[1]), "+r"(p.word[2]), "+r"(p.word[3])
               : "l"(at), "r"((u32)active) : "memory");
  return p;
}
DEVICE void store_packet_local(u64 at, const Packet& p, bool active) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }"
               :: "l"(at), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3]), "r"((u32)active) : "memory");
}
template <int kBytes> DEVICE u64 load_element_local(u64 at, bool active) {  // zero-extended; 0 where active is false
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
template <class T> DEVICE void store_local(u64 at, T value) { *(T*)at = value; }

// ---- single words: epochs (this GPU), the control page in host memory (every processor)
DEVICE u32 load_word_gpu(u64 at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE u64 load_words_gpu(u64 at) {  // two, aligned
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void store_word_gpu(u64 at, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(at), "r"(v) : "memory");
}
DEVICE u32 load_word_sys(u64 at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void store_word_sys(u64 at, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(at), "r"(v) : "memory");
}
DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// ---- conversions between bits and numbers; NVRTC has no cuda_fp16.h without a toolkit
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE double double_of(u64 bits) { return __longlong_as_double((long long)bits); }
DEVICE u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
DEVICE float float_of_half(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
DEVICE u16 half_of(float x) {  // to nearest, ties to even
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEVICE float float_of_bfloat(u16 bits) { return float_of((u32)bits << 16); }
DEVICE u16 bfloat_of(float x) {  // to nearest, ties to even
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
