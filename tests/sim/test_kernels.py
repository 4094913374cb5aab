"""The kernels alone, with ranks as threads of one process: right, in order, and every deliberate fault is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim import faults
from tests.simulated import kernels
from tests.simulated.kernels import Library

WHOLE = [Library(kernel, dtype) for kernel in ("one_shot", "two_shot") for dtype in kernels.DTYPES]
WHOLE += [Library("two_shot", dtype, depth=depth) for dtype in ("float32", "int8") for depth in (2, 4)]
WHOLE += [Library("direct", dtype, depth=depth) for dtype, depth in (("float32", 1), ("int32", 2), ("float64", 4))]
WHOLE += [Library("bulk", dtype) for dtype in kernels.DTYPES]
SPLITS = [Library("gather", dtype, members=members) for dtype, members in (("uint8", 1), ("uint32", 4), ("uint64", 1))]
SPLITS += [Library("scatter", dtype, members=4 if dtype == "int32" else 1) for dtype in kernels.DTYPES]
SPLITS += [Library("gather", "uint32", depth=2, members=1), Library("scatter", "float32", depth=2, members=4)]
TILES = [Library(f"bulk_{kernel}", dtype, members=1) for kernel, dtype in (
    ("gather", "uint8"), ("gather", "uint64"), ("scatter", "float32"), ("scatter", "int8"), ("scatter", "float64"),
)]  # fmt: skip
SPREAD = [Library("spread", dtype) for dtype in ("uint8", "uint32", "uint64")]
WHOLE += SPLITS + TILES + SPREAD
HALVES = [library._replace(whole=False) for library in WHOLE]
OF_EACH_SIZE = [library for library in WHOLE + HALVES if library.dtype in ("int8", "uint32", "float32", "float64")]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_sums_are_exact(ranks: int) -> None:
    chosen = [library for library in WHOLE + HALVES if ranks > 1 or library.kernel != "spread"]
    assert kernels.run("sweep", chosen, ranks=ranks, operations=150, seed=ranks) == ("nothing", "ok\n")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_many_tiles(ranks: int) -> None:
    deep = [library for library in WHOLE if library.depth > 1 or library.kernel.startswith(("bulk", "spread"))]
    result = kernels.run("sweep", deep, ranks=ranks, operations=60, packets=900, seed=ranks)
    assert result == ("nothing", "ok\n")


def test_two_ranks_find_places_before_they_wait(tmp_path: Path) -> None:
    """As a GPU's kernels do, which are compiled for a number of ranks: see kPlacesEarly in gather.cu."""
    sources = faults.changed(tmp_path, ("sync.cuh", "kMaxRanks = 8", "kMaxRanks = 2"))
    libraries = [library for library in SPLITS if library.depth == 1]
    assert kernels.run("sweep", libraries, ranks=2, operations=150, sources=sources) == ("nothing", "ok\n")


def test_4096_threads() -> None:
    libraries = [Library("one_shot", "float32"), Library("one_shot", "int32")]
    assert kernels.run("sweep", libraries, ranks=2, operations=8, packets=4096) == ("nothing", "ok\n")


@pytest.mark.usefixtures("tsan")
@pytest.mark.parametrize("ranks", [2, 3])
def test_order_between_and_within_ranks(ranks: int) -> None:
    result = kernels.run("sweep", OF_EACH_SIZE, ranks=ranks, operations=150, seed=ranks, tsan=True)
    assert result == ("nothing", "ok\n")


@pytest.mark.usefixtures("tsan")
@pytest.mark.parametrize("mode", ["absent", "late"])
def test_order_where_waits_are_abandoned(mode: str) -> None:
    assert kernels.run(mode, OF_EACH_SIZE, ranks=3, operations=16, tsan=True) == ("nothing", "ok\n")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_wait_for_an_absent_rank_ends(ranks: int) -> None:
    assert kernels.run("absent", WHOLE + HALVES, ranks=ranks, operations=20) == ("nothing", "ok\n")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_late_rank_gets_no_wrong_values(ranks: int) -> None:
    assert kernels.run("late", WHOLE, ranks=ranks, operations=40) == ("nothing", "ok\n")


@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
def test_verify_sees_how_packets_arrive(split: bool) -> None:
    library = Library("verify", "int32")
    assert kernels.run("verify", [library], ranks=4, operations=1000, split=split) == ("nothing", "ok\n")


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_faults_are_caught(fault: faults.Fault, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if fault.arguments["tsan"]:
        request.getfixturevalue("tsan")
    finding, output = faults.run(fault, tmp_path)
    assert faults.is_caught(finding), output


def test_without_faults_the_same_runs_find_nothing(request: pytest.FixtureRequest) -> None:
    for fault in {(fault.mode, *fault.libraries, *fault.arguments.items()): fault for fault in faults.FAULTS}.values():
        if fault.arguments["tsan"]:
            request.getfixturevalue("tsan")
        arguments = fault.arguments | {"seconds": 40, "operations": min(500, fault.arguments["operations"])}
        assert kernels.run(fault.mode, fault.libraries, **arguments) == ("nothing", "ok\n"), fault.name
