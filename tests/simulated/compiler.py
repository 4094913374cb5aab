"""Stands for ``ipcreduce.cuda.compiler``: the project's own kernels, compiled for the CPU by g++.

Rank and world size are run-time values there, so one build serves all; they travel in the "cubin", as does its path.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ipcreduce.cuda.expressions import Expression, Operand
from ipcreduce.errors import ArgumentError, IpcReduceError
from tests.tools import machine

SIM = Path(__file__).resolve().parent
KERNELS = SIM.parents[1] / "kernels"
INCLUDE = SIM / "include"
FURTHER = frozenset({"PARTS", "MEMBERS", "SCALE", "CLUSTER"})  # macros of some kernels only
TSAN = ("-fsanitize=thread", "-g1")
KERNEL = ("-shared", "-nostdlib")  # the process has the libraries: to link them takes a tenth of the time


def kernel_directory() -> Path:
    """Where the ``.cu`` and ``.cuh`` files are."""
    return KERNELS


@functools.cache
def builds_directory() -> Path:
    """Builds of all ranks and runs, one directory for each state of the sources."""
    digest = hashlib.sha256(b"\0".join(os.environ.get(name, "").encode() for name in ("CXX", "CXXFLAGS")))
    for source in sorted([*KERNELS.glob("*.cu*"), *INCLUDE.iterdir(), *SIM.glob("*.cpp"), Path(__file__)]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    path = machine.own_directory() / digest.hexdigest()[:16]
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def cache_directory() -> Path:
    """Where the library keeps what is not built."""
    chosen = os.environ.get("IPCREDUCE_CACHE_DIR")
    return Path(chosen) if chosen else builds_directory()


def gxx(
    output: Path, sources: Iterable[Path | str], *flags: str, include: Path = INCLUDE, kernels: Path = KERNELS
) -> Path:
    """Builds ``output``, unless it is there. If several processes want it at once, one builds and the others wait.

    :raises IpcReduceError: if it does not compile; the message is the compiler's.
    """
    if output.exists():
        return output
    with output.with_name(f"{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process ends
        if output.exists():
            return output
        partial = output.with_name(f"{output.name}.partial")
        partial.touch()  # with -fsyntax-only nobody else makes it
        command = [
            *shlex.split(os.environ.get("CXX", "g++")),
            *("-std=c++17", "-Og", "-fPIC", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off"),
            "-ftls-model=initial-exec",  # else each use of a thread's variable is a call
            "-U_FORTIFY_SOURCE",  # some systems' default: it takes our change from one stack to another for an error
            *(f"-I{include}", f"-I{kernels}", *flags, *shlex.split(os.environ.get("CXXFLAGS", ""))),
            *("-o", str(partial), *map(str, sources), "-ldl", "-lgcc"),
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise IpcReduceError(f"{output.name} does not compile: {shlex.join(command)}\n{done.stderr}")
        os.replace(partial, output)
    return output


def build_kernel(
    name: str,
    dtype: str,
    op: str,
    *,
    whole: bool = True,
    depth: int = 1,
    expression: Expression | None = None,
    checked: Path | None = None,
    tsan: bool = False,
    directory: Path | None = None,
    further: Mapping[str, str] = MappingProxyType({}),
    **where: Path,
) -> Path:
    """The shared object of one kernel; it needs the functions of the runtime.

    :param checked: only see if the kernel with the expression compiles, unless this file says that it does.
    :param further: macros of some kernels only. :param where: other sources, see :func:`gxx`.
    """
    macros = {"DTYPE": dtype, "OP": op, "WHOLE_PACKETS": str(int(whole)), "DEPTH": str(depth), **further}
    flags = [*KERNEL, *(TSAN if tsan else ()), *(f"-DIPCREDUCE_{key}={value}" for key, value in macros.items())]
    kind = [name, dtype, op, "whole" if whole else "halves", str(depth)]
    kind += [f"{key.lower()}{value}" for key, value in sorted(further.items())] + ["tsan"] * tsan
    target = "-".join(kind) + ".so"
    source = where.get("kernels", KERNELS) / f"{name}.cu"
    builds = directory or builds_directory()
    if expression is not None:
        text = f"#include <intrinsics.h>\n{expression.before(name)}{source.read_text()}"
        target = f"{target.removesuffix('.so')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        source = builds / f"{target}.{os.getpid()}.cu"
        source.write_text(text)
        try:
            if checked is not None:
                return gxx(checked, ["-xc++", source], "-fsyntax-only", *flags, **where)
            return gxx(builds / target, ["-xc++", source], *flags, **where)
        finally:
            source.unlink()
    return gxx(builds / target, ["-xc++", source], *flags, **where)


def build_runtime() -> Path:
    """The shared object that runs kernels."""
    return gxx(builds_directory() / "runtime.so", [SIM / "runtime.cpp"], "-shared", "-O2")


def compile_kernel(
    name: str, macros: dict[str, str], capability: tuple[int, int], expression: Expression | None = None
) -> bytes:
    """As ``ipcreduce.cuda.compiler.compile_kernel``; what the simulated driver's ``load_module`` takes.

    That is what to build: g++ takes a second a kernel, and most are loaded but never launched. An expression is checked
    at once, as its errors are the caller's, and by the first kernel that it is for.
    """
    given = {key.removeprefix("IPCREDUCE_"): value for key, value in macros.items()}
    known = ("RANK", "RANKS", "DTYPE", "OP", "WHOLE_PACKETS", "DEPTH")
    if given.keys() - FURTHER != {*known}:
        raise IpcReduceError(f"{name}.cu: the simulated compiler knows {known}, not {[*given]}")
    content = {"kernel": name, **given}
    if expression is not None:
        content["EXPRESSION"] = json.dumps([expression.text, *map(list, map(dataclasses.astuple, expression.operands))])
        check(content, expression)
    return json.dumps(content).encode()


def check(content: dict[str, str], expression: Expression) -> None:
    """See if an expression compiles, once for each dtype. :raises ArgumentError: if it does not."""
    words = f"{content['EXPRESSION']} {content['DTYPE']}"
    checked = builds_directory() / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.checked"
    failed = checked.with_suffix(".failed")
    if failed.exists():
        raise ArgumentError(failed.read_text())
    try:
        build_compiled(content, checked)
    except IpcReduceError as error:
        found = expression.error(error)
        partial = failed.with_suffix(f".{os.getpid()}")
        partial.write_text(str(found))
        os.replace(partial, failed)
        raise found from error


def build_compiled(content: dict[str, str], checked: Path | None = None) -> Path:
    """The shared object of what :func:`compile_kernel` has made. :param checked: see :func:`build_kernel`."""
    whole, depth = content["WHOLE_PACKETS"] == "1", int(content["DEPTH"])
    further = {key: content[key] for key in FURTHER if key in content}
    text, *operands = json.loads(content.get("EXPRESSION", "[null]"))
    expression = None if text is None else Expression(text, tuple(Operand(*one) for one in operands))
    return build_kernel(
        content["kernel"],
        content["DTYPE"],
        content["OP"],
        whole=whole,
        depth=depth,
        expression=expression,
        checked=checked,
        further=further,
    )
