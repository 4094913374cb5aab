"""Compilation of every kernel for every architecture, without a GPU, and the compiler's cache on disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ipcreduce.cuda import compiler
from ipcreduce.dtypes import DTYPE_NAMES, OPS
from ipcreduce.errors import IpcReduceError, UnsupportedError
from tests.tools import machine, sass
from tests.tools.sass import macros

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

EVERY_KERNEL = sorted(path.stem for path in (machine.ROOT / "kernels").glob("*.cu"))
KERNELS = [kernel for kernel in EVERY_KERNEL if kernel not in sass.NORMS]
ARCHITECTURES = [(8, 0), (9, 0), (10, 0), (12, 0)]
OF_CUDA_12 = pytest.importorskip("cuda.bindings").__version__.startswith("12.")
Job = tuple[str, dict[str, str], tuple[int, int]]  # a kernel, its macros, and the compute capability


def forget() -> None:
    """Clear the caches of the compiler module."""
    for cached in (compiler.kernel_directory, compiler._headers_digest, compiler._cache):
        cached.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache directory for all tests of this file, initially empty."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPCREDUCE_CACHE_DIR", str(path))
        forget()
        yield path
    forget()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels that the compiler uses in place of the real ones."""
    path = tmp_path / "kernels"
    shutil.copytree(machine.ROOT / "kernels", path)
    forget()
    monkeypatch.setattr(compiler, "kernel_directory", lambda: path)
    yield path
    compiler._headers_digest.cache_clear()


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "fresh"
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", str(path))
    compiler._cache.cache_clear()
    yield path
    compiler._cache.cache_clear()


