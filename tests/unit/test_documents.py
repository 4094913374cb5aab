"""README.md, CONTRIBUTING.md, SECURITY.md and docs/: code, links, figures and names in them are true of this tree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ipcreduce
from benchmarks import pictures
from docs import results
from ipcreduce import errors, options
from ipcreduce.ipc import plan, workspace
from tests.shared import documents
from tests.tools import run
from tests.tools.machine import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in [*documents.pages(), ROOT / "CHANGELOG.md"]}


def text_of(name: str) -> str:
    return PAGES[name].read_text()


def test_lines_have_at_most_120_characters() -> None:
    """Rows of tables cannot be broken."""
    long = [
        f"{name}: {line}"
        for name in PAGES
        for line in text_of(name).splitlines()
        if len(line) > 120 and not line.lstrip().startswith("|")
    ]
    assert not long, "\n".join(long)


# ---- code
@pytest.mark.parametrize("name", PAGES)
def test_code_is_python(name: str) -> None:
    for piece in documents.pieces(PAGES[name]):
        piece.compiled()


def test_pieces_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n<!-- not shown:\nx = 1\n-->\n```python\ny = x\n```\n```\nmake test\n```\n"
        "<!-- fragment: needs a moon -->\n\n```python\nmoon()\n```\n<!-- a remark -->\n~~~python\nz\n~~~\n"
    )
    found = [(piece.line, piece.code, piece.fragment, piece.shown) for piece in documents.pieces(page)]
    assert found == [
        (2, "\nx = 1\n", None, False),
        (6, "y = x\n", None, True),
        (14, "moon()\n", "needs a moon", True),
        (18, "z\n", None, True),
    ]


def test_first_program(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n<!-- not shown:\nassert x\n-->\n```python\ny\n```\n")
    assert documents.first_program(page) == "x = 1\n\nassert x\n"
    page.write_text("<!-- not shown:\nhidden = 1\n-->\n```python\nx = 1\n```\n```python\ny\n```\n")
    assert documents.first_program(page) == "x = 1\n"


@pytest.mark.parametrize(
    "text",
    [
        "```py\nx\n```\n",
        "```Python\nx\n```\n",
        "```{code-block} python\nx\n```\n",
        "```python3\nx\n```\n",
        "- a list\n\n  ```python\n  x\n  ```\n",
        "<!-- fragment: -->\n```python\nx\n```\n",
        "<!-- fragment: of nothing -->\ntext\n",
        "<!-- fragment: of another block -->\ntext\n```python\nx\n```\n",
        "<!-- fragment: of a command -->\n```\nmake\n```\n",
        "<!-- fragment: one -->\n<!-- fragment: two -->\n```python\nx\n```\n",
    ],
)
def test_code_that_would_be_passed_over_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        list(documents.pieces(page))


# ---- form
def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


def test_the_readme_begins_with_what_a_stranger_runs() -> None:
    """Commands, a program and the picture come before the first table, and links before the limits."""
    text = text_of("README.md")
    marks = "make demo ", "make test ", "```python", "![", "| bytes |", "| document |", "## Limits", "**Undetected"
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_the_readme_and_the_index_link_every_page() -> None:
    own = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md", "security.md"}
    assert own <= {Path(link.partition("#")[0]).name for link in documents.links(ROOT / "README.md")}
    assert own <= set(documents.links(ROOT / "docs" / "index.md"))


def anchors(page: Path) -> set[str]:
    """The links that lead to a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", documents.FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert broken_links(PAGES[name]) == []


def broken_links(page: Path) -> list[str]:
    """The links of a page to files and headings that do not exist. Links to other sites are not followed."""
    broken = []
    for link in documents.links(page):
        target, _, anchor = link.partition("#")
        other = (page.parent / target).resolve() if target else page
        if not link.startswith("https://") and not (other.exists() and (not anchor or anchor in anchors(other))):
            broken.append(link)
    return broken


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    right = ("#a-heading", "page.md#a-heading", "https://other.invalid/x")
    wrong = ("#no-heading", "page.md#no-heading", "no-page.md")
    page.write_text("# A heading\n" + "".join(f"[text]({link})\n" for link in right + wrong))
    assert broken_links(page) == list(wrong)


