// Tests of the kernels alone: ranks are OS threads of one process that share only their workspaces and the abort word.
//
//     kernels MODE RANKS OPERATIONS PACKETS SEED SECONDS LIBRARY...
//
// sweep:   random operations, with rows of up to PACKETS packets.
// absent:  the last rank stays away; the waits of the others end.
// late:    the last rank arrives after the others have abandoned their waits; it must get no wrong value.
// verify:  the start-up check, with OPERATIONS rounds.
//
// SECONDS is the deadline of a wait. A run counts as a hang if no rank ends an operation for three times as long. A
// library is a build of one kernel (compiler.py), named after its kernel, dtype and op. The exit code is the finding.
#include <dlfcn.h>
#include <runtime.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using u8 = unsigned char;
using u32 = uint32_t;
using u64 = unsigned long long;

enum Finding { kValue = 3, kCanary, kTimeout, kUnequal, kNotAtRest, kHang, kVerdict };

[[noreturn]] static void found(Finding finding, const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::vfprintf(stderr, format, list);
  std::fputc('\n', stderr);
  _exit(finding);
}

struct Args {  // as in packets.cuh: tests/unit/test_kernel_layout.py compares them
  u64 in, out, bytes, peers[8], half_bytes, epochs, abort, missing, timeout_ns, outs[8];
};

static int ranks, operations;
static u32 most_packets;
static u64 seed, timeout_ns;
constexpr u32 kEpochSlots = 512, kFirstEpoch = 0xFFFFFFF0u;  // it wraps after 16 operations
constexpr u32 kEpochWords = 2 * kEpochSlots + 3;
constexpr size_t kRoom = 64;                                 // bytes of canaries on each side of an array
constexpr u8 kFiller = 0x5C;

struct Library {
  std::string kernel, dtype;
  void (*run)(const void*);
  const u32* limits;
};
static std::vector<Library> libraries;

// The table of a call that splits arrays, as in parts.cuh: tests/unit/test_parts.py compares what ipc/parts.py makes.
struct Member {
  u64 part, whole, pitch, offset[8];
  u32 width[8], first[8];
};
struct Table {
  u32 packets[8];
  Member members[4];
};
static bool in_tiles(const Library& library) { return library.kernel.rfind("bulk_", 0) == 0; }
static bool gathers(const Library& library) { return library.kernel == "gather" || library.kernel == "bulk_gather"; }
static bool splits(const Library& library) {
  return gathers(library) || library.kernel == "scatter" || library.kernel == "bulk_scatter";
}
constexpr u32 kRoundTiles = 3, kMostStageBytes = 32 << 10;  // T of tiles.cuh; a tile is smaller than a stage
static u32 members_of(const Library& library) {
  return (u32)((library.limits[1] - sizeof(Args) - offsetof(Table, members)) / sizeof(Member));
}

struct Rank {
  std::vector<u32> epochs;
  u8 *workspace, *area;  // two halves; where bulk.cu and its like work
  u32 missing, ended;
};
static std::vector<Rank> world;
static size_t half_bytes;
static u32 abort_word;
// Since all ranks began: ranks that are done, and operations, for the hang alarm.
static std::atomic<int> finished, ended;

static void reset() {  // as IpcBackend.reset does, once every kernel has ended
  for (Rank& rank : world) {
    std::memset(rank.workspace, 0xFF, 2 * half_bytes);
    rank.epochs.assign(kEpochWords, 0);
    for (u32 j = 0; j < kEpochSlots; ++j) rank.epochs[2 * j] = kFirstEpoch;
    rank.missing = rank.ended = 0;
  }
  abort_word = 0;
}

static u64 mix(u64 x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}
struct Random {
  u64 state;
  u32 below(u32 n) { return (u32)((state = mix(state)) >> 33) % n; }
};

template <class T> T element(u64 operation, u64 rank, u64 index) {
  const u64 bits = mix(mix(seed * 1000003 + operation) ^ rank << 56 ^ index);
  T value;
  if constexpr (std::is_floating_point_v<T>) {
    // Sometimes a NaN equal to the sentinel, or one that a processor turns into that by quieting it.
    using Bits = std::conditional_t<sizeof(T) == 4, u32, u64>;
    const Bits quiet = ~(Bits)0, signalling = quiet ^ (Bits)1 << (sizeof(T) == 4 ? 22 : 51);
    value = (T)(int)(bits >> 32) / (T)3e8;
    if (bits % 24 == 0) std::memcpy(&value, &quiet, sizeof value);
    if (bits % 24 == 1) std::memcpy(&value, &signalling, sizeof value);
    if (bits % 24 == 2) value = (T)-0.0;
  } else {
    value = bits % 3 ? (T)bits : (T)-1;  // -1 is equal to the sentinel
  }
  return value;
}

