"""Deliberate faults: changes of the kernels or of the stand-in for sync.cuh, each with the effects that are looked for.

``python -m tests.sim.faults`` prints a table: fault, finding.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.simulated import compiler, kernels
from tests.simulated.kernels import Library, Sources

ONE_SHOT = Library("one_shot", "float32")
TWO_SHOT = Library("two_shot", "float32")
ONE_SHOT_INT = Library("one_shot", "int32")
TWO_SHOT_INT = Library("two_shot", "int32")
DIRECT = Library("direct", "float32")
BULK = Library("bulk", "float32")
TILES = (Library("bulk_gather", "uint32", members=1), Library("bulk_scatter", "float32", members=1))
GATHER = Library("gather", "uint32", members=1)
SCATTER = Library("scatter", "float32", members=1)
SCATTER_INT = Library("scatter", "int32", members=1)
SPREAD = Library("spread", "uint64")
BOTH = (ONE_SHOT, TWO_SHOT)

TSAN = "ThreadSanitizer"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` everywhere in ``file``; then a run of ``libraries`` must find something.

    Which of its effects shows first is up to the machine. ``caught_by`` has those that are looked for: the run is under
    ThreadSanitizer if that is among them, which then stops it first. ``also``: a second change.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    libraries: Sequence[Library] = BOTH
    mode: str = "sweep"
    also: tuple[str, str, str] | None = None  # file, old, new
    rare: bool = False  # shows only if a packet is late, so by many operations
    packets: int = 96  # the most of a message

    @property
    def arguments(self) -> dict[str, object]:
        operations = 4000 if self.rare else {"sweep": 120, "absent": 4, "late": 16}[self.mode]
        # A short deadline only where it is one that has to pass: else a slow machine would be what is found.
        seconds = 2 if "timeout" in self.caught_by else 1 if "hang" in self.caught_by else 40
        found = {"ranks": 3, "operations": operations, "seconds": seconds, "tsan": TSAN in self.caught_by}
        return found | {"packets": self.packets}


FAULTS = [
    Fault(
        "the half never alternates",
        "packets.cuh",
        "return epoch.number & 1 ? args.half_bytes : 0;",
        "return 0;",
        ("value", "timeout"),
        [ONE_SHOT],
    ),
    Fault(
        "no wait: receive_packets returns at once", "packets.cuh", "if (!any(waiting)) return;", "return;", ("value",)
    ),
    Fault(
        "the sentinel is not restored in slots",
        "packets.cuh",
        "store_packet_weak(at + row_offset(i, stride), empty, has);",
        "",
        ("value", "not at rest"),
    ),
    Fault(
        "the sentinel is not restored in escape packets",
        "packets.cuh",
        "empty, has && index % 32 == 0",
        "empty, false",
        ("value", "not at rest", "timeout"),
        [ONE_SHOT_INT, TWO_SHOT_INT],
    ),
    Fault(
        "the epoch does not advance",
        "packets.cuh",
        "store_u32_relaxed_gpu(args.epochs + 8 * j, epoch.number + 1)",
        "store_u32_relaxed_gpu(args.epochs + 8 * j, epoch.number)",
        ("value", "timeout", "not at rest"),
    ),
    Fault(
        "the epoch stays at its largest value",
        "packets.cuh",
        "store_u32_relaxed_gpu(args.epochs + 8 * j, epoch.number + 1)",
        "store_u32_relaxed_gpu(args.epochs + 8 * j, epoch.number + 1 ? epoch.number + 1 : epoch.number)",
        ("value", "timeout", "not at rest"),
    ),
    Fault(
        "a block advances its own epoch only",
        "packets.cuh",
        "store_u32_relaxed_gpu(args.epochs + 8 * j, epoch.number + 1)",
        "if (j < blocks_in_grid()) store_u32_relaxed_gpu(args.epochs + 8 * j, epoch.number + 1)",
        ("value", "timeout", "not at rest"),
    ),
    Fault(
        "no barrier before the epoch advances",
        "packets.cuh",
        "  sync_block();\n",
        "",
        ("value", "timeout", "not at rest"),
    ),
    Fault(
        "no barrier before the sentinel is restored in escape packets",
        "packets.cuh",
        "sync_warp();  // other",
        "// other",
        (TSAN,),
        [ONE_SHOT_INT, TWO_SHOT_INT],
    ),
    Fault("a packet's store does not release", "sync.cuh", "__ATOMIC_RELEASE", "__ATOMIC_RELAXED", (TSAN,)),
    Fault("a packet's load does not acquire", "sync.cuh", "__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED", (TSAN,)),
    Fault(
        "one sentinel word for split packets",
        "packets.cuh",
        "(kWholePackets || p.word[1] != kSentinel)",
        "true",
        ("value",),
        [Library("one_shot", "float32", False), Library("two_shot", "int32", False)],
    ),
    Fault(
        "a grid too small: part of the output is not written",
        "two_shot.cu",
        "tiles = ceil_div(columns, tile);",
        "tiles = 1;",
        ("value",),
        [TWO_SHOT],
    ),
    Fault(
        "only the first of a thread's columns is waited for",
        "packets.cuh",
        "      all &= has_arrived(",
        "      all &= d > 0 || has_arrived(",
        ("value",),
        [Library("two_shot", "float32", depth=2)],
        rare=True,
    ),
    Fault(
        "a tile takes one column a thread where it has two",
        "two_shot.cu",
        "tile = kDepth * threads_in_grid();",
        "tile = threads_in_grid();",
        ("value", "timeout", "not at rest"),
        [Library("two_shot", "float32", depth=2)],
    ),
    Fault(
        "a NaN equal to the sentinel is sent unchanged",
        "packets.cuh",
        "if (p.word[3] == kSentinel) p.word[3] = kReplacementNan;",
        "",
        ("timeout",),
    ),
    Fault(
        "NaN results are not made one",
        "reduce.cuh",
        "a == a ? to_bits(a) : 0x7FC00000u",
        "to_bits(a)",
        ("timeout",),
        [TWO_SHOT],
    ),
    Fault(
        "accumulation begins with the rank's own value",
        "reduce.cuh",
        "(v[rank], j)",
        "(v[rank == kRank ? 0 : rank], j)",
        ("value", "unequal bits"),
    ),
    Fault(
        "accumulation in falling order of ranks",
        "reduce.cuh",
        "(v[rank], j)",
        "(v[kRanks - rank], j)",
        ("value",),
    ),
    Fault(
        "integers equal to the sentinel are sent unchanged",
        "packets.cuh",
        "if (p.word[3] == kSentinel) p.word[3] = 0;",
        "",
        ("timeout",),
        [ONE_SHOT_INT, TWO_SHOT_INT],
    ),
    Fault(
        "escape packets are not waited for",
        "packets.cuh",
        "last[d][rank] != kSentinel",
        "true",
        ("value", "not at rest"),
        [ONE_SHOT_INT, TWO_SHOT_INT],
        rare=True,
    ),
    Fault(
        "every lane reads the escape word of the first 16 lanes",
        "packets.cuh",
        "+ lane / 16 * 4",
        "",
        ("value",),
        [ONE_SHOT_INT, TWO_SHOT_INT],
    ),
    Fault(
        "lanes without a packet poll another warp's packet",
        "packets.cuh",
        "index : index - lane;",
        "index : 0;",
        (TSAN,),
    ),
    Fault(
        "escaped integers are not restored",
        "packets.cuh",
        "if (last[d][rank] >> lane % 16 & 1) v[d][rank].word[3] = kSentinel;",
        "",
        ("value",),
        [ONE_SHOT_INT, TWO_SHOT_INT],
    ),
    Fault(
        "the tail is written beyond the end",
        "vec.cuh",
        "(u32)bytes / kPacketBytes : 0",
        "((u32)bytes + 15) / kPacketBytes : 0",
        ("canary",),
    ),
    Fault(
        "the abort word is not read",
        "packets.cuh",
        "microseconds) && load_u32_relaxed_sys(args.abort))",
        "microseconds) && false)",
        ("hang",),
        mode="absent",
    ),
    Fault(
        "the deadline is not checked",
        "packets.cuh",
        "now - started > args.timeout_ns",
        "false",
        ("hang",),
        mode="absent",
    ),
    Fault(
        "missing data are not poisoned",
        "one_shot.cu",
        "poison(), active)",
        "reduce(v[0]), active)",
        ("value",),
        [ONE_SHOT],
        "absent",
    ),
    Fault(
        "missing data of two hops are not poisoned",
        "two_shot.cu",
        "store_result(packet_index(column, d), i, poison())",
        "",
        ("value",),
        [TWO_SHOT],
        "absent",
    ),
    Fault(
        "kernels queued behind an abandoned one send all the same",
        "packets.cuh",
        "slot >> 32 == 0",
        "true",
        ("value",),
        mode="late",
    ),
    Fault(
        "only the block that abandoned its wait knows it",
        "packets.cuh",
        "for (u32 j = 0; j < kEpochSlots; ++j) store_u32_relaxed_gpu(epochs + 8 * j + 4, 1);",
        "",
        ("value",),
        mode="late",
    ),
    Fault(
        "the absent rank is not named",
        "packets.cuh",
        "store_u32_relaxed_sys(args.missing, load_u32_relaxed_sys(args.missing) | missing);",
        "",
        ("verdict",),
        mode="absent",
    ),
    Fault(
        "packets go to the row of another rank",
        "packets.cuh",
        "return row_offset(kRanks - i, stride);",
        "return row_offset(i, stride);",
        ("value", "timeout", "unequal bits"),
    ),
    Fault(
        "a rank's own NaN is reduced as it is",
        "one_shot.cu",
        "  v[0][kRank] = replace_sentinel_nan(v[0][kRank]);\n",
        "",
        ("timeout",),
        [ONE_SHOT],
    ),
    Fault(
        "the peers' flags are not waited for",
        "direct.cu",
        "    wait_for_flags(args, own_workspace + flags, flag_row, block_in_grid(), alive);\n",
        "",
        ("value", "not at rest"),
        [DIRECT],
    ),
    Fault(
        "the sentinel is not restored in flags",
        "packets.cuh",
        "    store_packet_weak(at + row_offset(i, stride), {{kSentinel, kSentinel, kSentinel, kSentinel}}, true);",
        "    ;",
        ("value", "not at rest"),
        [DIRECT],
    ),
    Fault(
        "no barrier before the flags",
        "direct.cu",
        "  sync_block();\n  if (thread_in_block() == 0) {",
        "  if (thread_in_block() == 0) {",
        (TSAN,),
        [DIRECT],
    ),
    Fault(
        "results of a peer whose flag is missing are kept",
        "direct.cu",
        "if (!wait_abandoned(args)) return;",
        "return;",
        ("value",),
        [DIRECT],
        "absent",
    ),
    Fault(
        "bulk: the peers' entry flags are not waited for",
        "bulk.cu",
        "    wait_for_flags(args, own_workspace + entry, flag_row, block_in_grid(), alive);\n",
        "",
        ("value", "not at rest"),
        [BULK],
    ),
    Fault(
        "bulk: the peers' exit flags are not waited for",
        "bulk.cu",
        "    wait_for_flags(args, own_workspace + exit, flag_row, block_in_grid(), alive);\n",
        "",
        ("value", "not at rest"),
        [BULK],
    ),
    Fault(
        "bulk: the exit flag is sent before the results",
        "bulk.cu",
        "  if (!stages.alive) return;\n",
        "  if (!stages.alive) return;\n  if (orders) send_flags(args, exit, flag_row, block_in_grid());\n",
        (TSAN, "value"),
        [BULK],
        also=("bulk.cu", "    send_flags(args, exit, flag_row, block_in_grid());\n    wait", "    wait"),
    ),
    Fault(
        "bulk: the gate is always waited for in its first phase",
        "bulk.cu",
        "turn / kStages % 2",
        "0",
        ("value", "timeout"),
        [BULK],
        also=("bulk.cu", "kStages = 6", "kStages = 2"),
    ),
    Fault(
        "bulk: no barrier before a tile is stored",
        "bulk.cu",
        "    sync_block();\n    if (!orders) continue;\n",
        "    if (!orders) continue;\n",
        ("value",),
        [BULK],
    ),
    *(
        Fault(
            f"{name}: a flag is sent before stores are made",
            file,
            "    wait_until_stores_are_made();\n    fence_proxy",
            "    fence_proxy",
            ("value", "simulator"),
            libraries,
        )
        for name, file, libraries in (("bulk", "bulk.cu", [BULK]), ("tiles", "tiles.cuh", TILES))
    ),
    *(
        Fault(
            f"{name}: a stage is filled again before its stores have read it",
            file,
            "wait_until_stores_have_read<1>();",
            "",
            ("value",),
            libraries,
            packets=900,
        )
        for name, file, libraries in (("bulk", "bulk.cu", [BULK]), ("tiles", "tiles.cuh", TILES))
    ),
    Fault(
        "tiles: a round is loaded before the peers have brought it",
        "tiles.cuh",
        "tile % round_tiles == 0 && round > 1) wait_for_flag(round - 1);",
        "tile % round_tiles == 0 && round > 1) {}",
        ("value", "not at rest", "timeout"),
        TILES,
        packets=900,
    ),
    Fault(
        "tiles: the last flags are not waited for",
        "tiles.cuh",
        "flag <= rounds && alive; ++flag) wait_for_flag(flag);",
        "flag <= rounds && alive; ++flag) {}",
        ("value", "not at rest", "timeout"),
        TILES,
    ),
    Fault(
        "tiles: the first flag is sent before the tiles are brought",
        "tiles.cuh",
        "    taken = take(taken, phase ? steps : early);\n    if (phase || taken < early) break;\n",
        "    if (orders && !phase) send_flag(0);\n    taken = take(taken, phase ? steps : early);\n"
        "    if (phase || taken < early) break;\n",
        ("value", TSAN, "not at rest"),
        TILES,
        also=("tiles.cuh", "    send_flag(0);\n    wait_for", "    wait_for"),
    ),
    Fault(
        "tiles: no barrier before a tile is stored",
        "tiles.cuh",
        "if (!Both::kCopies) sync_block();",
        "",
        (TSAN, "value", "simulator"),
        TILES[1:],
    ),
    Fault(
        "tiles: there are three places for rounds",
        "tiles.cuh",
        "return kRounds * (u32)args.out;",
        "return 3 * (u32)args.out;",
        ("value", TSAN),
        TILES,
        packets=900,
        rare=True,
    ),
    Fault(
        "tiles: an abandoned wait ends nothing",
        "tiles.cuh",
        "stages.stop[stage] = !alive;",
        "stages.stop[stage] = 0;",
        ("value", "hang"),
        TILES,
        mode="late",
    ),
    Fault(
        "tiles: a block poisons none of its tiles",
        "tiles.cuh",
        "both.poison_tile(tile);",
        ";",
        ("value",),
        TILES[1:],
        mode="absent",
    ),
    Fault(
        "bulk: a rank that has abandoned its wait goes on",
        "bulk.cu",
        "  if (!stages.alive) return;\n",
        "",
        ("hang",),
        [BULK],
        "late",
    ),
    Fault(
        "memory is touched before the predecessor has ended",
        "one_shot.cu",
        "  grid_dependency_sync();\n",
        "",
        ("simulator",),
        [ONE_SHOT],
    ),
    Fault(
        "a packet's store does not release: gather and scatter",
        "sync.cuh",
        "__ATOMIC_RELEASE",
        "__ATOMIC_RELAXED",
        (TSAN,),
        [GATHER, SCATTER],
    ),
    Fault(
        "a packet's load does not acquire: gather and scatter",
        "sync.cuh",
        "__ATOMIC_ACQUIRE",
        "__ATOMIC_RELAXED",
        (TSAN,),
        [GATHER, SCATTER],
    ),
    Fault(
        "a packet's flag arrives before its data",
        "sync.cuh",
        "return !IPCREDUCE_WHOLE_PACKETS || sim_split_packets;",
        "return true;",
        ("value",),
        [GATHER, SCATTER],
    ),
    Fault(
        "gather: all operations use one half",
        "gather.cu",
        "half = parity_half_offset(args, epoch)",
        "half = 0",
        ("value", "timeout", "not at rest", "unequal bits"),
        [ONE_SHOT, GATHER],
    ),
    Fault(
        "scatter: all operations use one half",
        "scatter.cu",
        "half = parity_half_offset(args, epoch)",
        "half = 0",
        ("value", "timeout", "not at rest"),
        [ONE_SHOT, SCATTER],
    ),
    Fault(
        "gather: a rank without rows sends no packet",
        "packets.cuh",
        "return table.packets[peer_rank(i)];",
        "return table.members[0].width[peer_rank(i)] ? table.packets[peer_rank(i)] : 0;",
        (TSAN, "value", "timeout"),
        [ONE_SHOT, GATHER],
        rare=True,
    ),
    Fault(
        "scatter: a rank without rows gets no packet",
        "scatter.cu",
        "packets = table.packets[kRank];",
        "packets = table.members[0].width[kRank] ? table.packets[kRank] : 0;",
        (TSAN, "value", "timeout"),
        [ONE_SHOT, SCATTER],
        rare=True,
        also=(
            "scatter.cu",
            "table.packets[peer_rank(i)] && alive",
            "(table.members[0].width[peer_rank(i)] ? table.packets[peer_rank(i)] : 0) && alive",
        ),
    ),
    Fault(
        "gather: rows of slots are as long as this rank's message",
        "gather.cu",
        "stride = row_bytes(longest)",
        "stride = row_bytes(packets_of(0))",
        ("value", "timeout", "not at rest"),
        [GATHER],
    ),
    Fault(
        "scatter: escape packets lie behind the packets of their own message",
        "scatter.cu",
        "stride), longest, packet_index(index, d),",
        "stride), table.packets[peer_rank(i)], packet_index(index, d),",
        ("value", "timeout", "not at rest"),
        [SCATTER_INT],
    ),
    Fault(
        "gather: packets beyond the end of a peer's message are waited for",
        "packets.cuh",
        "return all || !warp_has_packet(index, packets_of(i));",
        "return all;",
        ("timeout",),
        [GATHER],
    ),
    Fault(
        "gather: a rank receives no more packets than it sends",
        "gather.cu",
        "if (warp_has_packet(index, longest)) receive(own, index);",
        "if (warp_has_packet(index, packets_of(0))) receive(own, index);",
        ("value", "not at rest"),
        [GATHER],
    ),
    Fault(
        "scatter: a rank takes as many tiles as its own part has",
        "scatter.cu",
        "tiles = ceil_div(longest, tile);",
        "tiles = ceil_div(packets, tile);",
        ("timeout", "value"),
        [SCATTER],
    ),
    Fault(
        "gather: the words of an escape packet are in another order",
        "packets.cuh",
        "make_escape(last, second)",
        "make_escape(second, last)",
        ("value",),
        [GATHER],
    ),
    Fault(
        "scatter: a NaN equal to the sentinel is sent unchanged",
        "scatter.cu",
        "replace_sentinel_nan(parts[d][i])",
        "parts[d][i]",
        ("timeout",),
        [SCATTER],
    ),
    Fault(
        "the end of a row is written as a whole packet",
        "parts.cuh",
        "place.left >= (int)kPacketBytes && (kAligned || place.at % kPacketBytes == 0);\n  store",
        "place.left > 0 && (kAligned || place.at % kPacketBytes == 0);\n  store",
        ("canary", "value"),
        [GATHER, SCATTER],
    ),
    Fault(
        "gather: missing data are not poisoned",
        "gather.cu",
        "alive ? v[d][peer_rank(i)] : poison()",
        "v[d][peer_rank(i)]",
        ("value",),
        [GATHER],
        "absent",
    ),
    Fault(
        "scatter: missing data are not poisoned",
        "scatter.cu",
        "alive ? reduce(v[d]) : poison()",
        "reduce(v[d])",
        ("value",),
        [SCATTER],
        "absent",
    ),
    Fault(
        "gather: a kernel behind an abandoned one sends all the same",
        "gather.cu",
        "packets_of(0) && alive);",
        "packets_of(0));",
        ("value",),
        [GATHER],
        "late",
    ),
    Fault(
        "scatter: a kernel behind an abandoned one sends all the same",
        "scatter.cu",
        "[peer_rank(i)] && alive);",
        "[peer_rank(i)]);",
        ("value",),
        [SCATTER],
        "late",
    ),
    Fault(
        "gather: memory is touched before the predecessor has ended",
        "gather.cu",
        "  grid_dependency_sync();\n",
        "",
        ("simulator",),
        [GATHER],
    ),
    Fault(
        "scatter: memory is touched before the predecessor has ended",
        "scatter.cu",
        "  grid_dependency_sync();\n",
        "",
        ("simulator",),
        [SCATTER],
    ),
    Fault(
        "spread: memory is touched before the predecessor has ended",
        "spread.cu",
        "  grid_dependency_sync();\n",
        "",
        ("simulator",),
        [SPREAD],
    ),
    Fault(
        "spread: all operations use one half",
        "spread.cu",
        "half = parity_half_offset(args, epoch)",
        "half = 0",
        ("value", "timeout", "not at rest"),
        [ONE_SHOT, SPREAD],
    ),
    Fault("spread: peers do not answer", "spread.cu", "column == 0 && alive", "false", ("timeout",), [SPREAD]),
    Fault(
        "spread: the root does not wait for answers",
        "spread.cu",
        "wait_for_flags(args, args.peers[0] + half, row_bytes(columns), 0, alive);",
        "{}",
        ("value", "not at rest", "timeout"),
        [ONE_SHOT, SPREAD],
    ),
    Fault(
        "spread: chunks belong to the peers in the order in which the root counts them",
        "spread.cu",
        "(in, chunk_of(peer_rank(i), root) * columns",
        "(in, (i - 1) * columns",
        ("value",),
        [SPREAD],
    ),
    Fault(
        "spread: there is a chunk for the root, too",
        "spread.cu",
        "kPacketBytes), kRanks - 1);",
        "kPacketBytes), kRanks);",
        ("value",),
        [SPREAD],
    ),
    Fault(
        "spread: a packet is forwarded before it has come",
        "spread.cu",
        "return peer_rank(i) != sender ||",
        "return true ||",
        ("value", "not at rest"),
        [SPREAD],
    ),
    Fault(
        "spread: an escape packet of the root is not waited for",
        "spread.cu",
        "last != kSentinel",
        "true",
        ("value", "not at rest"),
        [SPREAD],
        rare=True,
    ),
    Fault(
        "spread: the slots of the root's row are not emptied",
        "spread.cu",
        "restore_sentinels(rows, columns, column, column < columns && alive);",
        "restore_sentinels(rows, columns, OfPeers{columns, root}, column, alive);",
        ("value", "not at rest"),
        [SPREAD],
    ),
    Fault(
        "spread: missing data are not poisoned",
        "spread.cu",
        "alive ? p : poison()",
        "p",
        ("value",),
        [SPREAD],
        "absent",
    ),
    Fault(
        "spread: a kernel behind an abandoned one sends all the same",
        "spread.cu",
        "columns, column, alive);\n  };\n  send(column)",
        "columns, column, true);\n  };\n  send(column)",
        ("value",),
        [SPREAD, SPREAD._replace(dtype="uint32")],
        "late",
    ),
]


def changed(directory: Path, *changes: tuple[str, str, str]) -> Sources:
    """Sources with changes, each a file, old and new text. :raises AssertionError: if the old text is not there."""
    sources = Sources(directory / "kernels", directory / "include", directory)
    shutil.copytree(compiler.KERNELS, sources.kernels)
    shutil.copytree(compiler.INCLUDE, sources.include)
    for file, old, new in changes:
        path = next(path / file for path in (sources.include, sources.kernels) if (path / file).exists())
        text = path.read_text()
        assert old in text, f"{file} has changed, so change what looks for {old!r}"
        path.write_text(text.replace(old, new))
    return sources


def is_caught(finding: str) -> bool:
    """True if a run has found its fault, by whichever effect. :param finding: see :func:`run`."""
    return finding in kernels.FINDINGS.values() and finding != "nothing"


def run(fault: Fault, directory: Path) -> tuple[str, str]:
    """Run the changed sources; returns as kernels.run."""
    sources = changed(directory, *filter(None, [(fault.file, fault.old, fault.new), fault.also]))
    return kernels.run(fault.mode, fault.libraries, sources=sources, **fault.arguments)


def main() -> None:
    width = max(len(fault.name) for fault in FAULTS)
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as directory:
            finding, output = run(fault, Path(directory))
        verdict = "" if is_caught(finding) else f"  NOT FOUND, looked for {', '.join(fault.caught_by)}\n{output}"
        print(f"{fault.name:{width}}  {finding}{verdict}", flush=True)


if __name__ == "__main__":
    main()