def test_no_page_installs_a_package_that_no_index_has() -> None:
    by_name = [name for name in PAGES if re.search(r"pip install[^\n]* '?ipcreduce|`ipcreduce\[", text_of(name))]
    assert errors.PUBLISHED or not by_name


def test_messages_install_what_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors.installing("mpi") == "pip install '.[mpi]' in a clone of ipcreduce"
    monkeypatch.setattr(errors, "PUBLISHED", True)
    assert errors.installing("mpi") == "pip install 'ipcreduce[mpi]'"


# ---- figures
NORM_TABLES = results.norm_table, results.norm_fp8_table


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("README.md", results.readme_table()),
        *(("docs/performance.md", results.bench_table(n, mode)) for n in (2, 4) for mode in ("graph", "eager")),
        ("docs/performance.md", results.bench_table(2, gpu="h100")),
        *(("docs/performance.md", results.list_table(gpus)) for gpus in ("h100-x2", "h200-x4")),
        ("docs/performance.md", results.list_host_table()),
        ("docs/performance.md", results.beside_table()),
        ("docs/performance.md", results.overlap_table()),
        ("docs/performance.md", results.ratio_table()),
        ("docs/performance.md", results.host_table()),
        *(("docs/pytorch.md", results.llama_table(gpus)) for gpus in ("h200-x2", "h200-x4")),
        ("docs/fused.md", results.norm_peer_table("FlashInfer")),
        ("docs/fused.md", results.norm_peer_table("SGLang")),
        *(("docs/fused.md", one(gpus)) for gpus in ("h200-x2", "h200-x4") for one in NORM_TABLES),
    ],
)
def test_tables_are_those_of_the_result_files(name: str, table: str) -> None:
    """If not: python docs/results.py prints the present ones."""
    assert table in text_of(name)


def test_all_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    results.main()
    printed = capsys.readouterr().out
    assert results.norm_peer_table("SGLang") in printed
    assert results.run_table() in printed
    for path in results.RESULTS.glob("*.json"):
        assert re.fullmatch("[0-9a-f]{7,12}", results.read(path.stem)["commit"]), f"{path.name} names no commit"


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_pictures_are_drawn_from_the_result_files(name: str) -> None:
    """If not: make pictures draws them anew."""
    assert pictures.note(name).encode() in (results.RESULTS / f"{name}.png").read_bytes()


def test_the_pictures_that_are_shown_are_drawn() -> None:
    shown = {Path(link).name for page in PAGES.values() for link in documents.links(page) if link.endswith(".png")}
    assert shown == {f"{name}.png" for name in pictures.DRAWN} == {path.name for path in results.RESULTS.glob("*.png")}


@pytest.mark.parametrize(
    ("us", "text"), [(1.336, "1.34"), (10.25, "10.2"), (99.95, "100"), (285.4, "285"), (999.6, "1,000"), (None, "–")]
)
def test_microseconds(us: float | None, text: str) -> None:
    assert results.us_text(us) == text


def test_every_result_file_is_named() -> None:
    """By a page or by the notes, as `sweep-*.json` for instance."""
    texts = *map(text_of, PAGES), (ROOT / "benchmarks" / "NOTES.md").read_text()
    named = [name for text in texts for name in re.findall(r"`(?:[\w/]*/)?([\w*-]+\.json)`", text)]
    files = sorted(path.name for path in results.RESULTS.glob("*.json"))
    assert [file for file in files if not any(map(Path(file).match, named))] == []
    assert [name for name in named if not any(Path(file).match(name) for file in files)] == []


def test_every_result_file_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(f"`{path.name}`" in results.run_table() for path in results.RESULTS.glob("*.json"))
    header = {
        "machine": {"gpus": ["NVIDIA H200"] * 2},
        "date": "2030-01-02",
        "commit": "0123abc",
        "command": "tests/gpu/new.py",
    }
    sweep = header | {"versions": {"cupy-cuda12x": "14.2.0"}, "cases": 7, "calls": 2800, "ranks": 2}
    other = header | {"versions": {"python": "3.14"}, "date": "2031-01-02", "something": 1}
    (tmp_path / "sweep-cuda12-h200-x2.json").write_text(json.dumps(sweep))
    (tmp_path / "other.json").write_text(json.dumps(other))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.run_table().splitlines()[2:] == [
        "| 2031-01-02 | 0123abc | 2 × H200 | 2 | `tests/gpu/new.py` | see the file |  | `other.json` |",
        "| 2030-01-02 | 0123abc | 2 × H200 | 2 | sweep, 7 cases | 2,800 calls right | cupy-cuda12x 14.2.0 | "
        "`sweep-cuda12-h200-x2.json` |",
    ]


