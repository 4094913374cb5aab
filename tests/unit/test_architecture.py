"""The rules that keep the package small and replaceable, as tests: layers, single importers, sizes, docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipcreduce
from tests.tools.lines import functions
from tests.tools.machine import ROOT

PACKAGE = ROOT / "ipcreduce"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# A module imports none of a later layer. The longest prefix of its name counts.
_FIRST = "errors", "logs", "types", "dtypes", "texts", "advice", "habits", "process", "float_state", "interrupts"
LAYERS = (
    ("ipcreduce.originals", "ipcreduce.clock"),
    tuple(f"ipcreduce.{name}" for name in _FIRST),
    (
        "ipcreduce.ranks",
        "ipcreduce.page",
        "ipcreduce.cuda",
    ),
    ("ipcreduce.calls", "ipcreduce.arrays"),
    ("ipcreduce.device",),
    ("ipcreduce.options",),
    ("ipcreduce.ipc", "ipcreduce.nccl", "ipcreduce.host"),
    ("ipcreduce.graphs",),
    tuple(
        f"ipcreduce.{name}"
        for name in ("startup", "device_reducer", "suspension", "communicator_state", "collectives", "communicator")
    ),
    ("ipcreduce.default",),
    ("ipcreduce",),
    (
        "ipcreduce.cli",
        "ipcreduce.__main__",
        "ipcreduce.bench",
        "ipcreduce.torch",
        "ipcreduce.serving",
    ),
)
_OF_TORCH = {f"ipcreduce.torch.{name}" for name in ("ddp", "dispatch", "fsdp", "linear", "norms", "splits", "sums")}
LONGEST = 400
LONGEST_FUNCTION = 60
# Names and words that only graphs/direct may use.
DIRECT_ONLY = {
    "marks", "MARKS", "Marks", "outs", "_OUTS", "set_kernel", "allocation_bytes", "launch_to", "LaunchedKernel",
    "Recorder", "recorder", "slab_number", "unmapped", "unmap_all", "release_all", "registered", "Registrable",
}  # fmt: skip


def imports(name: str) -> Iterator[str]:
    """The full names of all that a module imports: at its top, within a function, or for types only."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}"


def own(name: str) -> set[str]:
    """The package's modules that a module imports."""
    found = set()
    for imported in imports(name):
        while imported and imported not in MODULES:
            imported = imported.rpartition(".")[0]
        found.add(imported)
    return {other for other in found if other}


def layer(name: str) -> int:
    found = {prefix: number for number, names in enumerate(LAYERS) for prefix in names if is_in(name, prefix)}
    longest = max(found, key=len)
    assert longest == name or longest != "ipcreduce", f"{name} is in no layer"
    return found[longest]


