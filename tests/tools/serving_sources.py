"""The Python files of released servers, from the package index, and how these use the object of their all-reduces.

Nothing of theirs is imported or kept. Standard library only.
"""

from __future__ import annotations

import ast
import json
import os
import re
import tarfile
import urllib.request
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PLACES = {"ca_comm", "srt_custom_allreduce"}  # attributes that hold the object


def fetch(package: str, directory: Path) -> tuple[str, Path]:
    """Unpack the Python files of the newest release. Returns its version and the directory of the package."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    request = urllib.request.Request(f"{index}/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    by_version: dict[tuple[int, ...], list[dict]] = {}
    for file in files:
        version = re.match(rf"{package}-(\d+(?:\.\d+)+)(?:-.*\.whl|\.tar\.gz)$", file["filename"])
        if version and not file.get("yanked"):
            by_version.setdefault(tuple(map(int, version[1].split("."))), []).append(file)
    newest = max(by_version)
    chosen = min(by_version[newest], key=lambda file: file["size"])  # wheels of vLLM have 300 MB of kernels
    archive = directory / chosen["filename"]
    urllib.request.urlretrieve(chosen["url"], archive)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(directory, [name for name in wheel.namelist() if _is_wanted(name, package)])
        return ".".join(map(str, newest)), directory / package
    with tarfile.open(archive) as sdist:
        members = [one for one in sdist if one.isfile() and _is_wanted(one.name.partition("/")[2], package)]
        for member in members:
            member.name = member.name.partition("/")[2]
        sdist.extractall(directory, members)
    return ".".join(map(str, newest)), directory / package


def _is_wanted(name: str, package: str) -> bool:
    return name.startswith(f"{package}/") and name.endswith(".py") and ".." not in name


@dataclass(frozen=True)
class Use:
    """One use of the object: ``where`` in their files, its member, and the call, if it is one.

    ``asked``: the file asks for the member by hasattr(), so that an object may lack it.
    """

    where: str
    member: str
    call: ast.Call | None
    asked: bool


def uses(package: Path) -> Iterator[Use]:
    """Every member that the engine takes of the object by name, but in functions that look for its own class."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(errors="replace")
        if any(place in text for place in PLACES):
            tree = ast.parse(text)
            asked = {
                node.args[1].value
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr"
                if isinstance(node.args[1], ast.Constant)
            }
            for function in ast.walk(tree):
                if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from _in_function(function, str(path.relative_to(package.parent)), asked)


def _in_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef, where: str, asked: Collection[object]
) -> Iterator[Use]:
    nodes = list(ast.walk(function))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_ours(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    if any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and _is_ours(node.args[0], names)
        for node in nodes
    ):
        return
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_ours(node.value, names):
            yield Use(f"{where}:{node.lineno}", node.attr, calls.get(id(node)), node.attr in asked)


def _is_ours(node: ast.expr, names: Collection[str] = ()) -> bool:
    """True for an expression that gives the object: ``x.ca_comm``, ``getattr(x, "ca_comm", None)``, or such a name."""
    if isinstance(node, ast.IfExp):
        return _is_ours(node.body, names) or _is_ours(node.orelse, names)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        return isinstance(node.args[1], ast.Constant) and node.args[1].value in PLACES
    if isinstance(node, ast.Attribute):
        return node.attr in PLACES
    return isinstance(node, ast.Name) and node.id in names


def calls_of(path: Path, name: str) -> list[ast.Call]:
    """The calls of a name in a file."""
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


def definition(path: Path, name: str) -> ast.ClassDef | ast.FunctionDef:
    """A class or function, "A" or "A.f". :raises LookupError: if the file has none of this name."""
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
        if not found:
            raise LookupError(f"{path} has no {name}")
        body = found[-1].body
    return found[-1]