# ---- names
def test_the_pythons_are_those_of_the_classifiers() -> None:
    """Wherever a page names a range of tested versions, and in what the package says of itself."""
    minors = [int(minor) for minor in re.findall(r'Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text())]
    tested = f"Python 3.{min(minors)} to 3.{max(minors)}"
    for name in ("README.md", "CHANGELOG.md", "docs/getting_started.md", "docs/validation.md"):
        assert set(re.findall(r"Python 3\.\d+ to 3\.\d+", text_of(name))) == {tested}, name
    assert f'requires-python = ">=3.{min(minors)}"' in (ROOT / "pyproject.toml").read_text()
    assert set(run.PYTHONS) >= {f"3.{minor}" for minor in minors}
    assert f"{run.PYTHONS[0]} to {run.PYTHONS[-1]}" in (ROOT / "Makefile").read_text()
    assert f"{run.PYTHONS[0]} to {run.PYTHONS[-1]}" in text_of("CONTRIBUTING.md")


def test_the_tests_take_as_long_as_the_pages_say() -> None:
    kept = json.loads((ROOT / "tests" / "times.json").read_text())["seconds"] / 60
    for text in (text_of("README.md"), text_of("CONTRIBUTING.md"), (ROOT / "Makefile").read_text()):
        [minutes] = re.findall(r"^#? ?make test  .* (\d+) minutes on 2 cores$", text, re.MULTILINE)
        assert 0.8 < kept / int(minutes) < 1.25


def test_memory_is_as_the_pages_say() -> None:
    default, served = options.workspace_bytes(), workspace.bytes_for(8 * plan.MB)
    for size, megabytes, area in ((default, 128, 32), (served, 29, 7)):
        assert (size / plan.MB, int(plan.area_bytes(size) / plan.MB)) == (megabytes, area)
    assert re.search(r"uses 128 MB of memory .* 32\s+MB more for `sms=`", text_of("README.md"), re.DOTALL)
    assert "29 MB for each group on each GPU, and 7 MB more" in text_of("docs/serving.md")


@pytest.mark.parametrize("name", ["docs/from_torch_distributed.md", "docs/pytorch.md"])
def test_the_hook_comes_with_its_import(name: str) -> None:
    """``import ipcreduce`` does not import ipcreduce.torch."""
    before, use, _ = text_of(name).partition("register_comm_hook(None, ipcreduce.torch.ddp_hook")
    assert use
    assert "import ipcreduce.torch" in before


def test_every_public_name_is_in_the_reference() -> None:
    documented = re.findall(r"auto(?:class|function|exception):: (\w+)$", text_of("docs/api.md"), re.MULTILINE)
    assert sorted(documented) == sorted(ipcreduce.__all__)


def test_every_error_is_explained() -> None:
    errors = [name for name in ipcreduce.__all__ if name.endswith("Error")]
    assert all(f"`{name}`" in text_of("docs/errors.md") for name in errors)


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"CHANGELOG.md"}))
def test_files_and_tests_that_are_named_exist(name: str) -> None:
    """`tests/a.py::one`, `::two` names two functions of one file."""
    source = ""
    for path, function in re.findall(r"`([\w/.\-]*\.(?:py|cuh?|md|json))?(?:::(\w+))?`", text_of(name)):
        if "/" in path:
            assert (ROOT / path).is_file(), path
            source = (ROOT / path).read_text() if path.endswith(".py") else ""
        elif function:
            assert not path
        if function:
            assert re.search(rf"^def {function}\b", source, re.MULTILINE), f"{function} after {path}"


def test_the_structure_names_modules_that_exist() -> None:
    """Those in the table and the drawings of the architecture, which have no folder."""
    text = text_of("docs/architecture.md")
    known = {path.name for folder in ("ipcreduce", "kernels") for path in (ROOT / folder).rglob("*.*")}
    named = set(re.findall(r"(?<![\w/])(\w+\.(?:py|cuh?))\b", text))
    assert len(named) > 30
    assert named <= known