# ---- kernels
@pytest.mark.parametrize("oldest", [True, False], ids=["sm_80", "newer"])
def test_every_kernel_compiles(oldest: bool):
    """Every fourth dtype with each kernel, for the newer architectures every eighth; all else takes turns.

    NVRTC of CUDA 12, in ``make test-cuda12``, takes those between. An instruction that an architecture lacks is one
    that the oldest lacks. ``make sass`` compiles all for each.
    """
    jobs = []
    for number, kernel in enumerate(KERNELS):
        for index, dtype in enumerate(DTYPE_NAMES if kernel != "verify" else ["int32"]):
            if kernel != "verify" and (number + index + 2 * OF_CUDA_12) % (4 if oldest else 8):
                continue
            capability = ARCHITECTURES[0] if oldest else ARCHITECTURES[1 + (number + index) // 4 % 3]
            turn = ARCHITECTURES.index(capability)
            n = 1 + (index + turn) % 8
            op = OPS[(index + turn) % len(OPS)] if kernel != "verify" else "sum"
            depth = (1, 2, 4)[index % 3] if n <= 4 else 1  # NVRTC takes up to 9 s for the product of both
            members = sass.members_of(kernel, index)
            given = macros(dtype, op, n=max(2, n), rank=n // 2, whole=index % 2, depth=depth, members=members)
            jobs.append((kernel, given, capability))
    cubins = check_compiled(jobs)
    if oldest:
        check_packets(jobs[::3], cubins[::3])


def test_every_kernel_of_norms_compiles():
    """Each dtype with each of them, for the oldest architecture; for the newer ones every other one, with clusters."""
    jobs = []
    for turn, capability in enumerate(ARCHITECTURES):
        every = list(sass.norm_cases(turn, capability))
        jobs += [(kernel, given, capability) for kernel, given in (every[turn % 2 :: 2] if turn else every)]
    assert {given["IPCREDUCE_CLUSTER"] for _, given, _ in jobs} == {"1", "2", "4", "8"}
    cubins = check_compiled(jobs)
    of_the_oldest = slice(0, sum(capability == ARCHITECTURES[0] for *_, capability in jobs), 3)
    assert {kernel for kernel, *_ in jobs[of_the_oldest]} == {*sass.NORMS}
    check_packets(jobs[of_the_oldest], cubins[of_the_oldest])


def check_compiled(jobs: list[Job]) -> list[bytes]:
    """Each kernel is in its cubin, for its architecture; the cubins."""
    cubins = compiled(jobs)
    for (kernel, _, capability), cubin in zip(jobs, cubins, strict=True):
        assert cubin.startswith(b"\x7fELF")
        assert f".text.{kernel}\0".encode() in cubin, "no such kernel in the binary"
        assert architecture_of(cubin) == 10 * capability[0] + capability[1]
    return cubins


def check_packets(jobs: list[Job], cubins: list[bytes]) -> None:
    """A packet is one access, as far as there is a disassembler to see it."""
    if sass.nvdisasm() is None and not os.environ.get("CI"):
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda job, cubin: sass.problems(*job[:2], cubin), jobs, cubins)
        assert not [problem for problems in found for problem in problems]


def compiled(jobs: list[Job]) -> list[bytes]:
    """The cubins of all jobs, compiled on all cores: NVRTC releases the GIL."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: compiler.compile_kernel(*job), jobs))


def architecture_of(cubin: bytes) -> int:
    """The SM version in e_flags of the ELF header: in its low byte, or in the second since CUDA 13's format."""
    flags = int.from_bytes(cubin[48:52], "little")
    return flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF


def test_each_kernel_is_in_one_of_these_lists():
    assert {*EVERY_KERNEL} == {*KERNELS, *sass.NORMS}


def test_every_pair_of_dtype_and_op_compiles():
    """A template may fail to compile for a single pair. Each of the two generations of NVRTC takes every other one."""
    pairs = [(dtype, op) for turn, dtype in enumerate(DTYPE_NAMES) for op in OPS[(turn + OF_CUDA_12) % 2 :: 2]]
    compiled([("one_shot", macros(dtype, op), (9, 0)) for dtype, op in pairs])


def test_programmatic_launch_only_where_there_is_such_a_thing(sources: Path):
    """sm_80 has no griddepcontrol: kernels compile for it because the header leaves that out."""
    header = sources / "sync.cuh"
    header.write_text(header.read_text().replace("#if __CUDA_ARCH__ >= 900", "#if 1"))
    compiler.compile_kernel("one_shot", macros(), (9, 0))
    with pytest.raises(IpcReduceError, match="griddepcontrol"):
        compiler.compile_kernel("one_shot", macros(), (8, 0))


def test_no_headers_but_ours():
    """NVRTC from a wheel comes without CUDA's headers."""
    for path in (machine.ROOT / "kernels").glob("*.cu*"):
        for header in re.findall(r"^\s*#\s*include\s*(.*)$", path.read_text(), re.M):
            assert (machine.ROOT / "kernels" / header.strip("<>")).is_file(), f"{path.name} includes {header}"
            assert header.startswith("<"), "with quotes the stand-in for sync.cuh would not be found"


# ---- packets
needs_nvdisasm = pytest.mark.skipif(
    sass.nvdisasm() is None and not os.environ.get("CI"), reason="nvidia-cuda-nvdisasm is not installed"
)
EXCHANGES = [
    ("one_shot", macros("float32")),
    ("one_shot", macros("int8", whole=0)),
    ("two_shot", macros("bfloat16", n=3)),
    ("two_shot", macros("int32", depth=2)),
    ("direct", macros("float16", n=3)),
    ("direct", macros("uint64")),
    ("bulk", macros("bfloat16", n=3)),
    ("bulk", macros("int8")),
    ("bulk_gather", macros("uint8", n=3, members=1)),
    ("spread", macros("uint8", n=3)),
    ("spread", macros("uint64", n=4, rank=3, whole=0)),
    ("bulk_scatter", macros("bfloat16", members=1)),
    ("copy", macros("int8", n=1)),
    ("verify", macros("int32")),
    ("limit", macros("int32", n=4)),
    ("fused_one_shot", macros("bfloat16", n=3, scale=2)),
    ("fused_two_shot", macros("float16", whole=0, scale=3)),
    ("rmsnorm", macros("float32", n=1, depth=2, scale=1)),
    ("fused_one_shot", macros("float16", n=4, depth=2, scale=3, cluster=8)),
    ("fused_two_shot", macros("bfloat16", n=4, scale=0, cluster=2)),
]


@needs_nvdisasm
def test_a_packet_is_one_access():
    """Checked in the machine code: PTX does not split 128-bit accesses, and a compiler that did would be wrong.

    Here it is that for the newest architecture, and above for the oldest; ``make sass`` has all.
    """
    jobs = [(kernel, given, ARCHITECTURES[-1]) for kernel, given in EXCHANGES]
    check_packets(jobs, compiled(jobs))


@needs_nvdisasm
@pytest.mark.parametrize(("kernel", "scale", "cluster"), [("fused_one_shot", 2, 8), ("fused_two_shot", 0, 2)])
def test_what_would_slow_fused_kernels_down(kernel: str, scale: int, cluster: int):
    """Each has happened: a fence before the kernel before is waited for, elements rounded one by one, L1 emptied."""
    [cubin] = compiled([(kernel, macros("bfloat16", scale=scale, cluster=cluster), (9, 0))])
    begin, wait, rest = sass.disassembly(cubin).partition("ACQBULK")
    assert wait
    assert "UCGABAR_ARV" in begin
    assert "MEMBAR" not in begin
    assert not re.search(r"\bF2F\.", rest)
    meeting, poll, behind = rest.partition("LDG.E.128.STRONG.SYS")
    assert poll
    assert "UCGABAR_WAIT" in meeting
    assert "CCTL.IVALL" not in behind


def test_every_kernel_and_dtype_is_among_those_of_make_sass():
    """It checks each architecture of NVRTC's; here are the four of which others are variants."""
    for turn in (0, 5):
        cases = [
            (kernel, given["IPCREDUCE_DTYPE"], given["IPCREDUCE_WHOLE_PACKETS"]) for kernel, given in sass.cases(turn)
        ]
        assert {kernel for kernel, _, _ in cases} == {*KERNELS}
        norms = [(kernel, given["IPCREDUCE_DTYPE"]) for kernel, given in sass.norm_cases(turn, (9, 0))]
        assert {*norms} == {(kernel, dtype) for kernel in sass.NORMS for dtype in sass.NORMS[kernel]}
        for kernel in sass.KERNELS:
            assert {case[1:] for case in cases if case[0] == kernel} == {(d, w) for d in DTYPE_NAMES for w in "01"}
    assert {*ARCHITECTURES} <= {*sass.architectures()}


@needs_nvdisasm
def test_the_table_of_make_sass(sources: Path):
    good = [("verify", macros("int32"))]
    row = sass.check((7, 5), good)
    assert (row["kernels"], row["left out"]) == (0, "ipcreduce needs compute capability 8.0")
    row = sass.check((9, 0), good)
    assert (row["arch"], row["kernels"], row["problems"]) == ("sm_90", 1, [])
    (sources / "verify.cu").write_text("int broken = nonsense;")
    compiler._headers_digest.cache_clear()
    [problem] = sass.check((9, 0), good)["problems"]
    assert problem.startswith("verify: verify.cu does not compile")


LOAD, STORE = "ld.relaxed.sys.global.b128 t, [%4]; mov.b128 {low, high}, t;", "st.relaxed.sys.global.b128 [%0], t;"


@needs_nvdisasm
@pytest.mark.parametrize(
    ("packet", "broken", "problem"),
    [
        (LOAD, "ld.relaxed.sys.global.b64 low, [%4]; ld.relaxed.sys.global.b64 high, [%4+8];", r"loads of \{.*64: "),
        (STORE, "st.relaxed.sys.global.b64 [%0], %1; @p st.relaxed.sys.global.b64 [%0+8], %2;", r"stores of \{.*64: "),
        ("mov.b64 {%2, %3}, high;", "mov.b64 {%2, %3}, high; ld.relaxed.sys.global.u32 %3, [%4+12];", r"loads .*32: 4"),
        (LOAD, LOAD.replace(".sys", ".gpu"), r"loads of \{32: 2\}"),
    ],
    ids=["two loads", "two stores", "a second load of the sentinel word", "narrower scope"],
)
def test_a_packet_in_pieces_is_noticed(sources: Path, packet: str, broken: str, problem: str):
    header = sources / "sync.cuh"
    text = header.read_text()
    header.write_text(one_line(text).replace(packet, broken))
    assert header.read_text() != one_line(text)
    cubin = compiler.compile_kernel("one_shot", macros(), (9, 0))
    assert re.search(problem, " ".join(sass.problems("one_shot", macros(), cubin)))


def one_line(source: str) -> str:
    """The source with string literals that continue in the next line joined."""
    return re.sub(r'"\s*\n\s*"', "", source)


# ---- errors
def test_an_error_in_a_kernel_shows_file_and_line(sources: Path):
    text = (sources / "one_shot.cu").read_text()
    line = text.count("\n") + 1
    (sources / "one_shot.cu").write_text(text + "int broken = nonsense;\n")
    with pytest.raises(IpcReduceError, match=rf"one_shot\.cu\({line}\).*nonsense") as caught:
        compiler.compile_kernel("one_shot", macros(), (9, 0))
    assert str(caught.value).startswith("one_shot.cu does not compile for sm_90:\n")
    assert not isinstance(caught.value, UnsupportedError)


def test_an_error_in_a_header_shows_file_and_line(sources: Path):
    text = (sources / "vec.cuh").read_text()
    (sources / "vec.cuh").write_text(text + "int broken = nonsense;\n")
    with pytest.raises(IpcReduceError, match=rf"vec\.cuh\({text.count(chr(10)) + 1}\).*nonsense"):
        compiler.compile_kernel("one_shot", macros(), (9, 0))


def test_an_unknown_dtype_does_not_compile():
    with pytest.raises(IpcReduceError, match=r"reduce\.cuh\(\d+\)"):
        compiler.compile_kernel("one_shot", macros("float7"), (9, 0))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[cuda13\]'"):
        compiler.compile_kernel("one_shot", macros(), (9, 0))


FROM_SEVERAL_THREADS = """
import sys
from ipcreduce.cuda import compiler
from ipcreduce.device import background
sys.setswitchinterval(1e-5)
jobs = [("verify", {0}), ("limit", {0})] * 2
print(len(background.each(lambda job: compiler.compile_kernel(*job, (9, 0)), jobs, 4)))
"""


def test_several_threads_import_the_compiler(fresh_cache: Path):
    """As a first call does that needs several kernels. Without a lock every third process had no compiler then."""
    for _ in range(5):
        program = FROM_SEVERAL_THREADS.format(macros("int32"))
        run = subprocess.run([sys.executable, "-c", program], env=machine.environment(), capture_output=True, text=True)
        assert run.stdout == "4\n", run.stderr


# ---- the cache
def test_the_second_time_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path):
    first = compiler.compile_kernel("two_shot", macros("int8", "avg", n=4), (9, 0))
    compiler._cache.cache_clear()
    monkeypatch.setattr("cuda.core.Program", None)
    second = compiler.compile_kernel("two_shot", macros("int8", "avg", n=4), (9, 0))
    assert second == first
    assert len(list(fresh_cache.rglob("*"))) > 0


