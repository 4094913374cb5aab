"""The parts of ``ipcreduce bench`` that need no ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ipcreduce.arrays import rmsnorm
from ipcreduce.bench import arguments, contenders, data, norms, report, timing
from ipcreduce.bench.collectives import ALLREDUCE, COLLECTIVES
from ipcreduce.bench.limit import Limit


def test_sizes():
    assert arguments.sizes(4, 64, between=False) == [4, 8, 16, 32, 64]
    assert arguments.sizes(3, 24, between=True) == [3, 4, 6, 8, 12, 16, 24]
    assert arguments.sizes(5, 7, between=False) == []
    assert arguments.sizes(4, 24, between=True, itemsize=4) == [4, 8, 12, 16, 24], "whole elements"
    assert [arguments.size(text) for text in ("4", "64K", "3m", "1024G")] == [4, 65536, 3 << 20, 1 << 40]


@pytest.mark.parametrize("text", ["many", "", "-4", "0", "1025G", "4 K", "K", "1.5M", "²", "9" * 5000])
def test_sizes_that_are_none(text: str):
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"is no number of bytes from 1 to 1024G\. Write it as 4, 64K, 1M or 1G"
    ):
        arguments.size(text)


def test_a_least_size():
    assert arguments.size("1K", least=1024) == 1024
    with pytest.raises(argparse.ArgumentTypeError, match="'1023' is no number of bytes from 1024 to 1024G"):
        arguments.size("1023", least=1024)


def test_counts():
    assert [arguments.count(text) for text in ("1", "30", "1000000")] == [1, 30, 1_000_000]
    for text in ("0", "-1", "x", "", "1000001", "²", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match="is no whole number from 1 to 1000000"):
            arguments.count(text)


def test_lists_of_counts():
    assert arguments.counts("4, 1,512") == [4, 1, 512]
    for text in ("", "1,", "1;2", "1,0"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no whole number from 1 to 1000000"):
            arguments.counts(text)


@pytest.mark.parametrize(("quantize", "results"), [
    ("none", ["y", "residual_out"]), ("static", ["quantised", "residual_out"]),
    ("token", ["quantised", "scales", "residual_out"]), ("128", ["quantised", "scales", "residual_out"]),
])  # fmt: skip
def test_every_bit_of_a_norm_is_checked(quantize: str, results: list[str]):
    comm: Any = SimpleNamespace(rank=0, size=1, backend="host")
    message = norms.Message(3, 256, np.dtype(ml_dtypes.bfloat16), comm, quantize)
    arrays = message.source
    for _ in range(2):
        message.renew()
        assert not message.is_right(), "poisoned"
        scale = arrays.scales if quantize == "static" else None
        found = rmsnorm.normalise(arrays.shape, arrays.x, arrays.weight, arrays.residual, scale)
        for name in results:
            getattr(arrays, name)[...] = getattr(found, name)
        assert message.is_right()
        for name in results:
            for place in (0, -1):
                getattr(arrays, name).view(np.uint8).reshape(-1)[place] ^= 1
                assert not message.is_right(), name
                getattr(arrays, name).view(np.uint8).reshape(-1)[place] ^= 1
    assert message.is_right()


def test_norms_of_peers_are_near_and_sums_exact():
    comm: Any = SimpleNamespace(rank=0, size=1, backend="host")
    message = norms.Message(3, 256, np.dtype(ml_dtypes.bfloat16), comm, "none")
    message.renew()
    arrays = message.source
    found = rmsnorm.normalise(arrays.shape, arrays.x, arrays.weight, arrays.residual, None)
    arrays.residual_out[...] = found.residual_out
    for factor, right in ((1.0, True), (1 + 2**-7, True), (1 + 2**-5, False), (np.nan, False)):
        arrays.y[...] = found.y.astype(np.float32) * np.float32(factor)
        assert message.is_right("near") is right
    arrays.y[...] = found.y
    arrays.residual_out.view(np.uint16)[2, 255] ^= 1
    assert not message.is_right("near")
    arrays.y[...] = arrays.x
    assert message.is_right("sum")
    arrays.y.view(np.uint16)[2, 255] ^= 1
    assert not message.is_right("sum")


def test_names():
    assert arguments.names_of(["a", "b"], "b, a,b") == ["b", "a"]
    assert arguments.names_of(["a", "b"], "") == []
    for text, found in (("a,c", "'c'"), (",", "''"), ("ab", "'ab'")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{found} is unknown. Choose from a, b"):
            arguments.names_of(["a", "b"], text)


def test_writable_files(tmp_path: Path):
    """They are left as they are."""
    kept, new, folder = tmp_path / "kept", tmp_path / "new", tmp_path / "folder"
    kept.write_text("content")
    folder.mkdir()
    assert arguments.why_not_writable(kept) == arguments.why_not_writable(new) == ""
    assert kept.read_text() == "content"
    assert not new.exists()
    assert arguments.why_not_writable(folder) == f"Is a directory: {folder}"
    assert (
        arguments.why_not_writable(tmp_path / "none" / "x") == f"No such file or directory: {tmp_path / 'none' / 'x'}"
    )
    assert arguments.why_not_writable(kept / "x") == f"Not a directory: {kept / 'x'}"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_file_in_a_closed_directory_is_not_writable(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert arguments.why_not_writable(tmp_path / "x").startswith("Permission denied")


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert report.bus_gbps(1_000_000_000, 1e6, 2) == pytest.approx(1.0)
    assert report.bus_gbps(1_000_000_000, 1e6, 4) == pytest.approx(1.5)


def test_the_limit_takes_the_shorter_wire():
    limit = Limit(ranks=4, barrier_us=1.5, push_gbps=300)
    assert limit.microseconds(0) == 1.5
    assert limit.microseconds(3_000_000) == pytest.approx(1.5 + 2 * 3 / 4 * 3_000_000 / 300e3)
    assert Limit(2, 1.5, 300).microseconds(3_000_000) == pytest.approx(1.5 + 10)


@pytest.mark.parametrize(("name", "factors"), [
    ("allreduce", (1.5, 1.5, 1)), ("allgather", (3, 3, 2.5)), ("reduce_scatter", (0.75, 0.75, 0.625)),
    ("broadcast", (1, 1, 0.5)),
])  # fmt: skip
def test_bytes_that_a_collective_moves(name: str, factors: tuple[float, ...]):
    """By rank of 4, for a byte of its message: as nccl-tests count, over its links, and in a copy."""
    of = COLLECTIVES[name]
    assert (of.bus(4), of.wire(4), of.copied(4)) == pytest.approx(factors)
    assert Limit(4, 1.5, 300).microseconds(3_000_000, of) == pytest.approx(1.5 + factors[1] * 10)
    assert report.bus_gbps(1_000_000_000, 1e6, 4, of) == pytest.approx(factors[0])


@pytest.mark.parametrize("arrays", [0, 3])
@pytest.mark.parametrize("nbytes", [9, 24, 3 * 70_000])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_element_of_a_result_is_checked(name: str, nbytes: int, arrays: int):
    """On each of 3 ranks; longer messages repeat their data."""
    comms: Any = [SimpleNamespace(rank=rank, size=3, backend="host", empty=np.empty) for rank in range(3)]
    messages = [data.Message(nbytes, np.dtype(np.int8), comm, arrays, COLLECTIVES[name]) for comm in comms]
    for _ in range(2):
        for message in messages:
            message.renew()
        every = [contenders.as_lists(message.source, message.target) for message in messages]
        assert sum(len(source) for source in every[0][0]) == nbytes
        wrong = [message.is_right() for message in messages]
        assert not any(wrong[name == "broadcast" :]), "there is nothing yet, but at the root"
        for index in range(max(1, arrays)):
            sources = [one[0][index].copy() for one in every]
            results: list[Any] = {
                "allreduce": [sum(sources)] * 3, "allgather": [np.concatenate(sources)] * 3,
                "reduce_scatter": np.split(sum(sources), 3) if name == "reduce_scatter" else [],
                "broadcast": [sources[0]] * 3,
            }[name]  # fmt: skip
            for (_, targets), result in zip(every, results, strict=True):
                targets[index][...] = result
        for message, (_, targets) in zip(messages, every, strict=True):
            assert message.is_right()
            for target in targets:
                for place in (0, len(target) // 2, len(target) - 1):
                    target[place] ^= 1
                    assert not message.is_right(), place
                    target[place] ^= 1


class Nccl:
    """CuPy's module for NCCL, and its communicator, which notes all calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


