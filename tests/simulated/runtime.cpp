// Runs a CUDA grid on one OS thread: each CUDA thread is a fiber, which yields at barriers, warp votes and polls.
//
// All blocks of a launch are resident at once. Fibers run in turn. A warp whose lanes all poll is mostly not run: this
// file looks at the memory that they have polled, which costs less than 64 changes of stacks. When nothing has changed,
// the OS thread sleeps, so that other ranks run: there may be fewer processors than ranks. A rank that has stored
// something rings a bell, which wakes the sleepers. Fibers and their stacks are kept for the next launch, and those of
// a stream that has ended for another stream.
//
// ThreadSanitizer (-DSIM_TSAN) is told of the fibers, and of no more order between them than CUDA guarantees: barriers,
// __syncwarp and the ends of kernels order memory; votes, polls and the scheduling in this file do not. This file
// itself is not instrumented.
#include "runtime.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#ifdef SIM_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
constexpr unsigned kNoOrder = 1;
static void acquire(void* at) { __tsan_acquire(at); }
static void release(void* at) { __tsan_release(at); }
#else
static void acquire(void*) {}
static void release(void*) {}
#endif

__thread const SimThread* sim_thread;
__thread int kRank, kRanks;
bool sim_split_packets = [] {
#ifdef __x86_64__  // with AVX, aligned 16-byte accesses are atomic: manuals of Intel and AMD
  const bool whole = __builtin_cpu_supports("avx");
#else
  const bool whole = false;
#endif
  return !whole || getenv("SIM_SPLIT_PACKETS");
}();

