"""Memory that one process lends to another: the end of a slab, as files that can be mapped.

A process that maps such a file keeps the memory until it unmaps it, and cannot be forced to do so.
An owner that must reclaim its memory therefore maps new memory in its place. The borrower then
still reads what it has written, and its later writes do not reach the owner.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import secrets
import stat
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from sgl_ext.errors import ExtError
from sgl_ext.memory.mapping import HUGE_PAGE, PAGE, Mapping, create

_LENDERS = 16
"""Number of lenders of one borrower for whose regions addresses are reserved"""
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def blocks_for(size: int, block_bytes: int, page: int) -> int:
    """Returns the number of blocks whose addresses hold ``size`` bytes of several lenders.

    Args:
        page: bytes per page of memory; regions begin and end at page boundaries.
    """
    step = page // math.gcd(block_bytes, page)
    return -(-size // block_bytes) + _LENDERS * (step + 3)


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A part of a file in memory that its owner has open."""

    name: str
    """Unique name of the file"""
    fd: int
    """File descriptor in the owner's process"""
    offset: int
    """Start of the part in the file, in bytes"""
    size: int
    """Size of the part, in bytes"""


def unique_name(kind: str) -> str:
    """Returns a name for :func:`~.mapping.create` that no other file in memory has."""
    return f"{kind}-{secrets.token_hex(8)}"


class LentMemoryError(ExtError):
    """Error raised when lent memory cannot be mapped by a borrower or replaced by its owner."""


class Lendable:
    """The end of a process's own memory, which other processes can map.

    Args:
        mapping: mapping of the memory.
        fd: descriptor of its file, which the caller keeps open as long as this object exists.
        name: name of the file.
        start: bytes at the start of the memory that are never lent.
        end: end of the memory in the mapping, in bytes.
    """

    def __init__(self, mapping: Mapping, fd: int, name: str, start: int, end: int) -> None:
        self._mapping = mapping
        self._end = end // PAGE * PAGE
        start = min(-(-start // PAGE) * PAGE, self._end)
        self.extents: tuple[Extent, ...] = ()
        """The memory that can be lent, ordered by address, in whole pages"""
        if start < self._end:
            self.extents = (Extent(name, fd, start, self._end - start),)
        self._retired: list[Extent] = []
        self._files: set[int] = set()
        weakref.finalize(self, _close, self._files).atexit = False

    @property
    def size(self) -> int:
        """Size of the memory that can be lent, in bytes."""
        return sum(extent.size for extent in self.extents)

    @property
    def end(self) -> int:
        """End of the memory that can be lent, as an offset in the mapping in bytes."""
        return self._end

    def replace(self, size: int) -> None:
        """Maps new, zeroed memory in place of the last ``size`` bytes, rounded up to whole pages.

        The old memory is kept until :meth:`discard` for the processes that have mapped it.

        Raises:
            LentMemoryError: the machine has too little memory, and nothing has changed; or the
                kernel cannot map the new memory.
        """
        size = min(-(-size // PAGE) * PAGE, self.size)
        if size == 0:
            return
        name = unique_name("sgl_ext-kv")
        # Huge pages need an address that is congruent to the offset in the file.
        start = (self._end - size) % HUGE_PAGE
        try:
            fd = create(name, start + size)
        except (OSError, ExtError) as error:
            raise LentMemoryError(f"lent memory cannot be replaced: {error}") from None
        try:
            self._mapping.put(self._end - size, fd, start, size)
        except OSError as error:
            os.close(fd)
            raise LentMemoryError(f"lent memory cannot be replaced: {error}") from None
        self._files.add(fd)
        kept: list[Extent] = []
        left = self.size - size
        for extent in self.extents:
            own = min(extent.size, left)
            left -= own
            if own:
                kept.append(msgspec.structs.replace(extent, size=own))
            if rest := extent.size - own:
                offset = extent.offset + own
                self._retired.append(msgspec.structs.replace(extent, offset=offset, size=rest))
        self.extents = (*kept, Extent(name, fd, start, size))

    @property
    def retired(self) -> int:
        """Bytes of replaced memory, which only other processes may still have mapped."""
        return sum(extent.size for extent in self._retired)

    def discard(self) -> None:
        """Frees the replaced memory, which no other process may use any more.

        What the kernel cannot free stays in :attr:`retired`.
        """
        mode = _KEEP_SIZE | _PUNCH_HOLE
        self._retired = [
            extent
            for extent in self._retired
            if _libc.fallocate(extent.fd, mode, extent.offset, extent.size)
        ]
        kept = {extent.fd for extent in (*self.extents, *self._retired)}
        for fd in self._files - kept:
            os.close(fd)
            self._files.discard(fd)


def _close(files: set[int]) -> None:
    for fd in files:
        os.close(fd)


def map_memory(mapping: Mapping, offset: int, pid: int, extents: Sequence[Extent]) -> None:
    """Maps memory of another process of this user at ``offset``, one extent after the other.

    Raises:
        LentMemoryError: the memory is not what ``extents`` describe, or cannot be mapped.
    """
    with ExitStack() as opened:
        fds = [_open(pid, extent, opened) for extent in extents]
        for fd, extent in zip(fds, extents, strict=True):
            try:
                mapping.put(offset, fd, extent.offset, extent.size)
            except (OSError, ValueError) as error:
                raise LentMemoryError(
                    f"memory of process {pid} cannot be mapped: {error}"
                ) from None
            offset += extent.size


def _open(pid: int, extent: Extent, opened: ExitStack) -> int:
    path = f"/proc/{pid}/fd/{extent.fd}"
    try:
        # The pid may belong to another process by now and the file may be a pipe: do not block.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        opened.callback(os.close, fd)
        found = Path(f"/proc/self/fd/{fd}").readlink()
    except OSError as error:
        raise LentMemoryError(
            f"memory of process {pid} cannot be opened ({error.strerror}); check whether the "
            "process has ended"
        ) from None
    status = os.fstat(fd)
    if str(found) != f"/memfd:{extent.name} (deleted)" or not stat.S_ISREG(status.st_mode):
        raise LentMemoryError(
            f"file {extent.fd} of process {pid} is {found}, expected {extent.name}"
        )
    if status.st_uid != os.getuid():
        raise LentMemoryError(
            f"memory of process {pid} belongs to user {status.st_uid}, not to this user"
        )
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise LentMemoryError(
            f"memory of process {pid} is not sealed, so it could shrink while it is mapped"
        )
    if extent.offset < 0 or extent.size < 0 or extent.offset + extent.size > status.st_size:
        raise LentMemoryError(
            f"process {pid} lends bytes {extent.offset:,} to {extent.offset + extent.size:,} of a "
            f"file of {status.st_size:,} B"
        )
    return fd
