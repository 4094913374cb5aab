"""A reader of Python sources that looks up, in the installed cuda.bindings, all that they take from it.

It follows values through a module's functions, as far as they come from the bindings: structs, which it makes, their
members, enumerations, and the results of calls, whose types the bindings' docstrings say. Needs no driver and no GPU.
Of `if hasattr(load(), "cuX"): ... else: ...` it reads the branch that the installed bindings take, of all others both.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

CALLERS = ("call", "_is_done")  # functions of ours whose first argument is the name of a driver call
NAMES_ONLY = ("fail",)  # takes such a name to say it
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "UNKNOWN"})()
_OF_BINDINGS = re.compile(r"cu[A-Z]\w*|CU[A-Za-z_]\w*")


class Reader:
    """What a module takes from the bindings: ``found``, with members as ``CUstruct.member``; ``problems``, by line."""

    def __init__(self, bindings: Any, source: str) -> None:
        self.bindings = bindings
        self.found: set[str] = set()
        self.problems: list[str] = []
        self._not_taken: set[str] = set()
        self._function = ""
        tree = ast.parse(source)
        self._has_own_load = _loads_something_else(tree)
        self._body(tree.body, {"_bindings": bindings})
        seen = {part for entry in self.found for part in entry.split(".")} | self._not_taken
        for node, name in _names(tree):
            if name not in seen:
                self._problem(node, f"{name} is not understood")

    def _problem(self, node: Any, what: str) -> None:
        self.problems.append(f"line {node.lineno}: {what}")

    def _taken(self, node: ast.If | ast.IfExp, names: dict[str, Any]) -> Any:
        """Whether the branch is taken, if the bindings decide; then the names in the other one are other bindings'."""
        taken = self._value(node.test, names)
        if not (isinstance(node.test, ast.Call) and ast.unparse(node.test.func) == "hasattr"):
            return UNKNOWN
        if isinstance(taken, bool):
            other = node.orelse if taken else node.body
            for part in other if isinstance(other, list) else [other]:
                self._not_taken.update(name for _, name in _names(part))
        return taken

    # ---- statements
    def _body(self, statements: list[Any], names: dict[str, Any]) -> None:
        for statement in statements:
            self._statement(statement, names)

    def _statement(self, node: Any, names: dict[str, Any]) -> None:
        match node:
            case ast.FunctionDef():
                inner = {key: value for key, value in names.items() if key not in _parameters(node)}
                outer, self._function = self._function, node.name
                self._body(node.body, inner)
                self._function = outer
                names.update((key, value) for key, value in inner.items() if key.startswith("self."))
            case ast.ClassDef():
                self._body(node.body, dict(names))
            case ast.ImportFrom(module="cuda.bindings", names=[ast.alias(name="driver") as alias]):
                names[alias.asname or "driver"] = self.bindings
            case ast.Assign():
                value = self._value(node.value, names)
                for target in node.targets:
                    self._bind(target, value, names)
            case ast.AnnAssign(value=ast.expr()):
                self._bind(node.target, self._value(node.value, names), names)
            case ast.AugAssign():
                self._value(node.value, names)
                self._bind(node.target, UNKNOWN, names)
            case ast.If():
                taken = self._taken(node, names)
                if taken is not False:
                    self._body(node.body, names)
                if taken is not True:
                    self._body(node.orelse, names)
            case ast.For():
                self._value(node.iter, names)
                self._bind(node.target, UNKNOWN, names)
                self._body([*node.body, *node.orelse], names)
            case _:  # whatever it is made of, in order
                for child in ast.iter_child_nodes(node):
                    (self._value if isinstance(child, ast.expr) else self._statement)(child, names)

    def _bind(self, target: Any, value: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name(id="_bindings"):
                pass  # as it is once they are loaded
            case ast.Name():
                names[target.id] = value
            case ast.Attribute():
                self._value(target, names)
                if ast.unparse(target.value) == "self":
                    names[ast.unparse(target)] = value
            case ast.Tuple():
                starred = any(isinstance(part, ast.Starred) for part in target.elts)
                wanted = len(target.elts) - starred
                if isinstance(value, tuple) and (len(value) < wanted or (len(value) > wanted and not starred)):
                    self._problem(target, f"{wanted} results expected, there are {len(value)}")
                parts = value if isinstance(value, tuple) and len(value) == wanted and not starred else None
                for index, part in enumerate(target.elts):
                    self._bind(part, parts[index] if parts else UNKNOWN, names)
            case _:
                self._value(target, names)

    # ---- expressions
    def _value(self, node: Any, names: dict[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names.get(node.id, UNKNOWN)
            case ast.Tuple(ctx=ast.Load()):
                return tuple(self._value(part, names) for part in node.elts)
            case ast.BoolOp(op=ast.Or()):
                return next(
                    (known for part in node.values if (known := self._value(part, names)) is not UNKNOWN), UNKNOWN
                )
            case ast.IfExp():
                taken = self._taken(node, names)
                if isinstance(taken, bool):
                    return self._value(node.body if taken else node.orelse, names)
            case ast.Attribute():
                base = self._value(node.value, names)
                return names.get(ast.unparse(node), UNKNOWN) if base is UNKNOWN else self._member(base, node.attr, node)
            case ast.Subscript():
                base, index = self._value(node.value, names), self._value(node.slice, names)
                if isinstance(base, tuple) and isinstance(index, int):
                    if index < len(base):
                        return base[index]
                    self._problem(node, f"result {index} expected, there are {len(base)}")
                return UNKNOWN
            case ast.Starred():
                return self._value(node.value, names)
            case ast.Call():
                return self._call(node, names)
        for child in ast.iter_child_nodes(node):
            (self._value if isinstance(child, ast.expr) else self._statement)(child, names)
        return UNKNOWN

    def _member(self, base: Any, name: str, node: ast.AST) -> Any:
        kind = base if base is self.bindings or isinstance(base, type) else type(base)
        if base is not self.bindings and getattr(self.bindings, kind.__name__, None) is not kind:
            return UNKNOWN  # bytes, a str
        shown = name if base is self.bindings else f"{kind.__name__}.{name}"
        self.found.add(shown)
        if not hasattr(kind, name):  # of a struct the type is asked: a member may have no valid value yet
            self._problem(node, f"no {shown} in the bindings {self.bindings.__name__}")
            return UNKNOWN
        try:
            return getattr(base, name)
        except Exception:
            return UNKNOWN

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        called = ast.unparse(node.func).removeprefix("driver.")
        arguments = [self._value(argument, names) for argument in node.args]
        for keyword in node.keywords:
            self._value(keyword.value, names)
        if called == "load":
            own = self._has_own_load and isinstance(node.func, ast.Name)
            return UNKNOWN if own else self.bindings
        if called == "newest" and isinstance(arguments[0], str):
            self.found.add(arguments[0])  # other bindings may have only this one
            versioned = "{}_v{}".format(*arguments, 2)
            return versioned if hasattr(self.bindings, versioned) else arguments[0]
        asked = called in ("hasattr", "getattr") and arguments[0] is self.bindings
        if asked or called in CALLERS:
            name = arguments[asked]
            if not isinstance(name, str):
                if self._function not in (*CALLERS, "newest"):
                    self._problem(node, f"{ast.unparse(node)}: the name is not understood")
                return UNKNOWN
            if called == "hasattr":
                self.found.add(name)
                return hasattr(self.bindings, name)
            function = self._member(self.bindings, name, node)
            return function if asked else self._results(function, node, arguments, 1)
        function = self._value(node.func, names)
        if isinstance(function, type) and function.__module__ == self.bindings.__name__:
            return _made(function)
        if function is None:  # a global that is filled in later, and not by the bindings: their names are looked for
            return UNKNOWN
        if getattr(self.bindings, getattr(function, "__name__", ""), None) is function:
            results = self._results(function, node, arguments, 0)
            return UNKNOWN if results is UNKNOWN else (UNKNOWN, *(results if isinstance(results, tuple) else [results]))
        return UNKNOWN

    def _results(self, function: Any, node: ast.Call, arguments: list[Any], first: int) -> Any:
        """What `call` gives: a value, or a tuple of them. Structs are made, by the types that the docstring says.

        ``arguments`` are the node's; those of the function begin at the one of number ``first``.
        """
        if function is UNKNOWN:
            return UNKNOWN
        most = function.__code__.co_argcount
        least = most - len(function.__defaults__ or ())
        several = [value for value, part in zip(arguments, node.args, strict=True) if isinstance(part, ast.Starred)]
        given = len(arguments) - first + sum(len(value) - 1 for value in several if isinstance(value, tuple))
        if not all(isinstance(value, tuple) for value in several) or node.keywords:
            self._problem(node, f"{function.__name__}: its arguments are not understood")
        elif not least <= given <= most:
            self._problem(node, f"{function.__name__} takes {most} arguments in these bindings, {given} are given")
        section = re.search(
            r"^Returns\n-+\n(.*?)(?=^\w[^\n]*\n---|\Z)", inspect.cleandoc(function.__doc__), re.M | re.S
        )
        if section is None:  # some that return nothing but CUresult
            return UNKNOWN
        _, *kinds = re.findall(r"^\w+(?: : (.*))?$", section[1], re.M)  # the first is CUresult
        made = tuple(map(self._instance, kinds))
        return made[0] if len(made) == 1 else made

    def _instance(self, kind: str) -> Any:
        name = re.fullmatch(r":py:obj:`~\.(\w+)`", kind)
        return _made(getattr(self.bindings, name[1], None)) if name else UNKNOWN


def _made(kind: Any) -> Any:
    """A struct or a handle of this type; of an enumeration no value is known."""
    try:
        return kind()
    except TypeError:
        return UNKNOWN


def _parameters(node: ast.FunctionDef) -> set[str]:
    arguments = node.args
    return {one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}


def _names(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Whatever looks like a name in the bindings: attributes, and strings that are nothing else."""
    said = {id(node.args[0]) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_said(node)}
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        of_others = isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("cupy.", "ctypes."))
        if isinstance(name, str) and _OF_BINDINGS.fullmatch(name) and id(node) not in said and not of_others:
            yield node, name


def _loads_something_else(tree: ast.Module) -> bool:
    """True if the module has a function load() of its own that does not give the bindings."""
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "load"]
    return bool(own) and not any("cuda.bindings" in ast.unparse(node) for node in own)


def _is_said(node: ast.Call) -> bool:
    return bool(node.args) and ast.unparse(node.func) in NAMES_ONLY
