"""Mutants that break one kind of call in one way, and that a cell of the matrix finds: see tests/matrix."""

from __future__ import annotations

from tests.mutants import Mutant

BACKEND, REDUCER = "ipcreduce/device/backend.py", "ipcreduce/device_reducer.py"
FINGERPRINT, HOST = "ipcreduce/calls/fingerprint.py", "ipcreduce/host/reducer.py"
MAPS, NORMS = "ipcreduce/device/known_maps.py", "ipcreduce/device/known_norms.py"


def cell(backend: str, kind: str, way: str) -> str:
    """The command of the cells of a kind in a way."""
    return f"mpirun -n 2 tests.matrix {backend} --sim '--kind={kind}' '--way={way}'"


def on_the_host(backend: str, kind: str, way: str) -> str:
    """The same of a backend of the host."""
    return f"CUDA_VISIBLE_DEVICES= mpirun -n 2 tests.matrix 'host {backend}' '--kind={kind}' '--way={way}'"


_LAUNCHED = "\n        self.order.launched = self.page.calls.number[0]\n"
_RUN = {
    "plain call": ("plain", "partial(self.start, prepared, source, target)"),
    "list": ("list", "partial(self.start_list(prepared), places)"),
    "norm": ("norm", "partial(self.norms.start, prepared, addresses)"),
}

MUTANTS = [
    *(
        Mutant(
            f"the guard does not hear of the first {name}",
            BACKEND,
            f"        self.order.launch({start}, stream, owner, recorded=recorded){_LAUNCHED}",
            f"        self.order.launch({start}, stream, owner, recorded=recorded)\n",
            cell("nccl", kind, "late rank"),
        )
        for name, (kind, start) in _RUN.items()
    ),
    Mutant(
        "the ranks do not compare eps",
        FINGERPRINT,
        ", eps {np.float32(shape.eps)!s}",
        ", eps",
        cell("ipc", "norm", "ranks that differ"),
    ),
    Mutant(
        "the ranks do not compare the members of lists",
        FINGERPRINT,
        'Fingerprint.of(f"{text}: {every}")',
        'Fingerprint.of(f"{text}: {every}", text)',
        cell("ipc", "list", "ranks that differ"),
    ),
    Mutant(
        "the ranks do not compare the op of a call with an expression",
        FINGERPRINT,
        'return Fingerprint.of(text, f"{text}\\0{source}")',
        'return Fingerprint.of(text, f"{shape}\\0{expression}\\0{source}")',
        cell("ipc", "expression", "ranks that differ"),
    ),
    Mutant(
        "a known expression reads the operands of the call before",
        MAPS,
        "        words = kind.words(operands, then._values)\n",
        "        words = next((at[3] for at in self.by_places if at[0] is kind), kind.words(operands, then._values))\n",
        cell("ipc", "expression", "other addresses"),
    ),
    Mutant(
        "a known norm into arrays of the program reads the residual of the call before",
        NORMS,
        "                place = library.plain(given[index], self._device)\n",
        "                place = library.plain(given[index], self._device) if index != 3 else None\n"
        "                place = place or (0, (), '')\n",
        cell("ipc", "norm", "other addresses"),
    ),
    Mutant(
        "a recording does not hold the operands of an expression",
        REDUCER,
        "self._session.note_list(prepared, used.source, used.destination, used.target, *mapped.arrays)",
        "self._session.note_list(prepared, used.source, used.destination, used.target)",
        cell("ipc", "expression", "recorded"),
    ),
    Mutant(
        "a norm that is refused on the host has cleared its output",
        HOST,
        "        used = HostNorm(given)\n",
        "        given.out is None or given.out.fill(0)\n        used = HostNorm(given)\n",
        on_the_host("in shared memory", "norm", "refused"),
    ),
    Mutant(
        "the ranks do not compare norms on the host over MPI",
        HOST,
        "            calls.compare(what)  # all",
        "            # all",
        on_the_host("over MPI", "norm", "ranks that differ"),
    ),
    Mutant(
        "a list on the host hands over the data of the first dtype alone",
        HOST,
        "for name, members in used.by_dtype():",
        "for name, members in list(used.by_dtype())[:1]:",
        on_the_host("in shared memory", "list", "known"),
    ),
]
