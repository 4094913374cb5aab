// Threads of the simulated GPU: the interface for kernels (through sync.cuh) and for launchers.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
constexpr uint32_t kSimLoads = 16;
struct SimThread {
  uint32_t block, blocks, thread, threads;
  mutable uint32_t loads;  // since the last poll; the first kSimLoads are kept
  mutable struct {
    const void* at;
    uint32_t bytes;
  } loaded[kSimLoads];
};
struct SimStore {
  void* to;
  const void* from;
  uint32_t bytes;  // 0: the end of a group
};
extern __thread const SimThread* sim_thread;  // the CUDA thread now running on this OS thread
extern __thread int kRank, kRanks;            // of the launch now running on this OS thread
extern bool sim_split_packets;                // packets arrive as two 8-byte parts, the last part first

// Runs a grid to completion on this OS thread. The kernel of a `programmatic` launch must not touch memory before
// grid_dependency_sync(); the process ends with a message if it does.
void sim_run(void (*kernel)(const void* args), const void* args, uint32_t blocks, uint32_t threads, int rank, int ranks,
             bool programmatic);
// Ranks in other processes are woken through this file, which is made if it is not there.
void sim_share_bell(const char* path);
// From now on, kernels on this OS thread also switch between CUDA threads at random points. A seed of 0 ends that.
void sim_disturb(uint64_t seed);

// The timer of the simulated GPU, in nanoseconds: the monotonic clock, and how far tests have moved it.
uint64_t sim_timer();
void sim_move_timer(uint64_t nanoseconds);

// For sync.cuh: points where a CUDA thread yields to the others.
void sim_sync_block();
void sim_sync_warp();
uint32_t sim_vote(bool mine);
uint32_t sim_shuffle_xor(uint32_t mine, uint32_t mask);  // what that lane of the warp has passed
void sim_sync_cluster(uint32_t blocks);                  // of clusters of so many blocks
// For sync.cuh: shared memory of a block of the grid, with what an earlier kernel may have left in it.
void* sim_shared(uint32_t block, size_t bytes);
// For sync.cuh: keeps a store of the thread now running, or returns false for one to make at once; and takes out the
// oldest one, but for those of so many groups.
bool sim_store_later(SimStore store);
bool sim_store_now(uint32_t but_groups, SimStore& store);
void sim_relax();     // between two polls
void sim_make_way();  // between two steps
void sim_touch();  // before each access to memory
void sim_await_predecessor();
[[noreturn]] void sim_misaligned();
}
// For sync.cuh: notes a load that may be part of a poll.
inline void sim_loads(const void* at, uint32_t bytes) {
  const uint32_t number = sim_thread->loads++;
  if (number < kSimLoads) sim_thread->loaded[number] = {at, bytes};
}