namespace {
std::atomic<uint64_t> moved;  // nanoseconds

constexpr size_t kStackBytes = 64 << 10, kGuardBytes = 4 << 10;
constexpr size_t kGuarded = 2048;  // fibers of a grid whose stacks have a guard page
constexpr uint32_t kWarp = 32;
constexpr size_t kSharedBytes = 16 << 10;
constexpr uint8_t kLeft = 0x7F;  // what shared memory holds when a kernel begins: as floats, large numbers
constexpr long kLongestSleep = 300'000;  // nanoseconds: nobody rings for an abort or a deadline
constexpr uint32_t kRoundsBetweenPolls = 8;  // of a warp that sees no change
constexpr uint32_t kStepsBetweenRings = 61;  // prime, so that each thread of a block has its turn

struct Bell {
  std::atomic<uint32_t> rings, sleepers;
};
Bell own_bell;
Bell* bell = &own_bell;  // or one in memory that all ranks share

void ring() {
  ++bell->rings;
  if (bell->sleepers) syscall(SYS_futex, &bell->rings, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
void sleep_unless_rung_since(uint32_t rings) {
  const timespec longest = {0, kLongestSleep};
  ++bell->sleepers;
  syscall(SYS_futex, &bell->rings, FUTEX_WAIT, rings, &longest, nullptr, 0);
  --bell->sleepers;
}

// A barrier: of a block's threads at __syncthreads, or of a warp's at a vote.
struct Meeting {
  uint32_t first, expected;  // fibers
  uint32_t arrived, votes, round;
  char order[2];  // by parity of the round: a late leaver must not be ordered after arrivals of the next round
};

struct Fiber {
  SimThread thread;
  enum { kReady, kWaiting, kDone } state;
  Meeting *block, *warp;
  uint32_t votes;
  uint32_t passed[2];  // at shuffles, by parity of the round: a fast lane may be one round ahead
  std::vector<SimStore> stores;
  uint32_t groups = 0;  // of stores
  bool polls;  // since its last barrier or store; votes are part of a poll
  uint32_t loads, watched;  // in its last poll; and until it runs again, how many of them to look at
  const void* loaded_at[kSimLoads];
  unsigned char seen[kSimLoads][16];
  bool before_predecessor, started = false;
  ucontext_t context;
  jmp_buf resume;
  void* tsan;
};

struct Shared {  // memory of a block; ready: filled for this kernel
  void* memory;
  bool ready;
};

struct Grid {
  void (*kernel)(const void*);
  const void* args;
  std::deque<Fiber> fibers;  // a deque: fibers do not move when it grows
  std::deque<Meeting> blocks, warps, clusters;
  std::deque<Shared> shared;  // by block
  uint64_t random = 0;
  char begin, end;  // for ThreadSanitizer: order between a launch and its fibers
  ucontext_t context;
  jmp_buf resume;
  void* tsan;
};
thread_local Grid* grid;
thread_local Fiber* self;

std::mutex unused_lock;
auto& unused = *new std::vector<Grid*>;  // of threads that have ended; never destroyed, as threads may end after main()
struct Owner {  // gives the thread's grid back when it ends
  ~Owner() {
#ifndef SIM_TSAN  // whose fibers belong to their thread
    if (!grid) return;
    for (; grid->fibers.size() > kGuarded; grid->fibers.pop_back())
      munmap(grid->fibers.back().context.uc_stack.ss_sp, kStackBytes);
    grid->fibers.shrink_to_fit();
    const std::lock_guard<std::mutex> lock(unused_lock);
    unused.push_back(grid);
#endif
  }
};
thread_local Owner owner;

void fatal(const char* message) {
  std::fprintf(stderr, "simulated GPU, rank %d, block %u, thread %u: %s\n", kRank, self ? self->thread.block : 0,
               self ? self->thread.thread : 0, message);
  std::abort();
}

uint32_t random_bits() {  // xorshift64*
  uint64_t& x = grid->random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  return (uint32_t)((x * 0x2545F4914F6CDD1Dull) >> 32);
}

#ifdef SIM_TSAN
void enter(Fiber& fiber) {
  __tsan_switch_to_fiber(fiber.tsan, kNoOrder);
  swapcontext(&grid->context, &fiber.context);
}
void leave() {
  __tsan_switch_to_fiber(grid->tsan, kNoOrder);
  swapcontext(&self->context, &grid->context);
}
#else
// swapcontext makes a system call for the signal mask, so it is avoided; setcontext only enters a new stack.
void enter(Fiber& fiber) {
  if (_setjmp(grid->resume)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}
void leave() {
  if (!_setjmp(self->resume)) _longjmp(grid->resume, 1);
}
#endif

void fiber_main() {
  for (;;) {
    acquire(&grid->begin);
    grid->kernel(grid->args);
    release(&grid->end);
    if (!self->stores.empty()) fatal("returns before its bulk stores are made");
    self->state = Fiber::kDone;
    leave();
  }
}

void begin_anew(Fiber& fiber) {
  void* const stack = fiber.context.uc_stack.ss_sp;
  const size_t nbytes = fiber.context.uc_stack.ss_size;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = nbytes;
  fiber.started = false;
  makecontext(&fiber.context, fiber_main, 0);
}

// This thread's grid: a new one, or that of a thread that has ended.
void take_grid() {
  asm volatile("" ::"r"(&owner));  // made now, so that it ends with the thread
  {
    const std::lock_guard<std::mutex> lock(unused_lock);
    if (!unused.empty()) {
      grid = unused.back();
      unused.pop_back();
    }
  }
  if (!grid) grid = new Grid;
  for (Fiber& fiber : grid->fibers) begin_anew(fiber);  // their frames may hold addresses of the other thread's variables
  grid->random = 0;
}

void make_fibers(size_t count) {
  for (size_t i = grid->fibers.size(); i < count; ++i) {
    Fiber& fiber = grid->fibers.emplace_back();
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED) fatal("no memory for the stack of a fiber");
    // All run the same kernel, so guards on some are enough: each uses two of a process's limited mappings.
    if (i < kGuarded && mprotect(stack, kGuardBytes, PROT_NONE)) fatal("no guard for the stack of a fiber");
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = kStackBytes - i % 64 * 64;  // or all stack tops would share a few cache sets
    begin_anew(fiber);
#ifdef SIM_TSAN
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }
}

// Keeps what a fiber has seen in this poll. It is watched if it has seen the same in the last one; else it may go on.
// ThreadSanitizer would see these reads, and so every poll runs there.
void watch(Fiber& fiber) {
  const SimThread& thread = fiber.thread;
#ifndef SIM_TSAN
  const uint32_t loads = thread.loads <= kSimLoads ? thread.loads : 0;
  bool same = fiber.loads == loads;
  for (uint32_t i = 0; i < loads; ++i) {
    const auto [at, bytes] = thread.loaded[i];
    same = same && fiber.loaded_at[i] == at && !std::memcmp(fiber.seen[i], at, bytes);
    fiber.loaded_at[i] = at;
    std::memcpy(fiber.seen[i], at, bytes);
  }
  fiber.loads = loads;
  fiber.watched = same ? loads : 0;
#endif
  thread.loads = 0;
}
bool sees_no_change(const Fiber& fiber) {
  for (uint32_t i = 0; i < fiber.watched; ++i)
    if (std::memcmp(fiber.seen[i], fiber.thread.loaded[i].at, fiber.thread.loaded[i].bytes)) return false;
  return fiber.watched != 0;
}
// Says if the lanes of a warp that are not at a barrier all poll, and would see what they have seen.
bool polls_in_vain(const Meeting& warp) {
  bool any = false;
  for (uint32_t i = warp.first; i < warp.first + warp.expected; ++i) {
    const Fiber& fiber = grid->fibers[i];
    if (fiber.state != Fiber::kReady) continue;
    if (!sees_no_change(fiber)) return false;
    any = true;
  }
  return any;
}

// Waits for the other threads of a meeting. Returns the votes of all.
uint32_t meet(Meeting& meeting, bool vote, bool orders) {
  char* order = &meeting.order[meeting.round & 1];
  if (orders) release(order), self->polls = false;
  if (meeting.arrived == 0) meeting.votes = 0;
  meeting.votes |= (uint32_t)vote << self->thread.thread % kWarp;
  if (++meeting.arrived < meeting.expected) {
    self->state = Fiber::kWaiting;
    leave();
  } else {
    meeting.arrived = 0;
    ++meeting.round;
    for (uint32_t i = meeting.first; i < meeting.first + meeting.expected; ++i) {
      grid->fibers[i].state = Fiber::kReady;
      grid->fibers[i].votes = meeting.votes;
    }
  }
  if (orders) acquire(order);
  return self->votes;
}
}  // namespace

void sim_run(void (*kernel)(const void*), const void* args, uint32_t blocks, uint32_t threads, int rank, int ranks,
             bool programmatic) {
  if (!grid) take_grid();
  const uint32_t warps = (threads + kWarp - 1) / kWarp;
  const uint32_t count = blocks * threads;
  make_fibers(count);
  grid->kernel = kernel;
  grid->args = args;
  grid->blocks.resize(blocks);
  grid->warps.resize(blocks * warps);
  grid->clusters.assign(blocks, {});
  while (grid->shared.size() < blocks) {  // here, since ThreadSanitizer takes a mapping for a write
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) fatal("no shared memory");
    grid->shared.push_back({memory, false});
  }
  for (Shared& shared : grid->shared) shared.ready = false;
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint32_t first = b * threads;
    grid->blocks[b] = {first, threads, 0, 0, 0, {}};
    for (uint32_t w = 0; w < warps; ++w)
      grid->warps[b * warps + w] = {first + w * kWarp, w + 1 < warps ? kWarp : threads - w * kWarp, 0, 0, 0, {}};
    for (uint32_t t = 0; t < threads; ++t) {
      Fiber& fiber = grid->fibers[first + t];
      fiber.thread = {b, blocks, t, threads, 0, {}};
      fiber.loads = fiber.watched = 0;
      fiber.state = Fiber::kReady;
      fiber.polls = false;
      fiber.block = &grid->blocks[b];
      fiber.warp = &grid->warps[b * warps + t / kWarp];
      fiber.before_predecessor = programmatic;
    }
  }
  kRank = rank;
  kRanks = ranks;
#ifdef SIM_TSAN
  grid->tsan = __tsan_get_current_fiber();
#endif
  release(&grid->begin);