template <class T> T expected(u64 operation, u64 index) {  // the sum in the order of the ranks
  if constexpr (std::is_floating_point_v<T>) {
    T sum = element<T>(operation, 0, index);
    for (int rank = 1; rank < ranks; ++rank) sum += element<T>(operation, rank, index);
    return sum;
  } else {
    u64 sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += (u64)element<T>(operation, rank, index);
    return (T)sum;
  }
}

struct Operation {
  const Library* library;
  u32 count, grid, block;
  bool in_place;
  u32 in_offset, out_offset;  // elements
  int root = -1;              // of a broadcast in two hops
};

template <class F> auto typed(const std::string& dtype, F f) {  // calls f with a zero of the type
  if (dtype == "float32") return f(float{});
  if (dtype == "float64") return f(double{});
  if (dtype == "int8") return f((signed char)0);
  if (dtype == "int32") return f(int{});
  if (dtype == "int64") return f(0ll);
  if (dtype == "uint8") return f(u8{});
  if (dtype == "uint32") return f(u32{});
  if (dtype == "uint64") return f(u64{});
  std::abort();
}

static u32 element_bytes(const std::string& dtype) {
  return typed(dtype, [](auto zero) { return (u32)sizeof zero; });
}

// The operation of this number: the same on every rank, except for alignment and in-place use.
static Operation choose(u64 number, int rank) {
  Random shared{mix(seed ^ number)}, own{mix(seed ^ number << 8 ^ (u64)rank << 40)};
  Operation op;
  op.library = &libraries[shared.below((u32)libraries.size())];
  const u32 size = element_bytes(op.library->dtype), chunks = op.library->kernel == "one_shot" ? 1 : (u32)ranks;
  op.count = 1 + shared.below((shared.below(2) ? chunks * most_packets : std::min(most_packets, 3u)) * 16 / size);
  const u32 packets = (op.count * size + 15) / 16;
  op.block = 32u << shared.below(2);
  op.grid = op.library->kernel == "one_shot" ? (packets + op.block - 1) / op.block : 1 + shared.below(2);
  op.in_place = own.below(2);
  op.in_offset = own.below(2) ? 0 : own.below(16);
  op.out_offset = op.in_place ? op.in_offset : own.below(2) ? 0 : own.below(16);
  if (op.library->kernel == "spread") {
    op.root = (int)shared.below((u32)ranks);
    op.in_place = true;
    op.out_offset = op.in_offset;
  }
  if (op.library->kernel == "direct") {  // whole packets only
    op.count = packets * 16 / size;
    op.in_offset = op.out_offset = 0;
  }
  return op;
}

static Args arguments(int rank) {
  Args args = {};
  for (int i = 0; i < ranks; ++i) args.peers[i] = (u64)world[(rank + i) % ranks].workspace;
  args.half_bytes = half_bytes;
  args.epochs = (u64)world[rank].epochs.data();
  args.abort = (u64)&abort_word;
  args.missing = (u64)&world[rank].missing;
  args.timeout_ns = timeout_ns;
  return args;
}

static u64 hash(const u8* bytes, size_t count) {
  u64 h = count;
  for (size_t i = 0; i < count; ++i) h = mix(h ^ bytes[i]);
  return h;
}

// The arrays of every operation and rank, made in advance: the direct kernel writes into the peers' arrays.
struct Arrays {
  std::vector<u8> in, out;
  u8* target;
};
static std::vector<Arrays> arrays;

template <class T> void fill(Arrays& a, u64 number, int rank, const Operation& op) {
  a.in.assign(2 * kRoom + 16 * sizeof(T) + op.count * sizeof(T), kFiller);
  a.out = a.in;
  u8* const source = a.in.data() + kRoom + op.in_offset * sizeof(T);
  for (u32 i = 0; i < op.count; ++i) {
    const T value = element<T>(number, rank, i);
    std::memcpy(source + i * sizeof(T), &value, sizeof value);
  }
  a.target = (op.in_place ? a.in : a.out).data() + kRoom + op.out_offset * sizeof(T);
}