def test_another_process_finds_it(fresh_cache: Path):
    """With NVRTC out of reach, only the cache can have the kernel."""
    cubin = compiler.compile_kernel("one_shot", macros("uint8", "max"), (8, 0))
    program = (
        "import sys, cuda.core; cuda.core.Program = None\n"
        "from ipcreduce.cuda import compiler\n"
        f"sys.stdout.buffer.write(compiler.compile_kernel('one_shot', {macros('uint8', 'max')}, (8, 0)))"
    )
    run = subprocess.run([sys.executable, "-c", program], env=machine.environment(), capture_output=True)
    assert run.stdout == cubin, run.stderr.decode()


@pytest.mark.parametrize("change", [{"n": 3}, {"rank": 1}, {"dtype": "float16"}, {"op": "avg"}, {"whole": 0}], ids=str)
def test_what_is_compiled_in_is_part_of_the_key(change: dict[str, Any]):
    other = compiler.compile_kernel("one_shot", macros(**change), (9, 0))
    assert compiler.compile_kernel("one_shot", macros(), (9, 0)) != other


def test_a_changed_header_is_compiled_anew(sources: Path):
    before = compiler.compile_kernel("one_shot", macros(), (9, 0))
    header = sources / "packets.cuh"
    text = header.read_text()
    changed = text.replace("kMicrosecondsBetweenAbortReads = 16", "kMicrosecondsBetweenAbortReads = 8")
    assert changed != text
    header.write_text(changed)
    compiler._headers_digest.cache_clear()  # cached for the life of the process
    assert compiler.compile_kernel("one_shot", macros(), (9, 0)) != before
    header.write_text(text)
    compiler._headers_digest.cache_clear()
    assert compiler.compile_kernel("one_shot", macros(), (9, 0)) == before