  for (uint32_t done = 0, round = 0; done < count; ++round) {
    const uint32_t rings = bell->rings;
    bool progress = false, stuck = true;
    for (uint32_t i = 0; i < count; ++i) {
      Fiber& fiber = grid->fibers[i];
      const Meeting& warp = *fiber.warp;
      if (i == warp.first && !grid->random && (round + i / kWarp) % kRoundsBetweenPolls && polls_in_vain(warp)) {
        stuck = false;
        i += warp.expected - 1;
        continue;
      }
      if (fiber.state != Fiber::kReady) continue;
      stuck = false;
      if (grid->random && random_bits() % 4 == 0) continue;
      self = &fiber;
      sim_thread = &fiber.thread;
      fiber.watched = 0;
      enter(fiber);
      done += fiber.state == Fiber::kDone;
      progress |= !fiber.polls || fiber.state == Fiber::kDone;
    }
    if (stuck) fatal("threads wait for others that have returned");
    if (progress)
      ring();
    else
      sleep_unless_rung_since(rings);
  }
  self = nullptr;
  sim_thread = nullptr;
  acquire(&grid->end);
}

uint64_t sim_timer() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1'000'000'000 + (uint64_t)t.tv_nsec + moved;
}
void sim_move_timer(uint64_t nanoseconds) { moved += nanoseconds; }