static void make_arrays(int count) {
  arrays.resize((size_t)count * ranks);
  for (size_t i = 0; i < arrays.size(); ++i) {
    const u64 number = i / ranks;
    const int rank = (int)(i % ranks);
    const Operation op = choose(number, rank);
    if (splits(*op.library)) continue;  // they have arrays of their own
    typed(op.library->dtype, [&](auto zero) { fill<decltype(zero)>(arrays[i], number, rank, op); });
  }
}

enum Expected { kRight, kPoisoned, kEither };  // of each element

// Runs one operation on one rank and returns a hash of its result. kPoisoned: the result expected of an abandoned wait.
template <class T> u64 run(u64 number, int rank, const Operation& op, Expected wanted, u64 deadline) {
  const size_t bytes = op.count * sizeof(T);
  const auto& [in, out, target] = arrays[number * ranks + rank];
  const u8* const source = in.data() + kRoom + op.in_offset * sizeof(T);
  const std::vector<u8> before = in;

  Args args = arguments(rank);
  for (int i = 0; i < ranks; ++i) args.outs[i] = (u64)arrays[number * ranks + (rank + i) % ranks].target;
  args.timeout_ns = deadline;
  args.in = (u64)source, args.out = (u64)target, args.bytes = bytes;
  const bool spreads = op.root >= 0;
  if (spreads) args.outs[0] = (u64)op.root;
  const bool in_area = op.library->kernel == "bulk";
  const auto abandoned = [&] { return __atomic_load_n(&world[rank].epochs[2 * kEpochSlots], __ATOMIC_RELAXED) != 0; };
  if (in_area) {  // as copy.cu does
    if (!abandoned()) std::memcpy(world[rank].area, source, bytes);
    for (int i = 0; i < ranks; ++i) args.outs[i] = (u64)world[(rank + i) % ranks].area;
    args.in = args.out = (u64)world[rank].area;
  }
  sim_run(op.library->run, &args, op.grid, op.block, rank, ranks, true);
  if (in_area && abandoned()) std::memset(target, 0xFF, bytes);
  else if (in_area) std::memcpy(target, world[rank].area, bytes);
  ++ended;

  const auto where = op.library->kernel + " " + op.library->dtype;
  const std::vector<u8>& written = op.in_place ? in : out;
  for (size_t i = 0; i < written.size(); ++i) {
    const u8* at = written.data() + i;
    if ((at < target || at >= target + bytes) && *at != kFiller)
      found(kCanary, "%s, operation %llu, rank %d: wrote %lld bytes off its output", where.c_str(), number, rank,
            (long long)(at < target ? at - target : at - target - (long long)bytes + 1));
  }
  if (!op.in_place && in != before)
    found(kCanary, "%s, operation %llu, rank %d: wrote into its input", where.c_str(), number, rank);
  if (wanted == kPoisoned && !spreads) {
    for (size_t i = 0; i < bytes; ++i)
      if (target[i] != 0xFF)
        found(kValue, "%s, rank %d: byte %zu of %zu is not poisoned", where.c_str(), rank, i, bytes);
    return 0;
  }
  if (wanted == kRight && __atomic_load_n(&abort_word, __ATOMIC_RELAXED))
    found(kTimeout, "%s, operation %llu, rank %d: timed out, missing 0x%x", where.c_str(), number, rank,
          __atomic_load_n(&world[rank].missing, __ATOMIC_RELAXED));
  // A broadcast's root keeps its values. Of the others' the chunk is lost that the last rank has not sent or forwarded.
  const int away = ranks - 1, lost = op.root == away ? -1 : away - (away > op.root);
  const u32 columns = spreads ? ((u32)(bytes + 15) / 16 + ranks - 2) / (ranks - 1) : 1;
  for (u32 i = 0; i < op.count; ++i) {
    T value, right = spreads ? element<T>(number, op.root, i) : expected<T>(number, i);
    std::memcpy(&value, target + i * sizeof(T), sizeof value);
    const u8* at = target + i * sizeof(T);
    const bool may_be_poisoned = wanted != kRight && rank != op.root;
    const bool must_be_poisoned =
        may_be_poisoned && wanted == kPoisoned && (lost < 0 || i * sizeof(T) / 16 / columns == (u32)lost);
    if (may_be_poisoned && std::all_of(at, at + sizeof(T), [](u8 byte) { return byte == 0xFF; })) continue;
    if (must_be_poisoned || (std::memcmp(&value, &right, sizeof value) && !(value != value && right != right)))
      found(kValue, "%s, operation %llu, rank %d: element %u of %u is %.17g, not %.17g", where.c_str(), number, rank, i,
            op.count, (double)value, (double)right);
  }
  return hash(target, bytes);
}