def is_in(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def test_every_import_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tests below see through relative imports, and find those for types and within functions too."""
    assert {"ipcreduce.cuda.driver", "ipcreduce.errors", "ipcreduce.ranks.exchange"} <= own("ipcreduce.ipc.peers")
    assert "cupy" in set(imports("ipcreduce.cuda.cupy_runtime"))
    assert "cuda.bindings.driver" in set(imports("ipcreduce.cuda.driver"))
    (tmp_path / "one.py").write_text(
        "import numpy, json as j\n"
        "if TYPE_CHECKING:\n    from ..cuda import driver\n"
        "def f():\n    from . import plan\n    from .. import process\n    from ..errors import report\n"
    )
    monkeypatch.setitem(MODULES, "ipcreduce.ipc.one", tmp_path / "one.py")
    assert own("ipcreduce.ipc.one") == {
        "ipcreduce.cuda.driver", "ipcreduce.ipc.plan", "ipcreduce.process", "ipcreduce.errors"
    }  # fmt: skip
    assert {"numpy", "json"} <= set(imports("ipcreduce.ipc.one"))


def test_the_longest_prefix_counts():
    order = [
        "clock",
        "errors",
        "cuda.graph",
        "calls.sequence",
        "device.backend",
        "options",
        "host.reducer",
        "graphs.graph",
        "communicator",
        "default",
    ]
    layers = [*(layer(f"ipcreduce.{name}") for name in order), layer("ipcreduce"), layer("ipcreduce.bench.tune")]
    assert layers == list(range(len(LAYERS)))
    with pytest.raises(AssertionError, match="is in no layer"):
        layer("ipcreduce.errors_of_others")


def test_imports_go_one_way(subtests: pytest.Subtests):
    for name in MODULES:
        with subtests.test(module=name):
            above = {other for other in own(name) if layer(other) > layer(name)}
            assert not above, f"{name} imports {above}, which stand above it"


def test_no_import_goes_round():
    graph = {name: own(name) - {name} for name in MODULES}
    while free := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, f"these import each other: {sorted(graph)}"


def test_the_ranks_among_themselves_know_nothing_of_cuda():
    """Any backend can have it."""
    folders = "ipcreduce.ranks", "ipcreduce.page", "ipcreduce.calls"
    taken = {imported for name in MODULES for folder in folders if is_in(name, folder) for imported in imports(name)}
    assert "ipcreduce.errors.report" in taken
    assert not {one for one in taken for library in ("ipcreduce.cuda", "cupy", "cuda") if is_in(one, library)}


def test_direct_has_one_seam():
    """It can be taken out, or replaced, at one place."""
    importers = {
        name
        for name in MODULES
        if not is_in(name, "ipcreduce.graphs.direct")
        and any(is_in(imported, "ipcreduce.graphs.direct") for imported in imports(name))
    }
    assert importers == {"ipcreduce.graphs.session"}
    assert strangers() == set()
    options = {"ipcreduce.options", "ipcreduce.communicator_state"}
    assert {name for name in MODULES if not is_direct(name) and "direct" in texts(name)} == {*importers, *options}


def test_the_seam_of_direct_finds_what_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for code, found in (
        ("def set_kernel(node): ...", "set_kernel"), ("page.marks[0] = 1", "marks"), ("_OUTS = 16", "_OUTS"),
        ("def run(recorder=None): ...", "recorder"), ("close(unmap=[], unmapped=[])", "unmapped"),
        ("state = 'registered'", "registered"), ("from .launches import LaunchedKernel", "LaunchedKernel"),
        ("class Plan:\n    def for_direct_only(self): ...", "for_direct_only"), ("'The marks.'\nsteps = 3", None),
    ):  # fmt: skip
        (tmp_path / "one.py").write_text(code)
        monkeypatch.setitem(MODULES, "ipcreduce.ipc.one", tmp_path / "one.py")
        (tmp_path / "two.py").write_text("plan.for_direct_only()")
        monkeypatch.setitem(MODULES, "ipcreduce.graphs.direct.two", tmp_path / "two.py")
        assert strangers() == ({("ipcreduce.ipc.one", found)} if found else set())


def is_direct(name: str) -> bool:
    return is_in(name, "ipcreduce.graphs.direct")


@functools.cache
def nodes_of(code: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(code))]


def texts(name: str) -> set[str]:
    """All names and strings in a module's code."""
    nodes = nodes_of(MODULES[name].read_text())
    return {value for node in nodes for _, value in ast.iter_fields(node) if isinstance(value, str)}


def strangers() -> set[tuple[str, str]]:
    """(module, name) of all that belongs to direct and stands outside of it: known names, and what only direct uses."""
    used, defined = {True: set(), False: set()}, set()
    for name in MODULES:
        for node in nodes_of(MODULES[name].read_text()):
            if isinstance(node, (ast.Name, ast.Attribute)):
                text = node.id if isinstance(node, ast.Name) else node.attr
                if isinstance(node.ctx, ast.Load):
                    used[is_direct(name)].add(text)
                elif not is_direct(name):
                    defined.add((name, text))
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not is_direct(name):
                defined.add((name, node.name))
    known = {(name, text) for name in MODULES if not is_direct(name) for text in texts(name) & DIRECT_ONLY}
    return known | {(name, text) for name, text in defined if text in used[True] - used[False]}


def test_nothing_imports_the_guests():
    """Programs import ipcreduce.torch, and the entry points of vLLM and SGLang ipcreduce.serving."""
    for guest in ("ipcreduce.torch", "ipcreduce.serving"):
        inside = {name for name in MODULES if is_in(name, guest)}
        assert inside
        assert not {name for name in MODULES.keys() - inside if own(name) & inside}


IMPORTERS = {
    "cuda.bindings": {"ipcreduce.cuda.driver"},
    "cuda.core": {"ipcreduce.cuda.compiler"},
    "cupy": {"ipcreduce.cuda.cupy_runtime"},
    "torch": {
        "ipcreduce.bench.contenders",
        "ipcreduce.serving",
        "ipcreduce.serving.fusion",
        "ipcreduce.serving.methods",
        "ipcreduce.serving.quantised",
        "ipcreduce.serving.all_reduce",
        *_OF_TORCH,
    },
    "vllm": {"ipcreduce.serving", "ipcreduce.serving.passes"},
    "sglang": {"ipcreduce.serving"},
    "nccl": {"ipcreduce.nccl.library"},
    "matplotlib": {"ipcreduce.bench.report"},
}


@pytest.mark.parametrize(("library", "importers"), IMPORTERS.items())
def test_one_importer_each(library: str, importers: set[str]):
    found = {name for name in MODULES if any(is_in(one, library) for one in imports(name))}
    assert found == importers


def test_contributing_names_those_with_one_importer():
    [said] = re.findall(r"^- (.*) are each imported by one module only\.", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    named = set(re.split(r", | and ", said.lower()))
    assert named == {library for library, importers in IMPORTERS.items() if len(importers) == 1} - {"sglang"}


def test_nothing_that_is_received_is_run():
    """SECURITY.md says so. Modules that make code or objects of bytes are imported nowhere, and nothing evaluates text.

    (PyTorch's group pickles what it carries by itself.)
    """
    assert {"json", "struct"} <= {one for name in MODULES for one in imports(name)}
    makers = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "code"}
    assert not {name for name in MODULES if {one.partition(".")[0] for one in imports(name)} & makers}
    for name in MODULES:
        nodes = nodes_of(MODULES[name].read_text())
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not called & {"eval", "exec", "compile", "__import__"}, name


_REPLACED = "Thread", "Lock", "RLock", "Event", "Condition"


def test_waits_are_the_originals():
    """Nothing waits by what gevent and the like replace. Benchmarks measure real time."""
    replaced = "time", "select", "selectors", "queue", "concurrent", *(f"threading.{one}" for one in _REPLACED)
    written = re.compile(rf"threading\.({'|'.join(_REPLACED)})\b|socket\.(socket|create_\w+)\b")
    bench = {name for name in MODULES if is_in(name, "ipcreduce.bench")}
    for name in MODULES.keys() - bench - {"ipcreduce.originals"}:
        assert not [one for one in imports(name) if any(is_in(one, of) for of in replaced)], name
        assert not written.search(MODULES[name].read_text().replace("wait for a threading.Event", "")), name


def test_assembly_is_in_one_header():
    with_assembly = set()
    for path in (ROOT / "kernels").glob("*.cu*"):
        code = re.sub(r"//.*|/\*.*?\*/", "", path.read_text())
        if re.search(r"\basm\b|__asm__|\b__(syncthreads|syncwarp|ballot_sync|threadfence\w*|ldg)\b", code):
            with_assembly.add(path.name)
    assert with_assembly == {"sync.cuh"}


def test_no_lock_that_ctrl_c_can_leave_taken(subtests: pytest.Subtests):
    """Those of threading that are written in Python: an interrupt within acquire() leaves the inner lock taken."""
    for name in MODULES:
        with subtests.test(module=name):
            written_in_python = {"Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Timer"}
            used = {
                node.attr
                for node in ast.walk(ast.parse(MODULES[name].read_text()))
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "threading"
            }
            assert "queue.Queue" not in MODULES[name].read_text()
            assert not used & written_in_python


def test_one_sitting(subtests: pytest.Subtests):
    for path in (*MODULES.values(), *(ROOT / "kernels").glob("*.cu*")):
        with subtests.test(file=path.name):
            assert len(path.read_text().splitlines()) <= LONGEST


def test_no_function_is_longer_than_a_screen():
    """Its complexity is bounded by ruff, in pyproject.toml."""
    longer = {
        f"{name}.{function}": lines
        for name, path in MODULES.items()
        for function, lines in functions(path.read_text())
        if lines > LONGEST_FUNCTION
    }
    assert not longer


def test_every_module_says_what_it_is(subtests: pytest.Subtests):
    for name in MODULES:
        with subtests.test(module=name):
            assert ast.get_docstring(ast.parse(MODULES[name].read_text()))


def test_every_public_name_has_a_docstring():
    missing = []
    for name in ipcreduce.__all__:
        thing = getattr(ipcreduce, name)
        assert thing.__module__.startswith("ipcreduce"), f"{name} is not ours"
        members = vars(thing) if inspect.isclass(thing) else {}
        named = {name: thing} | {f"{name}.{member}": value for member, value in members.items() if member[0] != "_"}
        missing += [where for where, value in named.items() if not inspect.getdoc(value)]
    assert not missing


def test_public_functions_and_classes_have_docstrings(subtests: pytest.Subtests):
    """Those that the package's other modules use; methods and properties that are one line may speak for themselves."""
    for name in [name for name in MODULES if "." in name]:
        with subtests.test(module=name):
            tree = ast.parse(MODULES[name].read_text())
            assert not [
                node.name
                for node in tree.body
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                and node.name[0] != "_"
                and not ast.get_docstring(node)
                if "overload" not in map(ast.unparse, node.decorator_list)
            ]


def test_only_documented_environment_variables():
    """Few, prefixed, and each in the table for users."""
    code = "".join(path.read_text() for path in MODULES.values())
    read = set(re.findall(r"environ(?:\.get\(|\[)\s*\"(\w+)\"", code))
    assert read
    documented = (ROOT / "docs" / "getting_started.md").read_text()
    for variable in read - {"XDG_CACHE_HOME"}:
        assert variable.startswith("IPCREDUCE_")
        assert f"`{variable}`" in documented