void sim_share_bell(const char* path) {
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Bell))) fatal("no file for the bell");
  void* const shared = mmap(nullptr, sizeof(Bell), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (shared == MAP_FAILED) fatal("no memory for the bell");
  close(file);
  bell = (Bell*)shared;
}

void sim_disturb(uint64_t seed) {
  if (!grid) take_grid();
  grid->random = seed;
}

void sim_sync_block() { meet(*self->block, false, true); }
void sim_sync_warp() { meet(*self->warp, false, true); }
uint32_t sim_vote(bool mine) { return meet(*self->warp, mine, false); }
uint32_t sim_shuffle_xor(uint32_t mine, uint32_t mask) {
  Meeting& warp = *self->warp;
  const uint32_t turn = warp.round & 1, other = self->thread.thread % kWarp ^ mask;
  if (other >= warp.expected) fatal("shuffles with a lane that its warp does not have");
  self->passed[turn] = mine;
  meet(warp, false, false);
  return grid->fibers[warp.first + other].passed[turn];
}
void sim_sync_cluster(uint32_t blocks) {
  const uint32_t first = self->thread.block / blocks * blocks, threads = self->thread.threads;
  if (self->thread.blocks % blocks) fatal("the grid is no whole number of clusters");
  Meeting& cluster = grid->clusters[first];
  cluster.first = first * threads;
  cluster.expected = blocks * threads;
  meet(cluster, false, true);
}
void* sim_shared(uint32_t block, size_t bytes) {
  Shared& shared = grid->shared[block];
  if (bytes > kSharedBytes) fatal("wants more shared memory than a block has");
  if (!shared.ready) {
    shared.ready = true;
    volatile uint8_t* const at = (volatile uint8_t*)shared.memory;  // ThreadSanitizer would see a memset
    for (size_t i = 0; i < bytes; ++i) at[i] = kLeft;
  }
  return shared.memory;
}
bool sim_store_later(SimStore store) {
  if (store.bytes && grid->random && random_bits() % 2) return false;
  self->stores.push_back(store);
  self->groups += !store.bytes;
  return true;
}
bool sim_store_now(uint32_t but_groups, SimStore& store) {
  if (self->groups <= but_groups) return false;
  store = self->stores.front();
  self->stores.erase(self->stores.begin());
  self->groups -= !store.bytes;
  return true;
}
void sim_relax() {
  watch(*self);
  self->polls = true;
  leave();
}
void sim_make_way() {
  thread_local uint32_t calls;
  self->polls = false;
  leave();
  if (++calls % kStepsBetweenRings) return;
  ring();
  const timespec pause = {0, kLongestSleep / 2};  // others see the half of a packet, too
  nanosleep(&pause, nullptr);
}
void sim_misaligned() { fatal("misaligned address"); }
void sim_await_predecessor() { self->before_predecessor = false; }
void sim_touch() {
  if (self->before_predecessor) fatal("touches memory before grid_dependency_sync()");
  if (grid->random && random_bits() % 16 == 0) leave();
}
