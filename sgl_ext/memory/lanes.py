"""Lanes that carry the copies of a transfer engine, and the memory and files that they touch.

The methods of :class:`sgl_ext.memory.transfer.TransferEngine` create these objects.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sgl_ext._native import _transfer
from sgl_ext.memory.direct_io import takes_direct_io

if TYPE_CHECKING:
    from sgl_ext.memory.transfer import TransferEngine


class Region:
    """Registered memory: ``length`` bytes at ``address``."""

    __slots__ = ("_engine", "_native", "address", "length")

    def __init__(self, engine: TransferEngine, native: _transfer.Region) -> None:
        self._engine = engine
        self._native = native
        self.address = native.base
        self.length = native.length

    def unregister(self) -> None:
        """Unregisters this region; see :meth:`TransferEngine.unregister`."""
        self._engine.unregister(self)


class File:
    """An open file of a lane; offset ``x`` of the file has the address ``base + x``."""

    __slots__ = ("_engine", "_native", "alignment", "base", "length")

    def __init__(self, engine: TransferEngine, native: _transfer.Region) -> None:
        self._engine = engine
        self._native = native
        self.base = native.base
        self.length = native.length
        self.alignment = (native.memory_alignment, native.offset_alignment)
        """Alignment of addresses in memory, and of offsets and widths in the file, in bytes"""

    def close(self) -> None:
        """Closes the lane's file descriptor.

        Raises:
            ExtError: unfinished tickets use the file.
        """
        self._engine.unregister(self)


class HostLane:
    """Threads that copy host memory; all of them share every large copy."""

    emulated = False

    def __init__(self, native: _transfer.HostLane) -> None:
        self._native: _transfer.Lane = native
        self.threads = native.threads

    def __repr__(self) -> str:
        return f"HostLane(threads={self.threads})"


class CudaLane:
    """Copy engines of one CUDA device, driven by native threads with a stream each."""

    emulated = False

    def __init__(self, native: _transfer.CudaLane, device: int) -> None:
        self._native: _transfer.Lane = native
        self.library = native.library
        """The CUDA runtime library that was found"""
        self.device = device

    def __repr__(self) -> str:
        return f"CudaLane(device={self.device}, library={self.library!r})"


class FileLane:
    """Reads and writes of files in one directory."""

    emulated = False

    def __init__(
        self,
        engine: TransferEngine,
        native: _transfer.FileLane,
        directory: Path,
        depth: int,
        alignment: tuple[int, int] | None,
    ) -> None:
        self._engine = engine
        self._file_lane = native
        self._native: _transfer.Lane = native
        self.directory = directory
        self.depth = depth
        self.backend = native.backend
        """``io_uring`` or ``threads``"""
        self.direct = alignment is not None
        """True if files are opened with O_DIRECT"""
        self.alignment = alignment or (1, 1)
        """Alignment of addresses in memory, and of offsets and widths in files, in bytes"""

    @property
    def registered_bytes(self) -> int:
        """Bytes of the pinned regions that are registered with the kernel for this lane."""
        return self._file_lane.registered_bytes

    def open(
        self, path: str | Path, length: int, *, writable: bool = False, create: bool = False
    ) -> File:
        """Opens a file in the lane's directory for copies within its first ``length`` bytes.

        The file may be shorter: a read past its end fails, and a write past its end extends it.

        Args:
            path: path relative to the directory.
            create: whether to create the file if it does not exist.

        Raises:
            OSError: see :func:`os.open`.
            ValueError: see :meth:`adopt`.
        """
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
        flags |= os.O_CREAT if create else 0
        flags |= os.O_DIRECT if self.direct else 0
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        fd = os.open(self.directory / path, flags | os.O_NONBLOCK, 0o600)
        try:
            os.set_blocking(fd, True)
            return self.adopt(fd, length)
        finally:
            os.close(fd)

    def adopt(self, fd: int, length: int) -> File:
        """Adds a file that is already open, like :meth:`open`; the lane duplicates ``fd``.

        Raises:
            OSError: no file descriptor is left.
            ValueError: the file is not open for reading, is open with O_APPEND, or is neither a
                regular file nor a device that can be read at an offset.
        """
        return File(self._engine, self._engine._core.file(self._file_lane, fd, length))

    def __repr__(self) -> str:
        return (
            f"FileLane({str(self.directory)!r}, depth={self.depth}, backend={self.backend!r}, "
            f"direct={self.direct})"
        )


def direct_alignment(directory: Path) -> tuple[int, int] | None:
    """Returns the alignment that O_DIRECT requires in ``directory``, as ``(memory, offset)`` bytes.

    Returns None if the file system does not serve direct I/O.

    Raises:
        OSError: the directory cannot be written to.
    """
    try:
        if not takes_direct_io(directory):
            return None
    except OSError as error:
        # Where there is no room for the test, existing files may have blocks.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    with tempfile.TemporaryFile(dir=directory) as file:
        return _transfer.direct_io(file.fileno())


class ThrottledLane:
    """A lane that is slowed down to the speed of another device; its measurements are emulated."""

    emulated = True

    def __init__(
        self,
        native: _transfer.ThrottledLane,
        inner: Lane,
        bytes_per_second: float,
        operations_per_second: float,
        latency: float,
    ) -> None:
        self._native: _transfer.Lane = native
        self.inner = inner
        self.bytes_per_second = bytes_per_second
        self.operations_per_second = operations_per_second
        self.latency = latency

    def __repr__(self) -> str:
        return (
            f"ThrottledLane(emulated: {self.bytes_per_second:g} bytes/s, "
            f"{self.operations_per_second:g} operations/s, {self.latency:g} s latency; "
            f"over {self.inner!r})"
        )


Lane: TypeAlias = HostLane | FileLane | CudaLane | ThrottledLane
