"""The kernels and the Python code agree on every layout and code that both define.

A small program, compiled by g++ from the kernels' own headers over the simulated build's stand-in for sync.cuh, prints
offsets, sizes and behaviour; the tests compare them with the Python constants.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce.calls.addresses import addresses_of
from ipcreduce.calls.faults import fault_error
from ipcreduce.device import arguments, epilogues, kernels
from ipcreduce.device.kernels import Kernel
from ipcreduce.dtypes import DTYPE_NAMES, DTYPES, OPS
from ipcreduce.errors import PeerTimeoutError
from ipcreduce.graphs.direct import launches as direct_launches
from ipcreduce.ipc import launches, lists, parts, peers, plan, workspace
from ipcreduce.page import shared_files
from ipcreduce.page.control_page import Page
from ipcreduce.page.layout import ABORT_OFFSET, head_bytes, missing_offset
from tests.tools.machine import ROOT

KERNELS = ROOT / "kernels"
STAND_IN = ROOT / "tests" / "simulated" / "include"

WORD = 8  # bytes of each word of struct Args
FIELDS = {  # of struct Args: the index of its first word in arguments.py
    "in": arguments.IN,
    "out": arguments.OUT,
    "bytes": arguments.BYTES,
    "peers": arguments.PEERS,
    "half_bytes": arguments.HALF,
    "epochs": arguments.EPOCHS,
    "abort": arguments.ABORT,
    "missing": arguments.MISSING,
    "timeout_ns": arguments.TIMEOUT,
    "outs": direct_launches.OUTS,
}
VERDICTS = {"kNoData": peers._NO_DATA, "kWhole": peers._WHOLE, "kSplit": peers._SPLIT}
MACROS = {"IPCREDUCE_DTYPE": "int32", "IPCREDUCE_OP": "sum", "IPCREDUCE_WHOLE_PACKETS": "1"}

RUNTIME = """
#include <cstdlib>
#include <runtime.h>
__thread const SimThread* sim_thread;
__thread int kRank, kRanks;
bool sim_split_packets;
void sim_sync_block() { abort(); }
void sim_sync_warp() {}
uint32_t sim_vote(bool mine) { return mine; }
uint32_t sim_shuffle_xor(uint32_t, uint32_t) { abort(); }
void* sim_shared(uint32_t, size_t) { abort(); }
void sim_relax() {}
uint64_t sim_timer() {  // each look takes a while, so that a deadline passes
  static uint64_t now = 1'000'000'000'000;
  return now += 1'000;
}
void sim_touch() {}
void sim_await_predecessor() {}
[[noreturn]] void sim_misaligned() { abort(); }
"""


def launches_of(rank: int, n: int, timeout: float = 0) -> launches.Launches:
    """The launches of a rank whose control page begins at address 0, without a GPU."""
    none: Any = SimpleNamespace(rank=rank, n=n, peers=[0] * n, half_bytes=0, area_bytes=0, address=0)
    return launches.Launches(0, none, 0, capability=(9, 0), timeout=timeout, algorithm=None)


def run_program(folder: Path, source: str, *arguments: object, **macros: str) -> list[str]:
    """Lines printed by a C++ program that includes the kernels' headers."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    (folder / "program.cpp").write_text(source)
    (folder / "runtime.cpp").write_text(RUNTIME)
    defined = [f"-D{name}={value}" for name, value in (MACROS | macros).items()]
    command = ["g++", "-std=c++17", "-fno-strict-aliasing", *defined, f"-I{STAND_IN}", f"-I{KERNELS}"]
    built = subprocess.run(
        [*command, "program.cpp", "runtime.cpp", "-o", "program"], cwd=folder, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [folder / "program", *map(str, arguments)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


# ---- struct Args
def args_of(text: str) -> list[tuple[str, int]]:
    """(field, words) of ``struct Args`` in a source file, in order; every field is a u64 or an array of them.

    What launches of lists, of expressions and of fused kernels have behind them is left out.
    """
    plain = re.sub(r"^#ifdef IPCREDUCE_\w+.*?^#endif\n", "", re.sub(r" *//.*", "", text), flags=re.M | re.S)
    found = re.search(r"^struct Args \{[^\n]*\n(.*?)^\};", plain, re.M | re.S)
    assert found, "no struct Args"
    fields = []
    for declaration in found[1].split(";"):
        if declaration.strip():
            names = re.fullmatch(r"\s*u64\s+(.*)", declaration, re.S)
            assert names, f"expected fields of type u64; found {declaration.strip()!r}"
            for name in names[1].split(","):
                field, words = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", name.strip()).groups("1")  # type: ignore[union-attr]
                fields.append((field, int(words)))
    return fields


def test_words_of_args(tmp_path: Path):
    """Offsets and sizes by the compiler, of exactly the fields that arguments.py fills in."""
    fields = args_of((KERNELS / "packets.cuh").read_text())
    assert [name for name, _ in fields] == list(FIELDS)
    prints = "".join(
        f'  std::printf("{name} %zu %zu\\n", offsetof(Args, {name}), sizeof(Args::{name}));\n' for name in FIELDS
    )
    source = (
        "#include <cstddef>\n#include <cstdio>\n#include <packets.cuh>\n"
        f'int main() {{\n{prints}  std::printf("%zu\\n", sizeof(Args));\n}}\n'
    )
    *lines, size = run_program(tmp_path, source)
    offsets = {name: int(offset) for name, offset, _ in map(str.split, lines)}
    sizes = {name: int(nbytes) for name, _, nbytes in map(str.split, lines)}
    assert offsets == {name: WORD * index for name, index in FIELDS.items()}
    assert sizes == {name: WORD * (plan.MAX_RANKS if name in ("peers", "outs") else 1) for name in FIELDS}
    assert int(size) == WORD * arguments.ARG_WORDS


# ---- the table of a list
LIST_LAYOUT = """
#include <cstddef>
#include <cstdio>
#include <packets.cuh>
int main() {
  std::printf("%zu %zu %zu %zu %zu %zu\\n", offsetof(Args, parts), offsetof(ListTable, in), offsetof(ListTable, out),
              offsetof(ListTable, first), offsetof(ListTable, bytes), sizeof(Args));
}
"""
MAX_ARGUMENT_BYTES = {lists.SHORT: 4096, lists.LONG: 32_764}  # of a kernel: until CUDA 12.1, and since


def test_words_of_a_list(tmp_path: Path, subtests: pytest.Subtests):
    """As many parts as fit into the arguments of a kernel, each where ipc/lists.py puts it."""
    one: Any = SimpleNamespace(offset=0, nbytes=32)
    for places, most in MAX_ARGUMENT_BYTES.items():
        with subtests.test(places=places):
            (line,) = run_program(tmp_path, LIST_LAYOUT, IPCREDUCE_PARTS=str(places))
            table, sources, targets, first, nbytes, size = map(int, line.split())
            assert table
            assert (sources, targets, first, nbytes) == (0, *(WORD * places * half // 2 for half in (2, 4, 5)))
            assert most - 4 * WORD <= size <= most, "a kernel takes no more, and there is hardly room for more"
            offsets = np.array([0, 0], np.uint64)
            plan: Any = lists.ListPlan(one, places, np.array([0, 2]), offsets, np.array([0, 1]), np.array([16, 7]))
            words = np.concatenate([np.zeros(arguments.ARG_WORDS, np.uint64), lists.table(plan)])
            assert words.nbytes == size
            launch: Any = SimpleNamespace(args=words)
            lists.step(plan, launch, 3).set((addresses_of([160, 0, 3]), addresses_of([32, 0, 4])))
            raw = words.tobytes()
            assert np.frombuffer(raw, np.uint64, 3, table + sources).tolist() == [160, 3, 0]
            assert np.frombuffer(raw, np.uint64, 3, table + targets).tolist() == [32, 4, 0]
            assert np.frombuffer(raw, np.uint32, 3, table + first).tolist() == [0, 1, 0xFFFFFFFF]
            assert np.frombuffer(raw, np.uint32, 3, table + nbytes).tolist() == [16, 7, 0]
            assert words[arguments.IN] % 16, "a part of 7 bytes: not all packets are whole"
            assert words[arguments.OUT] == 32 | 4


FIND = """
#include <cstdio>
#include <cstdlib>
#include <packets.cuh>
static Args args;
int main(int, char** words) {  // a file with the table, the packets
  std::FILE* file = std::fopen(words[1], "rb");
  if (!file || std::fread(&args.parts, sizeof args.parts, 1, file) != 1) return 1;
  for (int index = 0; index < std::atoi(words[2]); ++index) {
    const auto in = array_with(input_of<false>(args), index), out = array_with(output_of<false>(args), index);
    std::printf("%u %llu %llu %u\\n", find_part(args.parts, index), (unsigned long long)in.base + 16 * index,
                (unsigned long long)out.base + 16 * index, in.bytes - 16 * index);
  }
}
"""


def test_a_thread_finds_its_array(tmp_path: Path, subtests: pytest.Subtests):
    """The kernels' search in the table, for each packet of lists of 1 array, of as many as fit, and between."""
    rng = np.random.default_rng(7)
    for places in MAX_ARGUMENT_BYTES:
        for count in sorted({1, 2, 3, 128, 129, places - 1, places}):
            with subtests.test(places=places, count=count):
                nbytes = rng.integers(1, 70, count)
                packets = -(-nbytes // 16)
                first = np.cumsum(packets) - packets
                one = SimpleNamespace(offset=0, nbytes=16 * int(packets.sum()))
                plan: Any = SimpleNamespace(
                    members=np.arange(count), parts=places, first=first, nbytes=nbytes, step=one
                )
                words = lists.table(plan)
                words[:count], words[places : places + count] = 1 << 20, 1 << 30
                words[:count] += np.arange(count, dtype=np.uint64) * 4096
                (tmp_path / "table").write_bytes(words.tobytes())
                found = run_program(tmp_path, FIND, tmp_path / "table", int(packets.sum()), IPCREDUCE_PARTS=str(places))
                expected = [
                    f"{part} {(1 << 20) + 4096 * part + 16 * at} {(1 << 30) + 16 * at} {nbytes[part] - 16 * at}"
                    for part in range(count)
                    for at in range(packets[part])
                ]
                assert found == expected


# ---- the arguments of a norm
NORM_FIELDS = {  # of struct NormArgs
    "residual": arguments._RESIDUAL,
    "residual_out": arguments._RESIDUAL_OUT,
    "weight": arguments._WEIGHT,
    "quantised": arguments._QUANTISED,
    "scales": arguments._SCALES,
    "rows": arguments._ROWS,
    "hidden": arguments._HIDDEN,
    "scale_strides": arguments._STRIDES,
    "numbers": arguments._NUMBERS,
    "reciprocal_of_hidden": arguments._RECIPROCAL,
}


def test_words_of_a_norm(tmp_path: Path):
    """Behind those of every other kernel, and in rmsnorm.cu behind two addresses."""
    prints = "".join(
        f'  std::printf("{name} %zu\\n", offsetof(Args, norm) + offsetof(NormArgs, {name}));\n' for name in NORM_FIELDS
    )
    source = (
        "#include <cstddef>\n#include <cstdio>\n#include HEADER\n"
        f'int main() {{\n{prints}  std::printf("%zu\\n", sizeof(Args));\n}}\n'
    )
    pair = arguments.PAIR_WORDS
    for header, before in (("<packets.cuh>", arguments.ARG_WORDS), ("<rmsnorm.cu>", pair)):
        given = {"IPCREDUCE_DTYPE": "float16", "IPCREDUCE_SCALE": "0", "IPCREDUCE_CLUSTER": "1", "IPCREDUCE_DEPTH": "1"}
        *lines, size = run_program(tmp_path, source, HEADER=header, **given)
        offsets = {name: int(offset) for name, offset in map(str.split, lines)}
        assert offsets == {name: WORD * (before + index) for name, index in NORM_FIELDS.items()}
        assert int(size) == WORD * (before + arguments.NORM_WORDS)


def test_codes_of_scales():
    text = (KERNELS / "rmsnorm.cuh").read_text()
    found = re.search(r"constexpr int kNoScale = 0, kGivenScale = 1, kTokenScale = 2, kGroupScale = 3;", text)
    assert found
    assert epilogues.SCALES == ("", "given", "token", "group")


def test_args_of_the_simulated_tests():
    """kernels.cpp launches kernels with a struct of its own."""
    kernels, simulated = (
        args_of(path.read_text()) for path in (KERNELS / "packets.cuh", ROOT / "tests" / "simulated" / "kernels.cpp")
    )
    assert simulated == kernels


# ---- the control page
CHECK_WAIT = """
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <packets.cuh>
static u32 epochs[2 * kEpochSlots + 3];
int main(int count, char** words) {  // file, its size, absent rank, the words of Args with offsets in the page
  static const SimThread thread = {0, 1, 0, 1};
  sim_thread = &thread;
  Args args;
  if (count != 4 + (int)(sizeof args / 8)) return 1;
  for (int i = 4; i < count; ++i) ((u64*)&args)[i - 4] = std::strtoull(words[i], nullptr, 0);
  void* page = mmap(nullptr, std::atoi(words[2]), PROT_READ | PROT_WRITE, MAP_SHARED, open(words[1], O_RDWR), 0);
  if (page == MAP_FAILED) return 1;
  args.epochs = (u64)epochs;
  args.abort += (u64)page;
  args.missing += (u64)page;
  const u64 long_ago = 1;
  return check_wait(long_ago, 1u << std::atoi(words[3]), args) ? 1 : 0;
}
"""


@pytest.mark.parametrize(("rank", "absent"), [(0, 1), (plan.MAX_RANKS - 1, 0), (3, plan.MAX_RANKS - 1)])
def test_words_of_the_control_page(tmp_path: Path, rank: int, absent: int):
    """An abandoned wait, by check_wait itself with the arguments of a launch, is what the host reads on the page."""
    n = plan.MAX_RANKS
    page = Page.create(rank, n)
    try:
        assert not page.aborted
        assert not page.ended_without_data
        words = launches_of(rank, n)._arguments(0)
        run_program(tmp_path, CHECK_WAIT, page.path, page.nbytes, absent, *words)
        assert page.aborted
        assert page.ended_without_data
        error = fault_error(page, 0, 1.0)
        assert isinstance(error, PeerTimeoutError)
        assert re.findall(r"rank (\d+) did not call within", str(error)) == [str(absent)]
        peers = [Page.open(page.path, other, n) for other in range(n) if other != rank]
        assert not any(peer.ended_without_data for peer in peers), "a kernel has written the words of another rank"
        page.clear()
        assert not np.frombuffer(Path(page.path).read_bytes()[: page.head_bytes], np.uint8).any(), "not cleared"
    finally:
        shared_files.remove(page.path)


CHECK_GRACE = """
#include <cstdio>
#include <packets.cuh>
static u32 epochs[2 * kEpochSlots + 3], words[3];
static bool goes_on(int microseconds) {  // a wait, where the abort word was seen so long ago
  Args args = {};
  args.epochs = (u64)epochs;
  args.abort = (u64)words;
  args.missing = (u64)(words + 1);
  args.timeout_ns = 1ull << 62;
  epochs[2 * kEpochSlots] = 0;  // no wait was abandoned
  epochs[2 * kEpochSlots + 2] = ((u32)(globaltimer_ns() >> 10) - microseconds) | 1;
  return check_wait(0, 2, args);
}
int main() {
  static const SimThread thread = {0, 1, 0, 1};
  sim_thread = &thread;
  const int grace = 100'000;  // as in docs/architecture.md
  std::printf("%d %d %d\\n", goes_on(-10'000'000), goes_on(grace - 1'000), goes_on(grace + 1'000));
}
"""


def test_waits_go_on_for_a_while_after_an_abort(tmp_path: Path):
    """Where another thread's clock, ahead of ours, has seen it, too."""
    assert run_program(tmp_path, CHECK_GRACE) == ["1 1 0"]


CHECK_TIMEOUT = """
#include <cstdio>
#include <cstdlib>
#include <packets.cuh>
static u32 epochs[2 * kEpochSlots + 3], words[3];
int main(int count, char** arguments) {  // timeout_ns, and how long ago each of some waits began
  static const SimThread thread = {0, 1, 0, 1};
  sim_thread = &thread;
  Args args = {};
  args.epochs = (u64)epochs;
  args.abort = (u64)words;
  args.missing = (u64)(words + 1);
  args.timeout_ns = std::strtoull(arguments[1], nullptr, 10);
  for (int i = 2; i < count; ++i) {
    const u64 started = globaltimer_ns() - std::strtoull(arguments[i], nullptr, 10);
    std::printf("%d\\n", check_wait(started, 2, args) == started);
  }
}
"""


def test_a_wait_goes_on_until_the_timeout(tmp_path: Path):
    """The kernel's deadline is the communicator's timeout, of which the host makes nanoseconds."""
    nanoseconds = launches_of(0, 2, timeout=2.5)._arguments(0)[arguments.TIMEOUT]
    assert run_program(tmp_path, CHECK_TIMEOUT, nanoseconds, 2_499_000_000, 2_501_000_000) == ["1", "0"]


CHECK_READS = """
#include <atomic>
#include <cstdio>
#include <pthread.h>
#include <thread>
#include <vector>
#include <sync.cuh>
constexpr int kThreads = 8;
static u32 words[3];
static u64 read_at;
static std::atomic<int> reads;
static pthread_barrier_t all_have_loaded;
static u32 load_gpu(u64 at) {
  const u32 found = load_u32_relaxed_gpu(at);
  if (at == read_at) pthread_barrier_wait(&all_have_loaded);
  return found;
}
static u32 load_sys(u64 at) {
  reads += at == (u64)words;
  return load_u32_relaxed_sys(at);
}
#define load_u32_relaxed_gpu load_gpu
#define load_u32_relaxed_sys load_sys
#include <packets.cuh>
static u32 epochs[2 * kEpochSlots + 3];
int main() {
  Args args = {};
  args.epochs = (u64)epochs;
  args.abort = (u64)words;
  args.missing = (u64)(words + 1);
  args.timeout_ns = 1ull << 62;
  read_at = (u64)(epochs + 2 * kEpochSlots + 1);
  pthread_barrier_init(&all_have_loaded, nullptr, kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      static const SimThread thread = {0, 1, 0, 1};
      sim_thread = &thread;
      check_wait(0, 2, args);
    });
  for (std::thread& thread : threads) thread.join();
  std::printf("%d\\n", (int)reads);
}
"""


def test_one_of_many_waits_reads_host_memory(tmp_path: Path):
    """All have loaded the time of the last read before any of them stores a new one."""
    assert run_program(tmp_path, CHECK_READS) == ["1"]


def test_each_rank_has_words_of_its_own():
    words = [missing_offset(rank) + 4 * word for rank in range(plan.MAX_RANKS) for word in (0, 1)]
    assert len({ABORT_OFFSET, *words}) == 1 + len(words)
    assert max(words) + 4 <= head_bytes(plan.MAX_RANKS), "only that part is registered with the GPU"


def test_a_slot_at_rest():
    """The host fills slots with the byte that the sentinel consists of."""
    found = re.search(r"\bkSentinel = 0x([0-9A-F]{8})u?;", (KERNELS / "packets.cuh").read_text())
    assert found
    assert bytes.fromhex(found[1]) == bytes([workspace.EMPTY]) * 4


# ---- codes and macros
def test_verdicts_of_the_start_up_check():
    text = (KERNELS / "verify.cu").read_text()
    found = {name: int(value) for name, value in re.findall(r"\b(k\w+) = (\d+)[,;]", text)}
    assert len({*found.values()}) == len(found) == 4
    assert {name: found.get(name) for name in VERDICTS} == VERDICTS


def test_macros_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch):
    """Each macro that launches.py passes is used in the kernels, and no other one is."""
    used: set[str] = set()
    for path in KERNELS.glob("*.cu*"):
        used |= {*re.findall(r"\bIPCREDUCE_[A-Z_]+", re.sub(r"//.*", "", path.read_text()))}
    passed: dict[str, str] = {}
    monkeypatch.setattr(
        kernels.compiler, "compile_kernel", lambda name, macros, capability, expression: passed.update(macros)
    )
    made = launches_of(3, 4).kernels
    made._compile(Kernel("two_shot", "float16", "avg", 2))
    of_norms = {"IPCREDUCE_SCALE", "IPCREDUCE_CLUSTER"}
    of_some = {f"IPCREDUCE_{name}" for name in ("PARTS", "MEMBERS", "MAP", "OPERANDS")}
    assert {*passed} == used - of_some - of_norms
    assert passed == {
        "IPCREDUCE_RANKS": "4",
        "IPCREDUCE_RANK": "3",
        "IPCREDUCE_DTYPE": "float16",
        "IPCREDUCE_OP": "avg",
        "IPCREDUCE_DEPTH": "2",
        "IPCREDUCE_WHOLE_PACKETS": "1",
    }
    one_array = dict(passed)
    made._compile(Kernel("two_shot", "float16", "avg", 2, lists.SHORT))
    assert passed == one_array | {"IPCREDUCE_PARTS": str(lists.SHORT)}
    passed.clear()
    made._compile(Kernel("gather", "float16", "avg", 2, members=parts.SHORT))
    assert passed == one_array | {"IPCREDUCE_MEMBERS": str(parts.SHORT)}
    passed.clear()
    made._compile(Kernel("fused_two_shot", "float16", depth=2, scale=2, cluster=4))
    assert passed == one_array | {"IPCREDUCE_OP": "sum", "IPCREDUCE_SCALE": "2", "IPCREDUCE_CLUSTER": "4"}
    made._compile(Kernel("rmsnorm", "float16", depth=1, scale=0, alone=True))
    assert {*passed} == {*one_array} | of_norms
    assert (passed["IPCREDUCE_RANKS"], passed["IPCREDUCE_RANK"]) == ("1", "0")


def structs(text: str, namespace: str) -> set[str]:
    """Lower-case structs in a namespace of reduce.cuh: those that macros name."""
    found = re.search(rf"^namespace {namespace} \{{$(.*?)^\}}  // namespace {namespace}$", text, re.M | re.S)
    assert found
    return {*re.findall(r"^struct ([a-z]\w*) ", found[1], re.M)}


def test_dtypes_and_ops_are_those_of_the_kernels():
    text = (KERNELS / "reduce.cuh").read_text()
    assert structs(text, "dtype") == {*DTYPE_NAMES}
    assert structs(text, "op") == {*OPS}


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_sizes_and_kinds_of_dtypes(tmp_path: Path, name: str):
    """The kernels' element has the size and the kind of NumPy's."""
    source = (
        "#include <cstdio>\n#include <packets.cuh>\n"
        'int main() { std::printf("%d %d %d\\n", kElementBytes, kFloat, (Acc)-1 < (Acc)0); }\n'
    )
    (line,) = run_program(tmp_path, source, IPCREDUCE_DTYPE=name)
    dtype = next(dtype for dtype, other in DTYPES.items() if other == name)
    integer = name.startswith(("int", "uint"))
    assert line == f"{dtype.itemsize} {int(not integer)} {int(not name.startswith('uint'))}"