// A call that splits arrays. The sizes are the same on every rank, and the places in its memory are its own.
struct Split {
  std::vector<u32> rows;
  std::vector<std::vector<u32>> widths;  // by array and rank, in elements
  std::vector<size_t> parts, wholes;     // by array, where they begin in this rank's memory
  std::vector<u8> memory;
  Table table;
};
static Split choose_split(u64 number, int rank, const Operation& op, u32 size) {
  Random shared{mix(seed ^ number ^ 0x5917)}, own{mix(seed ^ number << 8 ^ (u64)rank << 40 ^ 0x5917)};
  const bool gathered = gathers(*op.library), even = shared.below(3) == 0;
  const u32 count = 1 + shared.below(members_of(*op.library)), root = shared.below((u32)ranks * 3);
  const u32 most = shared.below(2) ? most_packets / count : 3;  // packets of a message in an array
  Split split = {};
  u64 at = kRoom;
  for (u32 m = 0; m < members_of(*op.library); ++m) {
    Member& member = split.table.members[m];
    for (int r = 0; r < ranks; ++r) member.first[r] = m < count ? split.table.packets[r] : 0xFFFFFFFF;
    if (m >= count) continue;
    const u32 rows = shared.below(2) || in_tiles(*op.library) ? 1 : 1 + shared.below(std::min(most, 6u));
    split.rows.push_back(rows);
    split.widths.emplace_back();
    u32 pitch = 0;
    for (int r = 0; r < ranks; ++r) {
      const bool none = gathered && root < (u32)ranks ? r != (int)root : shared.below(4) == 0;  // as in a broadcast
      u32 width = none ? 0 : 1 + shared.below(most / rows * 16 / size);
      if (even) width = width * size / 16 * 16 / size;
      split.widths[m].push_back(width);
      member.offset[r] = pitch * size, member.width[r] = width * size;
      split.table.packets[r] += rows * ((width * size + 15) / 16);
      pitch += width;
    }
    member.pitch = pitch * size;
    const u32 mine = rows * split.widths[m][rank] * size;
    const auto place = [&](u32 bytes) {
      const u64 begin = at + (even ? 0 : own.below(2) * own.below(16) * size);
      at = (begin + bytes + 15) / 16 * 16 + kRoom;
      return begin;
    };
    split.wholes.push_back(place(rows * pitch * size));
    split.parts.push_back(rows == 1 && op.in_place ? split.wholes[m] + member.offset[rank] : place(mine));
  }
  for (int r = 0; r < ranks; ++r) split.table.packets[r] = std::max(1u, split.table.packets[r]);
  split.memory.assign(at, kFiller);
  return split;
}