@pytest.mark.parametrize(("name", "call"), [
    ("allreduce", ("allReduce", 1, 2, 4, 7, 0, 9)), ("allgather", ("allGather", 1, 2, 4, 7, 9)),
    ("reduce_scatter", ("reduceScatter", 1, 2, 2, 7, 0, 9)), ("broadcast", ("broadcast", 1, 2, 4, 7, 0, 9)),
])  # fmt: skip
def test_calls_of_nccl(monkeypatch: pytest.MonkeyPatch, name: str, call: tuple[Any, ...]):
    """As CuPy takes them: addresses, a count by collective, the dtype, op or root, and the stream."""
    nccl, of, world = Nccl(), COLLECTIVES[name], SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2)
    monkeypatch.setattr(world, "bcast", lambda identity: identity, raising=False)
    nccl.NcclCommunicator = lambda *given: nccl  # type: ignore[method-assign]
    monkeypatch.setattr(contenders.cupy_runtime, "nccl", lambda: nccl)
    monkeypatch.setattr(contenders.cupy_runtime, "stream_of", lambda: (9, None))

    def array(address: int, size: int) -> Any:
        return SimpleNamespace(data=SimpleNamespace(ptr=address), size=size, dtype=np.dtype(np.float32))

    source, target = array(1, 4), array(2, of.results(4, 2))
    peer = contenders.CupyNccl(world, of)
    for given, calls in (
        ((source, target), [call]),
        (([source] * 2, [target] * 2), [("groupStart",), call, call, ("groupEnd",)]),
    ):
        made = peer.prepare(*given)
        assert made is not None
        assert not nccl.calls
        made()
        assert nccl.calls == calls
        nccl.calls.clear()


