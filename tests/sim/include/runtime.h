// The simulated GPU's threads, as the kernels see them (through sync.cuh) and those who launch kernels.
#pragma once
#include <cstdint>

extern "C" {
struct SimThread {
  uint32_t block, blocks, thread, threads;
};
extern __thread const SimThread* sim_thread;  // the CUDA thread that runs now on this OS thread
extern __thread int kRank, kRanks;            // of the launch that runs now on this OS thread
extern bool sim_split_packets;                // this machine's packets arrive in two halves, the latter half first

// Runs a grid on this OS thread, from its first thread's start to its last one's end. A `programmatic` launch must
// not touch memory before await_predecessor(); the process ends with a message if it does.
void sim_run(void (*kernel)(const void* args), const void* args, uint32_t blocks, uint32_t threads, int rank, int ranks,
             bool programmatic);
// From now on, kernels on this OS thread switch between CUDA threads at random places too. 0 ends that.
void sim_disturb(uint64_t seed);

// For sync.cuh: places where one CUDA thread makes way for the others.
void sim_sync_block();
void sim_sync_warp();
uint32_t sim_vote(bool mine);
void sim_relax();     // between two polls
void sim_make_way();  // between two steps
void sim_touch();  // before each access to memory
void sim_await_predecessor();
}
