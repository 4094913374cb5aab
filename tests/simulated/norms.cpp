// The fused kernels alone, for ThreadSanitizer: ranks are OS threads of one process, as in kernels.cpp.
//
//     norms RANKS OPERATIONS SEED LIBRARY...
//
// Random rows, by one library after the other (compiler.py names them). All ranks must get the same bits, and all slots
// must be empty in the end. That the bits are right is tested by tests/gpu/sweep.py on the simulated device.
// The exit code is the finding, as of kernels.cpp.
#include <dlfcn.h>
#include <runtime.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using u8 = unsigned char;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = unsigned long long;

enum Finding { kTimeout = 5, kUnequal, kNotAtRest };
[[noreturn]] static void found(Finding finding, const char* text, u64 operation) {
  std::fprintf(stderr, "%s, operation %llu\n", text, operation);
  _exit(finding);
}

// Words of the arguments: struct Args of packets.cuh, and struct NormArgs of rmsnorm.cuh behind it.
enum Word {
  kIn = 0, kOut = 1, kPeers = 3, kHalf = 11, kEpochs = 12, kAbort = 13, kMissing = 14, kDeadline = 15,
  kResidual = 24, kResidualOut, kWeight, kQuantised, kScales, kRows, kHidden, kStrides, kNumbers, kReciprocal, kWords
};
constexpr u32 kEpochWords = 2 * 512 + 3;
constexpr size_t kHalfBytes = 4 << 20;

struct Library {
  std::string kernel;
  void (*run)(const void*);
  u32 depth, cluster, scale;
};
struct Rank {
  std::vector<u32> epochs;
  u8* workspace;  // two halves
  u32 missing[2];
};
static std::vector<Library> libraries;
static std::vector<Rank> world;
static u32 abort_word;
static u64 seed;

static u64 mix(u64 x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}
static std::vector<u16> values(size_t count, u64 which) {  // bfloat16 between 1/4 and 4, of both signs
  std::vector<u16> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    const u64 bits = mix(mix(which) ^ i);
    numbers[i] = (u16)((bits & 0x8000) | (0x3E80 + (bits >> 16) % 0x200));
  }
  return numbers;
}
template <class T> u64 hash(const std::vector<T>& numbers) {
  u64 h = numbers.size();
  for (T number : numbers) h = mix(h ^ (u64)number);
  return h;
}

static u64 run(u64 number, int rank, int ranks) {
  const u64 chosen = mix(seed ^ number << 20);
  const Library& library = libraries[chosen % libraries.size()];
  const bool two_shot = library.kernel == "fused_two_shot";
  const u32 hidden = 128 * (1 + (chosen >> 8) % 12), rows = 1 + (chosen >> 16) % 5, units = hidden / 8;
  const u32 shares = 16 * library.cluster * library.depth * (two_shot ? ranks : 1);
  const u32 block = ((units + shares - 1) / shares * 16 + 31) / 32 * 32;
  const u32 blocks = library.cluster > 1 ? rows : 1 + (chosen >> 24) % rows;

  const size_t count = (size_t)rows * hidden;
  std::vector<u16> in = values(count, number << 8 | (u64)rank), residual = values(count, number << 8 | 100);
  std::vector<u16> weight = values(hidden, number << 8 | 101), out(count), residual_out(count);
  std::vector<u32> quantised(count / 4), scales((size_t)rows * hidden / 128, 0x3D000000u);
  u64 args[kWords] = {};
  args[kIn] = (u64)in.data(), args[kOut] = (u64)out.data();
  for (int i = 0; i < ranks; ++i) args[kPeers + i] = (u64)world[(rank + i) % ranks].workspace;
  args[kHalf] = kHalfBytes, args[kEpochs] = (u64)world[rank].epochs.data();
  args[kAbort] = (u64)&abort_word, args[kMissing] = (u64)world[rank].missing, args[kDeadline] = 60'000'000'000ull;
  args[kResidual] = (u64)residual.data(), args[kResidualOut] = (u64)residual_out.data();
  args[kWeight] = (u64)weight.data(), args[kQuantised] = (u64)quantised.data(), args[kScales] = (u64)scales.data();
  args[kRows] = rows, args[kHidden] = hidden;
  args[kStrides] = library.scale == 3 ? 1ull << 32 | hidden / 128 : 1;
  const float reciprocal = 1.0f / (float)hidden, eps = 1e-6f;
  std::memcpy(&args[kNumbers], &eps, 4);
  std::memcpy(&args[kReciprocal], &reciprocal, 4);
  sim_run(library.run, args, blocks * library.cluster, block, rank, ranks, true);
  if (__atomic_load_n(&abort_word, __ATOMIC_RELAXED)) found(kTimeout, "timed out", number);
  return mix(hash(out) ^ mix(hash(residual_out) ^ mix(hash(quantised) ^ mix(hash(scales)))));
}

int main(int count, char** words) {
  if (count < 5) return 2;
  const int ranks = std::atoi(words[1]), operations = std::atoi(words[2]);
  seed = std::strtoull(words[3], nullptr, 0);
  for (int i = 4; i < count; ++i) {
    void* handle = dlopen(words[i], RTLD_NOW);
    if (!handle) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 2;
    }
    const std::string path = words[i], name = path.substr(path.rfind('/') + 1), kernel = name.substr(0, name.find('-'));
    const auto number = [&](const char* key) {
      return (u32)std::atoi(name.c_str() + name.find(key) + std::strlen(key));
    };
    libraries.push_back({kernel, (void (*)(const void*))dlsym(handle, kernel.c_str()), number("whole-"),
                         number("cluster"), number("scale")});
    if (((const u32*)dlsym(handle, (kernel + "_limits").c_str()))[1] != sizeof(u64[kWords])) return 2;
  }
  world.resize(ranks);
  for (Rank& rank : world) {
    rank.workspace = (u8*)std::aligned_alloc(128, 2 * kHalfBytes);
    std::memset(rank.workspace, 0xFF, 2 * kHalfBytes);
    rank.epochs.assign(kEpochWords, 0);
  }
  std::vector<u64> hashes((size_t)operations * ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      sim_disturb(mix(seed ^ rank) | 1);
      for (int number = 0; number < operations; ++number)
        hashes[(size_t)number * ranks + rank] = run(number, rank, ranks);
      sim_disturb(0);
    });
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < hashes.size(); ++i)
    if (hashes[i] != hashes[i / ranks * ranks]) found(kUnequal, "the ranks have different bits", i / ranks);
  for (Rank& rank : world)
    for (size_t i = 0; i < 2 * kHalfBytes; ++i)
      if (rank.workspace[i] != 0xFF) found(kNotAtRest, "a slot is not empty", operations);
  std::printf("ok\n");
}