template <class T> u64 run_split(u64 number, int rank, const Operation& op, Expected wanted, u64 deadline) {
  Split split = choose_split(number, rank, op, sizeof(T));
  const bool gathered = gathers(*op.library), tiled = in_tiles(*op.library);
  // Calls f(place of an element, its rank, its index in all arrays) for this rank's parts, or for the whole arrays.
  const auto elements = [&](bool whole, auto f) {
    for (u32 m = 0; m < split.rows.size(); ++m) {
      const Member& member = split.table.members[m];
      for (u32 row = 0; row < split.rows[m]; ++row)
        for (int r = 0; r < ranks; ++r)
          for (u32 x = 0; x < split.widths[m][r]; ++x) {
            const u64 in_whole = row * member.pitch + member.offset[r] + x * sizeof(T);
            if (!whole && r != rank) continue;
            f(whole ? split.wholes[m] + in_whole : split.parts[m] + (row * split.widths[m][r] + x) * sizeof(T), r,
              (u64)m << 40 | in_whole);
          }
    }
  };
  const auto at = [&](u64 place) { return split.memory.data() + place; };
  elements(!gathered, [&](u64 place, int, u64 index) {
    const T value = element<T>(number, rank, index);
    std::memcpy(at(place), &value, sizeof value);
  });
  std::vector<u8> due = split.memory;

  struct { Args args; Table table; } call = {arguments(rank), split.table};
  const u32 longest = *std::max_element(split.table.packets, split.table.packets + ranks);
  call.args.timeout_ns = deadline;
  call.args.bytes = 16 * longest;
  for (u32 m = 0; m < split.rows.size(); ++m) {
    Member& member = call.table.members[m];
    member.part = (u64)at(split.parts[m]), member.whole = (u64)at(split.wholes[m]);
    call.args.in |= member.part | member.whole | member.pitch;
    for (int r = 0; r < ranks; ++r) call.args.in |= member.offset[r] | member.width[r];
  }
  const u32 grid = number % 2 || tiled ? op.grid : (longest + op.block - 1) / op.block;  // with tiles or without
  if (tiled) call.args.out = kRoundTiles;
  for (int i = 0; tiled && i < ranks; ++i) call.args.outs[i] = (u64)world[(rank + i) % ranks].area;
  sim_run(op.library->run, &call, grid, op.block, rank, ranks, true);
  ++ended;

  if (wanted == kRight && __atomic_load_n(&abort_word, __ATOMIC_RELAXED))
    found(kTimeout, "%s, operation %llu, rank %d: timed out, missing 0x%x", op.library->kernel.c_str(), number, rank,
          __atomic_load_n(&world[rank].missing, __ATOMIC_RELAXED));
  u64 bits = 0;
  elements(gathered, [&](u64 place, int r, u64 index) {
    T value, right = gathered ? element<T>(number, r, index) : expected<T>(number, index);
    std::memcpy(&value, at(place), sizeof value);
    std::memcpy(due.data() + place, &value, sizeof value);
    bits = gathered ? hash(at(place), sizeof value) ^ mix(bits) : 0;  // each rank's part of a reduction is another one
    const bool poisoned = std::all_of(at(place), at(place) + sizeof(T), [](u8 byte) { return byte == 0xFF; });
    // The rank that is away is the last one. A warp that waits for none of its packets gets those of the others.
    const bool must_be_poisoned = wanted == kPoisoned && (!gathered || r == ranks - 1);
    if (poisoned && wanted != kRight && !(gathered && !tiled && r == rank)) return;
    if (must_be_poisoned || (std::memcmp(&value, &right, sizeof value) && !(value != value && right != right)))
      found(kValue, "%s %s, operation %llu, rank %d: byte %llu of rank %d's is %.17g, not %.17g",
            op.library->kernel.c_str(), op.library->dtype.c_str(), number, rank, index, r, (double)value,
            must_be_poisoned ? -1.0 : (double)right);
  });
  if (due != split.memory)
    found(kCanary, "%s, operation %llu, rank %d: wrote elsewhere", op.library->kernel.c_str(), number, rank);
  return bits;
}

static u64 run(u64 number, int rank, Expected wanted = kRight, u64 deadline = timeout_ns) {
  const Operation op = choose(number, rank);
  return typed(op.library->dtype, [&](auto zero) {
    if (splits(*op.library)) return run_split<decltype(zero)>(number, rank, op, wanted, deadline);
    return run<decltype(zero)>(number, rank, op, wanted, deadline);
  });
}

// Runs f(rank) on every rank at once.
template <class F> void on_all_ranks(F f) {
  std::vector<std::thread> threads;
  finished = 0;
  ended = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([=] {
      f(rank);
      ++finished;
    });
  }
  int seen = -1;
  for (auto since = std::chrono::steady_clock::now(); finished < ranks; usleep(1000)) {
    const auto now = std::chrono::steady_clock::now();
    if (seen != ended) seen = ended, since = now;
    if (now - since > std::chrono::nanoseconds(3 * timeout_ns)) found(kHang, "hangs");
  }
  for (auto& thread : threads) thread.join();
}

static void check_rest(u32 epoch) {
  for (int rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < 2 * half_bytes; ++i)
      if (world[rank].workspace[i] != 0xFF) found(kNotAtRest, "rank %d: byte %zu of a slot is not 0xFF", rank, i);
    for (u32 j = 0; j < kEpochSlots; ++j)
      if (world[rank].epochs[2 * j] != epoch)
        found(kNotAtRest, "rank %d: epoch %u is 0x%x, not 0x%x", rank, j, world[rank].epochs[2 * j], epoch);
  }
}

static void sweep() {
  std::vector<u64> hashes((size_t)operations * ranks);
  make_arrays(operations);
  on_all_ranks([&](int rank) {
    Random random{mix(seed + rank)};
    sim_disturb(mix(seed ^ 0xD15 ^ rank) | 1);
    for (int number = 0; number < operations; ++number) {
      if (random.below(8) == 0) usleep(random.below(1500));
      hashes[(size_t)number * ranks + rank] = run(number, rank);
    }
    sim_disturb(0);
  });
  for (size_t i = 0; i < hashes.size(); ++i)
    if (hashes[i] != hashes[i / ranks * ranks])
      found(kUnequal, "operation %zu: ranks 0 and %zu have different bits", i / ranks, i % ranks);
  check_rest(kFirstEpoch + operations);
}

