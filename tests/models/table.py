"""Which searches are run: each model with its numbers of ranks and faults, and with every deliberate break."""

from __future__ import annotations

from dataclasses import dataclass

NO_FAULT, ABORT, DEATH, BOTH = "none", "abort", "death", "abort, death"
_FAULTS = {NO_FAULT: 0, ABORT: 1, DEATH: 2, BOTH: 3}


@dataclass(frozen=True)
class Search:
    """One model with one set of parameters, searched to the end; ``broken``: the break that the search has to find."""

    model: str
    n: int
    faults: str
    options: tuple[str, ...] = ()  # NAME=VALUE for the model
    broken: str = ""

    @property
    def definitions(self) -> list[str]:
        """The options of spin."""
        own = [f"BREAK_{self.broken}"] if self.broken else []
        return [f"-D{text}" for text in (f"N={self.n}", *self.options, *own)]


def _kernel(model: str, n: int, faults: str, *options: str, broken: str = "") -> Search:
    return Search(model, n, faults, (f"FAULTS={_FAULTS[faults]}", *options), broken)


_VARIANTS = (
    ("one_shot", ()), ("one_shot", ("PARTS=2",)), ("two_shot", ()), ("two_shot", ("TILES=2",)), ("direct", ()),
    ("bulk", ()), ("mixed", ()), ("mixed", ("ORDER=1",)), ("mixed", ("ORDER=2",)), ("parts", ("PARTS=2",)),
    ("parts", ("PARTS=2", "ORDER=1")), ("spread", ("TILES=2",)),
)  # fmt: skip
_ORDERS = "ORDER=0", "ORDER=1"

SEARCHES = (
    # A fault comes in every run that has one, and ends every wait: the runs without show that none needs it.
    *(_kernel(model, 2, faults, *options) for model, options in _VARIANTS for faults in (NO_FAULT, BOTH)),
    *(_kernel("one_shot", 2, faults, "B=2") for faults in (NO_FAULT, ABORT)),
    *(_kernel(model, 2, NO_FAULT, "B=2") for model in ("direct", "bulk")),
    *(_kernel("parts", 2, faults, "B=2", order) for order in _ORDERS for faults in (NO_FAULT, ABORT)),
    *(_kernel("parts", 3, NO_FAULT, "PARTS=2", order) for order in _ORDERS),
    _kernel("spread", 2, NO_FAULT, "B=2"),
    _kernel("spread", 3, NO_FAULT, "TILES=2"),
    *(_kernel("spread", 3, faults) for faults in (ABORT, DEATH)),
    *(_kernel("one_shot", 3, faults) for faults in (NO_FAULT, ABORT, DEATH)),
    *(_kernel(model, 3, NO_FAULT) for model in ("two_shot", "direct", "bulk", "mixed")),
    _kernel("one_shot", 4, NO_FAULT),
    Search("tiles", 2, "none", ("OPERATIONS=2",)),
    Search("tiles", 2, "abort", ("FAULTS=1", "OPERATIONS=2")),
    Search("tiles", 3, "none", ("OPERATIONS=2", "ROUNDS=3")),
    Search("tiles", 3, "none", ("OPERATIONS=1",)),
    Search("tiles", 3, "abort", ("FAULTS=1", "OPERATIONS=1", "ROUNDS=4")),
    Search("tiles", 4, "none", ("OPERATIONS=1", "ROUNDS=2")),
    Search("vote", 2, "gives up", ("SERIALS=6",)),
    Search("vote", 2, "gives up, death", ("SERIALS=4", "DEATH=1")),
    Search("vote", 3, "gives up", ("SERIALS=3",)),
    Search("resynchronise", 2, "2 faults", ("FAULTS=2",)),
    Search("resynchronise", 2, "2 faults, lost", ("FAULTS=2", "DEATH=1")),
    Search("resynchronise", 2, "2 faults, death", ("FAULTS=2", "DEATH=2")),
    Search("resynchronise", 3, "2 faults", ("FAULTS=2",)),
    Search("resynchronise", 3, "fault, death", ("FAULTS=1", "DEATH=2", "LAST=1")),
    Search("resynchronise", 4, "fault", ("FAULTS=1", "LAST=1")),
    *(Search("close", n, "none", ("CALLS=2",)) for n in (2, 3)),
    Search("close", 2, "death", ("DEATH=1", "CALLS=2")),
    Search("close", 3, "death", ("DEATH=1",)),
    Search("close", 4, "none"),
)

_RECOVERY = ("NO_RESET", "NO_QUIESCE", "ONE_MEETING", "SENDS_WHEN_DEAD")
BREAKS = (
    *(_kernel("one_shot", 2, NO_FAULT, broken=name) for name in ("NO_RESTORE", "ONE_HALF", "ODD_WRAP", "NO_BOUNDARY")),
    _kernel("one_shot", 2, NO_FAULT, "B=2", broken="BLOCKS_APART"),
    _kernel("one_shot", 2, NO_FAULT, "PARTS=2", broken="TORN"),
    _kernel("one_shot", 2, NO_FAULT, broken="SILENT_PAIR"),
    _kernel("one_shot", 3, NO_FAULT, broken="ANY_PEER"),
    *(_kernel("one_shot", 2, ABORT, broken=name) for name in _RECOVERY),
    *(_kernel("two_shot", 2, NO_FAULT, broken=name) for name in ("NO_RESTORE", "LATE_READ", "NO_BOUNDARY")),
    *(_kernel("direct", 2, NO_FAULT, broken=name) for name in ("NO_FENCE", "NO_EXIT", "EARLY_ENTRY")),
    _kernel("direct", 2, ABORT, broken="FLAG_AFTER_ABANDON"),
    *(_kernel("bulk", 2, NO_FAULT, broken=name) for name in ("NO_ENTRY", "NO_FENCE", "NO_EXIT")),
    _kernel("bulk", 2, ABORT, broken="POISONED_AREA"),
    *(_kernel("mixed", 2, NO_FAULT, broken=name) for name in ("NO_RESTORE", "ONE_HALF")),
    *(
        _kernel("parts", 2, NO_FAULT, "B=2", order, broken=name)
        for name in ("NO_ROWS_NO_PACKET", "NOTHING_TO_NO_ROWS", "NO_ANSWER", "OWN_LENGTH")
        for order in _ORDERS
    ),
    *(_kernel("spread", 3, NO_FAULT, broken=name) for name in ("NO_ANSWER", "NO_RESTORE")),
    *(
        Search("tiles", 2, "none", ("OPERATIONS=2",), name)
        for name in ("NO_FENCE", "TWO_SLOTS", "THREE_PLACES", "EARLY_ROUND", "FAR_AHEAD", "NO_EXIT")
    ),
    Search("tiles", 2, "abort", ("FAULTS=1", "OPERATIONS=2"), "BRINGS_WHEN_DEAD"),
    *(
        Search("vote", 2, "gives up", ("SERIALS=4",), name)
        for name in ("NO_SEAL", "NO_ABANDON", "SILENT", "ONE_BUFFER", "KEEP_NUMBERS")
    ),
    *(
        Search("resynchronise", 2, "2 faults", ("FAULTS=2",), name)
        for name in ("CLEAR_FIRST", "ONE_MEETING", "EQUAL", "NO_FENCE", "NO_QUIESCE", "NO_CATCH_UP")
    ),
    *(
        Search("close", 2, "death", ("DEATH=1",), name)
        for name in ("KERNELS_RUN", "LEAVE_FIRST", "FREE_AT_ONCE", "DEAD_BEFORE_UNMAPPED")
    ),
    Search("close", 2, "none", broken="NEVER_LEAVES"),
)
