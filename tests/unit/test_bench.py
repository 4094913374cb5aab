"""The parts of ``python -m ipcreduce bench`` that need no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ipcreduce.bench import command, report, timing
from ipcreduce.bench.limit import Limit


def test_sizes():
    assert command.sizes(4, 64, between=False) == [4, 8, 16, 32, 64]
    assert command.sizes(3, 24, between=True) == [3, 4, 6, 8, 12, 16, 24]
    assert command.sizes(5, 7, between=False) == []
    assert [command.size(text) for text in ("4", "64K", "3m", "1G")] == [4, 65536, 3 << 20, 1 << 30]
    with pytest.raises(ValueError, match="invalid literal"):
        command.size("many")


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert report.bus_gbps(1_000_000_000, 1e6, 2) == pytest.approx(1.0)
    assert report.bus_gbps(1_000_000_000, 1e6, 4) == pytest.approx(1.5)


def test_the_limit_takes_the_shorter_wire():
    limit = Limit(ranks=4, barrier_us=1.5, push_gbps=300)
    assert limit.microseconds(0) == 1.5
    assert limit.microseconds(3_000_000) == pytest.approx(1.5 + 2 * 3 / 4 * 3_000_000 / 300e3)
    assert Limit(2, 1.5, 300).microseconds(3_000_000) == pytest.approx(1.5 + 10)


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
    report.plot(path, {"rows": [row(mode, nbytes) for mode in ("graph", "eager") for nbytes in (4, 1024)]})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_times_are_those_of_the_slowest_rank():
    class World:
        def allgather(self, own: tuple[float, ...]) -> list[tuple[float, ...]]:
            return [own, (0.5, 9.0, 10.0)]

    times = timing.Times.of([4e-6, 1e-6, 3e-6, 2e-6, 99e-6], World())
    assert (times.least, times.median, times.p99) == pytest.approx((1.0, 9.0, 99.0))
