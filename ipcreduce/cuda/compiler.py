"""Compilation of the kernels by NVRTC, through ``cuda.core``, with a cache on disk. It needs no GPU.

A kernel is compiled when it is first needed, for one world size, rank, dtype, op and architecture. That takes 55 ms.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import INSTALL, IpcReduceError, UnsupportedError
from ..logs import WARNING, log
from ..originals import RLock
from ..texts import text_of
from .expressions import Expression

_importing = RLock()  # of two threads that import cuda.core at once, one may find parts of it, for good
_SOME_SOURCES = "one_shot.cu", "sync.cuh"  # enough to tell ipcreduce's ``kernels`` from another project's


@lru_cache(maxsize=1)
def kernel_directory() -> Path:
    """The directory of the ``.cu`` and ``.cuh`` files: in the installed package, or beside it in a source tree.

    A ``kernels`` beside an installed package may be another project's, so two file names are looked for.

    :raises UnsupportedError: if neither place has the files.
    """
    package, tree = (Path(__file__).resolve().parents[level] / "kernels" for level in (1, 2))
    for directory in (package, tree):
        if all((directory / name).is_file() for name in _SOME_SOURCES):
            return directory
    if not package.parent.is_dir():
        raise UnsupportedError(
            f"the kernels' sources cannot be read, as ipcreduce is imported from a zip ({package.parent}), and the "
            "compiler reads files. Unpack the zip into a folder of sys.path, or install ipcreduce by pip"
        )
    raise UnsupportedError(
        f"the kernels' sources are missing: neither {package}, their place in a wheel, nor {tree}, their place in a "
        f"source tree, has {' and '.join(_SOME_SOURCES)}. Install ipcreduce again: pip install --force-reinstall"
    )


def cache_directory() -> Path:
    """The per-user cache: ``IPCREDUCE_CACHE_DIR``, or ``ipcreduce`` in XDG's cache directory. Created if missing.

    Its contents run on this user's GPU, so no other user may be able to write to it.

    :raises UnsupportedError: if it cannot be created, or if another user owns it or may write to it.
    """
    chosen = os.environ.get("IPCREDUCE_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(os.path.expanduser(chosen)) if chosen else Path(base) / "ipcreduce"
    what = f"the kernel cache IPCREDUCE_CACHE_DIR={chosen}" if chosen else f"the kernel cache {path}"
    try:
        homeless = not chosen or chosen.startswith("~")  # "~" stays if $HOME is unset and the system lists no such user
        if homeless and not path.is_absolute():
            raise FileNotFoundError("no home directory is known, or XDG_CACHE_HOME is relative")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise UnsupportedError(
            f"{what} cannot be made ({error}). Set IPCREDUCE_CACHE_DIR to a directory of yours"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # A directory with one of these bits is shared on purpose, as /tmp is: chmod 700 would lock everybody out.
        shared = status.st_uid != os.getuid() or status.st_mode & (stat.S_ISVTX | stat.S_ISGID)
        raise UnsupportedError(
            f"other users may write to {what}: its owner is {status.st_uid} and its mode "
            f"{stat.S_IMODE(status.st_mode):04o}, and this process is of user {os.getuid()}. "
            f"{'Set' if shared else 'Run chmod 700 on it, or set'} IPCREDUCE_CACHE_DIR to another directory"
        )
    return path


@lru_cache(maxsize=1)
def _headers_digest() -> bytes:
    digest = hashlib.sha256()
    for header in sorted(kernel_directory().glob("*.cuh")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes())
    return digest.digest()


_SEAL = struct.Struct("<16sQ32s")  # before each entry of the cache: a mark, the kernel's length, its SHA-256
_MARK = b"ipcreduce kernel"


class _Cache:
    """Compiled kernels on disk. If the cache cannot be used, kernels are compiled anew, and no call fails.

    Each entry begins with a checksum: the driver may crash on a kernel that a full disk or a dying host has cut.
    """

    def __init__(self) -> None:
        self._said = False
        self._entries: Any = {}  # those of this process only, if there is no directory for them
        try:
            from cuda.core.utils import FileStreamProgramCache

            self._entries = FileStreamProgramCache(cache_directory() / "kernels")
        except (OSError, UnsupportedError) as error:
            self._say("used", error)

    def get(self, key: bytes) -> bytes | None:
        """The kernel kept by this key; None if there is none, or it is damaged."""
        try:
            entry = self._entries.get(key)
        except OSError as error:
            self._say("read", error)
            return None
        if entry is None:
            return None
        kernel = bytes(entry[_SEAL.size :])
        if entry[: _SEAL.size] != _sealing(kernel):
            log(WARNING, "an entry of the kernel cache is damaged. Its kernel is compiled anew, and the entry replaced")
            return None
        return kernel

    def put(self, key: bytes, kernel: bytes) -> None:
        """Store a kernel, if the cache can be written."""
        try:
            self._entries[key] = _sealing(kernel) + kernel
        except OSError as error:
            self._say("written", error)

    def _say(self, done: str, error: Exception) -> None:
        if self._said:
            return
        self._said = True
        advice = "" if isinstance(error, UnsupportedError) else ". Set IPCREDUCE_CACHE_DIR to a directory of yours"
        text = f"every start compiles the kernels anew, as the kernel cache cannot be {done}: {error}{advice}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        except RuntimeWarning:  # the program makes warnings errors, which would end a call on this rank only
            log(WARNING, text)


def _sealing(kernel: bytes) -> bytes:
    return _SEAL.pack(_MARK, len(kernel), hashlib.sha256(kernel).digest())


@lru_cache(maxsize=1)
def _cache() -> _Cache:
    return _Cache()


def compile_kernel(
    name: str, macros: dict[str, str], capability: tuple[int, int], expression: Expression | None = None
) -> bytes:
    """Compile ``kernels/<name>.cu`` for a compute capability, or take it from the cache. Returns the cubin.

    :param macros: the macros that the source requires, by name.
    :param expression: the user's expression that the kernel applies to the reduced elements, if any.
    :raises UnsupportedError: if ``cuda.core`` or NVRTC is missing.
    :raises IpcReduceError: if the source does not compile; the message is NVRTC's log, with file and line.
    :raises ArgumentError: if the expression is wrong; the message has its lines, and what NVRTC says about them.
    """
    try:
        with _importing:
            from cuda.core import Program, ProgramOptions
            from cuda.core.utils import make_program_cache_key
    except ImportError as error:
        raise UnsupportedError(f"the compiler is not installed ({error}): {INSTALL}") from None
    directory = kernel_directory()
    source = (directory / f"{name}.cu").read_text()
    if expression is not None:
        source = expression.before(name) + source
    options = ProgramOptions(
        std="c++17",
        arch=f"sm_{capability[0]}{capability[1]}",
        include_path=[str(directory)],
        name=f"{name}.cu",
        define_macro=sorted(macros.items()),
    )
    key = make_program_cache_key(
        code=source, code_type="c++", options=options, target_type="cubin", extra_digest=_headers_digest() + _MARK
    )
    cubin = _cache().get(key)
    if cubin is None:
        try:
            cubin = bytes(Program(source, "c++", options).compile("cubin").code)
        except Exception as error:  # cuda.core has an exception type for each library that it calls
            said = text_of(error)
            if "NVRTC" not in said.upper():
                raise UnsupportedError(f"the compiler does not run ({said}): {INSTALL}") from error
            if expression is not None and "NVRTC_ERROR_COMPILATION" in said:
                raise expression.error(said) from error
            raise IpcReduceError(f"{name}.cu does not compile for {options.arch}:\n{said}") from error
        _cache().put(key, cubin)
    return cubin