def test_texts_of_sizes():
    assert [report.size_text(nbytes) for nbytes in (4, 1536, 65536, 3 << 20, 1 << 30)] == [
        "4 B", "1536 B", "64 KB", "3 MB", "1 GB",
    ]  # fmt: skip


def test_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")

    def row(mode: str, nbytes: int) -> dict[str, Any]:
        peers = {"nccl": 9.0, **({"torch_nccl": 12.0} if nbytes > 4 else {})}
        return {
            "ranks": 4, "bytes": nbytes, "mode": mode, "ours_us": 2.0, "limit_us": 1.5, "peers_us": peers,
        }  # fmt: skip

    path = tmp_path / "plot.png"
    rows = [row(mode, nbytes) for mode in ("graph", "eager") for nbytes in (4, 1024)]
    report.plot(path, {"rows": rows}, {"nccl": "NCCL"}, "a note")
    drawn = path.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert b"a note" in drawn
    for suffix in (".svg", ".pdf"):
        report.plot(path.with_suffix(suffix), {"rows": rows})
    assert "stroke-dasharray: 6,6" in path.with_suffix(".svg").read_text(), "else one of two peers hides the other"


def test_times_are_those_of_the_slowest_rank():
    class World:
        def allgather(self, own: tuple[float, ...]) -> list[tuple[float, ...]]:
            return [own, (0.5, 9.0, 10.0)]

    times = timing.Times.of([4e-6, 1e-6, 3e-6, 2e-6, 99e-6], World())
    assert (times.least, times.median, times.p99) == pytest.approx((1.0, 9.0, 99.0))