def test_a_changed_kernel_is_compiled_anew(sources: Path):
    before = compiler.compile_kernel("verify", macros(), (9, 0))
    kernel = sources / "verify.cu"
    kernel.write_text(kernel.read_text().replace("kWrong = 3", "kWrong = 5"))
    assert compiler.compile_kernel("verify", macros(), (9, 0)) != before


def test_the_cache_is_private(fresh_cache: Path):
    before = os.umask(0)
    try:
        compiler.compile_kernel("verify", macros(), (9, 0))
    finally:
        os.umask(before)
    assert stat.S_IMODE(fresh_cache.stat().st_mode) == 0o700
    entries = [path for path in fresh_cache.rglob("*") if path.is_file()]
    assert entries
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in entries)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
def test_a_cache_that_others_may_write_is_refused(fresh_cache: Path, mode: int):
    fresh_cache.mkdir()
    fresh_cache.chmod(mode)
    with pytest.raises(
        UnsupportedError, match=rf"its owner is \d+ and its mode {mode:04o}, .*\. Run chmod 700"
    ) as caught:
        compiler.cache_directory()
    assert str(fresh_cache) in str(caught.value)
    assert "IPCREDUCE_CACHE_DIR" in str(caught.value)
    works_without(r"cannot be used: .*Run chmod 700")
    assert not any(fresh_cache.iterdir())