static void absent() {
  const int away = ranks - 1;
  u64 deadline = 30'000'000;
  for (int number = 0; number < operations; ++number) {
    const bool by_deadline = number % 2;
    make_arrays(operations);
    on_all_ranks([=](int rank) {
      if (rank != away) {
        run(number, rank, kPoisoned, by_deadline ? deadline : ~0ull);
      } else if (!by_deadline) {
        usleep(30'000);
        __atomic_store_n(&abort_word, 1, __ATOMIC_RELAXED);
      }
    });
    u32 named = 0;
    for (int rank = 0; rank < away; ++rank) named |= world[rank].missing;
    if (by_deadline && named & 1u << away && named != 1u << away && deadline < 5'000'000'000) {
      deadline *= 2;  // another rank may only be slow
      --number;
      reset();
      continue;
    }
    if (named != (by_deadline ? 1u << away : 0)) found(kVerdict, "missing are 0x%x; absent was rank %d", named, away);
    reset();
    make_arrays(operations);
    on_all_ranks([=](int rank) { run(number, rank); });
    check_rest(kFirstEpoch + 1);
    reset();
  }
}

static void late() {
  constexpr int kQueued = 4;  // operations: the third uses the same half as the first
  for (int number = 0; number + kQueued <= operations; number += kQueued) {
    make_arrays(operations);
    on_all_ranks([=](int rank) {
      while (rank == ranks - 1 && finished < ranks - 1) usleep(1000);
      for (int i = 0; i < kQueued; ++i) run(number + i, rank, rank == ranks - 1 ? kEither : kPoisoned, 60'000'000);
    });
    reset();
  }
}

static void verify() {
  std::vector<u32> verdicts(8 * (size_t)ranks, 9);
  on_all_ranks([&](int rank) {
    Args args = arguments(rank);
    args.bytes = (u64)operations;
    args.out = (u64)&verdicts[8 * (size_t)rank];
    sim_run(libraries[0].run, &args, (u32)ranks - 1, 32, rank, ranks, false);
  });
  for (int rank = 0; rank < ranks; ++rank)
    for (int peer = 0; peer < ranks; ++peer) {
      const u32 verdict = verdicts[8 * (size_t)rank + peer], right = sim_split_packets ? 2 : 1;
      if (peer != rank && verdict != right)
        found(kVerdict, "rank %d says %u of rank %d, not %u", rank, verdict, peer, right);
    }
}

int main(int count, char** words) {
  if (count < 8) return 2;
  ranks = std::atoi(words[2]);
  operations = std::atoi(words[3]);
  most_packets = (u32)std::atoi(words[4]);
  seed = std::strtoull(words[5], nullptr, 0);
  timeout_ns = (u64)(1e9 * std::atof(words[6]));
  for (int i = 7; i < count; ++i) {
    void* handle = dlopen(words[i], RTLD_NOW);
    if (!handle) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 2;
    }
    const std::string path = words[i], name = path.substr(path.rfind('/') + 1), kernel = name.substr(0, name.find('-'));
    const std::string rest = name.substr(kernel.size() + 1);
    libraries.push_back({kernel, rest.substr(0, rest.find('-')), (void (*)(const void*))dlsym(handle, kernel.c_str()),
                         (const u32*)dlsym(handle, (kernel + "_limits").c_str())});
    const Library& one = libraries.back();
    if (!splits(one) && one.limits[1] != sizeof(Args)) return 2;
    if (splits(one) && members_of(one) > sizeof(Table::members) / sizeof(Member)) return 2;
  }
  half_bytes = (size_t)ranks * 2 * 16 * (2 * most_packets + 1024);  // with bulk.cu's flags of 512 blocks
  world.resize(ranks);
  for (Rank& rank : world) {
    rank.workspace = (u8*)std::aligned_alloc(128, 2 * half_bytes);
    const size_t room = 128 * (most_packets / 8 + 8) + 4 * kRoundTiles * 2 * kMostStageBytes;  // of a rank's message
    rank.area = (u8*)std::aligned_alloc(128, ranks * room);
  }
  reset();
  const std::string mode = words[1];
  if (mode == "sweep") sweep();
  else if (mode == "absent") absent();
  else if (mode == "late") late();
  else if (mode == "verify") verify();
  else return 2;
  std::printf("ok\n");
}
