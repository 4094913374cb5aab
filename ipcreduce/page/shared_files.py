"""Files in /dev/shm by which the ranks of one host come to the same memory. Their names go once all have opened them.

Ranks that are killed before leave the name. The rank that makes a file holds a lock on it, which ends with its process,
so that the next one to make a file can tell what is left over, and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import mmap
import os
import tempfile
from contextlib import suppress

_DIRECTORY = "/dev/shm"
_PREFIX = "ipcreduce-locked-"  # without "locked" they were of a version that held no lock
_MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_mmap.restype = ctypes.c_void_p
NO_ROOM = f"{_DIRECTORY} needs"  # in the text of an error of create()


def create(nbytes: int) -> tuple[int, str]:
    """The descriptor and the path of a new file, that only this user can open and nobody else made.

    :raises OSError: without room.
    """
    _remove_what_is_left()
    while True:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=_DIRECTORY)
        try:
            if not _lock(descriptor, path):
                os.close(descriptor)
                continue
            os.posix_fallocate(descriptor, 0, nbytes)  # no room: an error now, not a signal later
        except OSError as error:
            os.close(descriptor)
            remove(path)
            if error.errno != errno.ENOSPC:
                raise
            needed = f"{NO_ROOM} {nbytes / (1 << 20):.1f} MB more (docker run --shm-size makes it larger)"
            raise OSError(error.errno, f"{error.strerror}: {needed}") from None
        return descriptor, path


def open_existing(path: str) -> int:
    """The descriptor of a file that another rank has made. :raises OSError: if it cannot be opened."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def mapped(descriptor: int) -> mmap.mmap:
    """The memory of a whole file, whose descriptor is closed.

    Python would keep a descriptor of its own, and close whatever has its number in the end. So the file takes the place
    of memory that has none.
    """
    try:
        memory = mmap.mmap(-1, os.fstat(descriptor).st_size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        if _mmap(address, len(memory), protection, flags, descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return memory
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """Remove the name of a file of this package, if it is there and this user's. Mappings stay."""
    folder, name = os.path.split(path)
    if folder == _DIRECTORY and name.startswith(_PREFIX):  # another rank has told it
        with suppress(OSError):
            os.unlink(path)


def free_bytes() -> int:
    """The bytes that /dev/shm has left."""
    status = os.statvfs(_DIRECTORY)
    return status.f_bavail * status.f_frsize


def _lock(descriptor: int, path: str) -> bool:
    """Hold a lock as long as the file is open or mapped. False if somebody has just taken it for left over."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks here: so nobody takes it for left over
        return True
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_what_is_left() -> None:
    for path in glob.glob(f"{_DIRECTORY}/{_PREFIX}*"):
        with suppress(OSError):  # gone already, still in use, or no file
            _remove_if_left(path)


def _remove_if_left(path: str) -> None:
    """Remove the file unless it is another user's. :raises OSError: if its lock is held."""
    if os.lstat(path).st_uid != os.geteuid():  # root could open it
        return
    descriptor = open_existing(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)