@pytest.mark.parametrize("mode", [0o1777, 0o2770, 0o3777])
def test_a_directory_that_others_share_on_purpose_stays_as_it_is(fresh_cache: Path, mode: int):
    """By chmod 700 root would lock everybody out of /tmp."""
    fresh_cache.mkdir()
    fresh_cache.chmod(mode)
    with pytest.raises(UnsupportedError, match=rf"mode {mode:04o}, .*\. Set IPCREDUCE_CACHE_DIR to another") as caught:
        compiler.cache_directory()
    assert "chmod" not in str(caught.value)
    works_without(rf"cannot be used: .*mode {mode:04o}, .*\. Set IPCREDUCE_CACHE_DIR")
    assert not any(fresh_cache.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user_is_refused(fresh_cache: Path):
    fresh_cache.mkdir(mode=0o700)
    os.chown(fresh_cache, 12345, -1)
    words = r"its owner is 12345 and its mode 0700, and this process is of user 0\. Set IPCREDUCE_CACHE_DIR"
    with pytest.raises(UnsupportedError, match=words):
        compiler.cache_directory()
    works_without(words)


# ---- a cache that is damaged, or of no use: it costs time, and never a call
def works_without(words: str) -> None:
    """Kernels compile, and that they are not kept is said once."""
    compiler._cache.cache_clear()
    with pytest.warns(RuntimeWarning, match=words) as caught:
        found = [compiler.compile_kernel("verify", macros(), (9, 0)) for _ in range(2)]
    first = found[0]
    assert first.startswith(b"\x7fELF")
    assert found == [first, first]
    assert len(caught) == 1
    compiler._cache.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which would end a call, and on this rank only
        assert compiler.compile_kernel("verify", macros(), (9, 0)) == first


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that NVRTC compiles from now on."""
    import cuda.core

    made, program = [], cuda.core.Program

    def counted(source: str, *arguments: Any) -> Any:
        made.append(source)
        return program(source, *arguments)

    monkeypatch.setattr("cuda.core.Program", counted)
    return made


def entries(cache: Path) -> list[Path]:
    return [path for path in (cache / "kernels" / "entries").rglob("*") if path.is_file()]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda entry: b"",
    "cut": lambda entry: entry[:10],
    "a page": lambda entry: entry[:4096],
    "the last byte missing": lambda entry: entry[:-1],
    "a byte more": lambda entry: entry + b"\0",
    "a bit": lambda entry: entry[:5000] + bytes([entry[5000] ^ 1]) + entry[5001:],
    "zeros": lambda entry: bytes(len(entry)),
    "zeros behind a page": lambda entry: entry[:4096] + bytes(len(entry) - 4096),
    "no seal": lambda entry: entry[entry.index(b"\x7fELF") :],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_anew_and_replaced(fresh_cache: Path, compilations: list[str], damage: str):
    """The driver would refuse it at every start, or crash on it."""
    kernel = compiler.compile_kernel("one_shot", macros(), (9, 0))
    [entry] = entries(fresh_cache)
    kept = entry.read_bytes()
    assert kept.endswith(kernel)
    entry.write_bytes(DAMAGES[damage](kept))
    assert compiler.compile_kernel("one_shot", macros(), (9, 0)) == kernel
    assert entry.read_bytes() == kept
    assert compiler.compile_kernel("one_shot", macros(), (9, 0)) == kernel
    assert len(compilations) == 2


def test_a_cache_in_which_nothing_can_be_written(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a full disk, or a file system that is mounted read-only."""
    kernel = compiler.compile_kernel("one_shot", macros(), (9, 0))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    works_without("cannot be written: .*No space left on device.*IPCREDUCE_CACHE_DIR")
    monkeypatch.setattr("cuda.core.Program", None)
    assert compiler.compile_kernel("one_shot", macros(), (9, 0)) == kernel, "what is there is still read"


def test_an_entry_that_cannot_be_read(fresh_cache: Path):
    compiler.compile_kernel("verify", macros(), (9, 0))
    [entry] = entries(fresh_cache)
    entry.unlink()
    entry.mkdir()  # root may read every file
    works_without("cannot be read: .*Is a directory")


@pytest.mark.parametrize("place", ["", "kernels", "kernels/entries"])
def test_a_file_in_its_place(fresh_cache: Path, place: str):
    path = fresh_cache / place
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch()
    works_without("cannot be used: .*IPCREDUCE_CACHE_DIR")


def test_a_cache_that_cannot_be_made_is_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where $HOME is missing or read-only, which is common in containers."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(UnsupportedError, match="IPCREDUCE_CACHE_DIR"):
        compiler.cache_directory()
    works_without("cannot be used: .*IPCREDUCE_CACHE_DIR=")


def test_without_a_home_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a container of a user that no list has: not in a directory "~" of wherever the program runs."""
    for name in ("HOME", "XDG_CACHE_HOME", "IPCREDUCE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError, match=r"no home directory is known.*\. Set IPCREDUCE_CACHE_DIR"):
        compiler.cache_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with pytest.raises(UnsupportedError, match="Set IPCREDUCE_CACHE_DIR"):
        compiler.cache_directory()
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", "~/own")
    with pytest.raises(UnsupportedError, match="Set IPCREDUCE_CACHE_DIR"):
        compiler.cache_directory()
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", str(tmp_path / "own"))
    assert compiler.cache_directory() == tmp_path / "own"


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", "~/own")
    assert compiler.cache_directory() == tmp_path / "home" / "own"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("IPCREDUCE_CACHE_DIR", raising=False)
    assert compiler.cache_directory() == tmp_path / "home" / ".cache" / "ipcreduce"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiler.cache_directory() == tmp_path / "xdg" / "ipcreduce"
    monkeypatch.setenv("IPCREDUCE_CACHE_DIR", str(tmp_path / "deep" / "own"))
    assert compiler.cache_directory() == tmp_path / "deep" / "own"
    assert compiler.cache_directory().is_dir()
