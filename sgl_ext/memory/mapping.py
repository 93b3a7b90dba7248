"""Anonymous memory that other processes can map: a sealed memfd, its mapping and its huge pages."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from typing import Any

from sgl_ext.errors import ExtError
from sgl_ext.memory.limits import available_memory

HUGE_PAGE = 2 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 0x10, 0x20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create(
    name: str,
    size: int,
    lower: str = "--max-total-tokens or --mem-fraction-static",
    *,
    beside: int = 0,
) -> int:
    """Creates a memfd of ``size`` bytes and returns its file descriptor.

    The size is sealed, so that no process can map past the end of the file. The memory is allocated
    when it is written.

    Args:
        lower: options that decide the size; the error message tells the user to lower them.
        beside: bytes that were created before and are not allocated yet.

    Raises:
        ExtError: less memory than ``size`` and ``beside`` together is available to this process.
    """
    if size + beside > (available := available_memory()):
        others = f" beside {beside:,} B for the KV pool" if beside else ""
        raise ExtError(
            f"{name} needs {size:,} B of memory{others}, but {available:,} B are available; lower "
            f"{lower}"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Mapping:
    """Shared mapping of a whole file, aligned to huge pages.

    numpy reads it as a ``uint8`` array (``numpy.asarray``) that keeps the mapping alive. The memory
    is unmapped when this object and the last such array are gone.

    Args:
        fd: descriptor of the file.
        size: bytes of the file.
        reach: bytes of addresses to reserve, if more than ``size``; addresses beyond the file have
            no memory until :meth:`put`.

    Attributes:
        address: address of the first byte, a multiple of :data:`HUGE_PAGE`.
        size: bytes of addresses.
        renewed: lowest offset of the memory that was :meth:`put` since the attribute was last reset
            to ``size``; the code that reads it resets it.
    """

    def __init__(self, fd: int, size: int, *, writable: bool, reach: int = 0) -> None:
        self.size = self.renewed = max(size, reach)
        protection = _PROT_READ | (_PROT_WRITE if writable else 0)
        self.address = _map(fd, size, self.size, protection)
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.size,),
            "data": (self.address, not writable),
        }
        # Not at exit: threads and exit handlers may still use the memory, and the kernel unmaps it.
        weakref.finalize(self, _libc.munmap, self.address, self.size).atexit = False
        _libc.madvise(self.address, self.size, _MADV_HUGEPAGE)

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise TypeError(
            "a mapping cannot be pickled, because it belongs to its process; send a file "
            "descriptor that others can map"
        )

    def put(self, offset: int, fd: int, start: int, size: int) -> None:
        """Maps bytes ``[start, start + size)`` of a file at ``offset``, in place of what is there.

        ``offset``, ``start`` and ``size`` are multiples of :data:`PAGE`. A read or write of this
        process at the same time reaches either the old memory or the new memory.

        Raises:
            ValueError: the range is not whole pages, or leaves this mapping; nothing has changed.
            OSError: the kernel cannot map the file; the old memory may no longer be mapped.
        """
        self._replace(offset, fd, start, size, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
        self.renewed = min(self.renewed, offset)

    def drop(self, offset: int, size: int) -> None:
        """Unmaps the memory at ``[offset, offset + size)``; the addresses stay reserved.

        Raises:
            ValueError, OSError: see :meth:`put`.
        """
        self._replace(offset, -1, 0, size, 0, _MAP_PRIVATE | _MAP_ANONYMOUS)

    def _replace(
        self, offset: int, fd: int, start: int, size: int, protection: int, flags: int
    ) -> None:
        whole = not (offset % PAGE or start % PAGE or size % PAGE)
        if not (whole and start >= 0 < size and 0 <= offset <= self.size - size):
            raise ValueError(
                f"cannot map {size:,} B from {start:,} on at {offset:,} of {self.size:,} B; "
                f"expected whole pages of {PAGE:,} B within the mapping"
            )
        at = self.address + offset
        if _libc.mmap(at, size, protection, flags | _MAP_FIXED, fd, start) == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {size:,} B: {os.strerror(code)}")

    def collapse(self, start: int, end: int) -> int:
        """Backs bytes ``[start, end)`` of the mapping with huge pages and keeps the contents.

        ``start`` and ``end`` are multiples of :data:`HUGE_PAGE`. This also works where the kernel
        gives shared memory no huge pages by default. Without huge pages, only speed suffers.

        Returns:
            0, or the kernel's errno: EAGAIN or EBUSY if one of the pages was in use at that
            moment, another errno if the kernel gives no huge pages.
        """
        for page in range(start, end, HUGE_PAGE):
            # The kernel collapses only ranges that already have a page, so read each one first.
            ctypes.c_char.from_address(self.address + page).value  # noqa: B018
        if not _libc.madvise(self.address + start, end - start, _MADV_COLLAPSE):
            return 0
        return ctypes.get_errno()


def _map(fd: int, size: int, reach: int, protection: int) -> int:
    # Huge pages need an address that is congruent to the file offset: reserve more addresses than
    # needed, map at the first aligned one and release the rest.
    reserved = reach + HUGE_PAGE
    base: int = _libc.mmap(None, reserved, 0, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)
    if base == _MAP_FAILED:
        raise OSError(errno.ENOMEM, f"no address space for {reserved:,} B")
    address: int = -(-base // HUGE_PAGE) * HUGE_PAGE
    mapped: int = _libc.mmap(address, size, protection, _MAP_SHARED | _MAP_FIXED, fd, 0)
    code = ctypes.get_errno()
    end = -(-(address + reach) // PAGE) * PAGE
    if address > base:
        _libc.munmap(base, address - base)
    if base + reserved > end:
        _libc.munmap(end, base + reserved - end)
    if mapped == _MAP_FAILED:
        _libc.munmap(address, reach)
        raise OSError(code, f"cannot map {size:,} B: {os.strerror(code)}")
    return address