def test_plots_are_drawn_into_what_matplotlib_knows():
    pytest.importorskip("matplotlib")
    assert report.why_not_drawn(Path("x.png")) == report.why_not_drawn(Path("x.SVG")) == ""
    for name in ("x", "x.json"):
        reason = report.why_not_drawn(Path(name))
        assert reason.startswith(f"--plot cannot draw {name}. ")
        assert ".png" in reason


def test_rounds_on_the_host(monkeypatch: pytest.MonkeyPatch):
    """Each has as many calls as fit, and its samples are times of one call."""

    class World:
        barriers = 0

        def Barrier(self) -> None:
            self.barriers += 1

        def allgather(self, own: Any) -> list[Any]:
            return [own]

    world, made = World(), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: sum(made))
    times = timing.on_host(lambda: made.append(2**-10), 5, world)
    assert world.barriers == timing._WARM + 5
    assert len(made) == 1 + (timing._WARM - 1 + 5) * int(timing._ROUND_SECONDS * 2**10)
    assert times == timing.Times(*[2**-10 * 1e6] * 3)


def test_peers_belong_to_gpus_or_to_the_host(monkeypatch: pytest.MonkeyPatch):
    class World:
        def allgather(self, own: Any) -> list[Any]:
            return [own]

    def broken(mpi: Any) -> Any:
        raise OSError("not here")

    def found(names: list[str] | None, on_host: bool) -> Any:
        return contenders.find(names, World(), on_host, contenders.peers_of(ALLREDUCE, on_host))

    monkeypatch.setattr(contenders, "PEERS", {"nccl": broken})
    peers, left_out = found(None, True)
    assert ([peer.name for peer in peers], left_out) == (["mpi"], {})
    assert found(["nccl"], True) == ([], {"nccl": "it takes GPU arrays"})
    assert found(["mpi"], False) == ([], {"mpi": "it takes NumPy arrays"})
    assert found(None, False) == ([], {"nccl": "OSError: not here"})
    assert found([], False) == ([], {})
    assert found(["pair"], False) == ([], {"pair": "it is not timed with this --op"})


def test_a_table_leaves_out_empty_columns(capsys: pytest.CaptureFixture[str]):
    row = {
        "bytes": 1024, "ours_us": 2.0, "ours_min_us": 1.0, "ours_p99_us": 3.0, "bus_GBps": 0.5, "limit_us": 0.25,
        "algorithm": None, "host_us": None, "peers_us": {},
    }  # fmt: skip
    report.show([row], "eager")
    assert capsys.readouterr().out.splitlines() == [
        "eager",
        "bytes    us   min   p99  bus GB/s  limit us",
        "-----  ----  ----  ----  --------  --------",
        " 1 KB  2.00  1.00  3.00       0.5      0.25",
        "",
    ]
    report.show([row | {"peers_us": {"mpi": 1.0}, "algorithm": "one_shot", "host_us": 1.0}], "eager")
    names = capsys.readouterr().out.splitlines()[1].split("  ")
    assert {"algorithm", "host us", "mpi", "best peer / us"} <= {name.strip() for name in names}


def test_a_result_names_the_commit_of_a_checkout(tmp_path: Path):
    assert report.commit(tmp_path) == {}

    def git(*arguments: str) -> str:
        options = "-c", "user.name=one", "-c", "user.email=one@example.org"
        command = ["git", "-C", str(tmp_path), *options, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "a.py").write_text("")
    git("add", "a.py")
    git("commit", "--quiet", "--message", "one")
    assert report.commit(tmp_path) == {"commit": git("rev-parse", "--short", "HEAD")}
    (tmp_path / "installed").mkdir()
    assert report.commit(tmp_path / "installed") == {}, "a package in a folder of another project"
