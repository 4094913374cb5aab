"""The table of mutants fits the tree, and the program that makes them tells a kill from a survivor."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import Mutant, tables, words
from tests.mutants.__main__ import judge
from tests.mutants.trees import Tree
from tests.sim import faults
from tests.tools.machine import ROOT

SECONDS = 120


def test_each_changes_one_place(subtests: pytest.Subtests):
    for mutant in tables.MUTANTS:
        with subtests.test(mutant=mutant.name):
            text = (ROOT / mutant.file).read_text()
            assert text.count(mutant.old) == 1, f"{mutant.file} has changed, so change the mutant"
            assert mutant.new != mutant.old
            if mutant.file.endswith(".py"):
                ast.parse(text.replace(mutant.old, mutant.new))


ROW = """about

@ a.py

a fault
 one
-
+two
$ pytest tests/x.py
"""


def test_how_a_mutant_is_written():
    assert [*tables.read(ROW)] == [Mutant("a fault", "a.py", "one\n", "one\ntwo", "pytest tests/x.py")]


@pytest.mark.parametrize("line", ["@ a.py\n\n", "-\n", "$ "])
def test_a_block_that_is_no_mutant(line: str):
    with pytest.raises(ValueError, match="expected a name, a change and a command; found 'a fault"):
        [*tables.read(ROW.replace(line, "" if line == "@ a.py\n\n" else "?", 1))]


def test_each_has_a_name_of_its_own():
    names = [one.name for one in (*tables.MUTANTS, *faults.FAULTS)]
    assert len({*names}) == len(names)
    changes = [(one.file, one.old, one.new) for one in tables.MUTANTS]
    assert len({*changes}) == len(changes)


def test_what_a_command_names_exists(subtests: pytest.Subtests):
    """A test in a file, a program, and its scenario, which is a function there or beside it."""
    packages = {"tests.sim.scenarios": "tests/sim/scenarios", "tests.graphs": "tests/graphs"}
    for command in sorted({one.command for one in tables.MUTANTS}):
        with subtests.test(command=command):
            for file, test in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", command):
                text = (ROOT / file).read_text()
                assert not test or re.search(rf"^def {test}\b", text, re.MULTILINE), f"{file} has no {test}"
            name = command.split()[-1]
            if name.isidentifier():  # a scenario's
                folders = [folder for program, folder in packages.items() if program in command.split()]
                sources = [ROOT / word for word in command.split() if word.endswith(".py")]
                sources += [source for folder in folders for source in ROOT.glob(f"{folder}/*.py")]
                assert any(re.search(rf"^def {name}\b", source.read_text(), re.MULTILINE) for source in sources), name


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("mutants") / "tree")


ERRORS, COMMAND = "ipcreduce/errors.py", "pytest tests/unit/test_errors.py::test_report_has_one_form"
WHERE = '    return f"rank {rank}, call {call}" if call else'


@pytest.mark.parametrize(
    ("new", "seconds", "killed_by"),
    [
        (WHERE.replace("call {call}", "call {rank}"), SECONDS, COMMAND),
        (WHERE + " ", SECONDS, ""),  # no fault: it survives
        (WHERE.replace("if call", "if coll"), SECONDS, ""),  # no program: that it fails shows nothing
        (f"    while True:\n        pass\n{WHERE}", 5, f"hang of {COMMAND}"),
    ],
    ids=["killed", "survivor", "no program", "hang"],
)
def test_verdicts(tree: Tree, new: str, seconds: float, killed_by: str):
    result = judge(Mutant("a fault", ERRORS, WHERE, new, COMMAND), tree, seconds)
    assert result.killed_by == killed_by, result.output
    assert bool(result.killed_by) == ("SURVIVES" not in result.row(1, 1))


def test_a_tree_is_a_copy_of_this_one_and_stays_as_it_is(tree: Tree):
    """What is imported there is the copy, whatever is installed."""
    (tree.root / "tests" / "unit" / "test_place.py").write_text(
        "import ipcreduce, pathlib\n"
        "from tests.simulated import compiler\n"
        "def test_place():\n"
        "    root = pathlib.Path(__file__).parents[2]\n"
        "    assert pathlib.Path(ipcreduce.__file__).parents[1] == root\n"
        "    assert compiler.KERNELS.parent == root\n"
    )
    run = tree.run("pytest tests/unit/test_place.py", SECONDS)
    assert run.status == 0, run.output
    assert (tree.root / ERRORS).read_text() == (ROOT / ERRORS).read_text()


def test_a_text_that_is_not_there_is_an_error(tree: Tree):
    mutant = Mutant("a fault", ERRORS, "no such text", "", COMMAND)
    with pytest.raises(ValueError, match="has 0 of 'no such text'"):
        judge(mutant, tree, SECONDS)


def test_commands():
    environ, line = words("SIM_LATE=0.1 A=b pytest tests/x.py::test_y")
    assert environ == {"SIM_LATE": "0.1", "A": "b"}
    assert line[-1] == "tests/x.py::test_y"
    with pytest.raises(ValueError, match="expected pytest or mpirun; found 'make'"):
        words("make test")


def test_the_program(tmp_path: Path):
    command = [sys.executable, "-m", "tests.mutants", "--only"]
    one = next(one for one in tables.MUTANTS if one.command.startswith("pytest tests/unit/test_exchange.py"))
    file = tmp_path / "table.json"
    done = subprocess.run([*command, one.name, "--json", file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 of 1 mutants killed")
    content = json.loads(file.read_text())
    assert [row["killed by"] for row in content["table"]] == [one.command]
    assert content["mutants"] == content["killed"] == 1
    none = subprocess.run([*command, "of no name"], cwd=ROOT, capture_output=True, text=True)
    assert none.returncode == 2
    assert "no mutant has of no name" in none.stderr
