"""CUDA address range into which memory of several processes can be mapped (SwiftCache §3.4).

This is the counterpart of :mod:`.mapping` for device memory and uses the driver's virtual memory
management. An owner lends a piece of memory as a file descriptor, and a borrower maps it at its own
addresses. An owner that must reclaim its addresses maps other memory in their place; the borrower's
mapping does not change. Processes pass descriptors over a Unix socket (:mod:`.descriptors`).

CUDA maps a piece only as a whole, so an owner allocates each part that it will lend as a separate
piece.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sgl_ext.errors import ExtError

_POSIX_DESCRIPTOR = 1
_PINNED = 1
_DEVICE = 1
_READ_WRITE = 3

_Address = ctypes.c_uint64
_Handle = ctypes.c_uint64
_Descriptor = ctypes.c_int


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The driver's ``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """The driver's ``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_size = ctypes.c_size_t
_pointer = ctypes.POINTER
_FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorName": [ctypes.c_int, _pointer(ctypes.c_char_p)],
    "cuMemGetAllocationGranularity": [_pointer(_size), _pointer(_Properties), ctypes.c_int],
    "cuMemAddressReserve": [_pointer(_Address), _size, _size, _Address, ctypes.c_uint64],
    "cuMemAddressFree": [_Address, _size],
    "cuMemCreate": [_pointer(_Handle), _size, _pointer(_Properties), ctypes.c_uint64],
    "cuMemRelease": [_Handle],
    "cuMemMap": [_Address, _size, _size, _Handle, ctypes.c_uint64],
    "cuMemUnmap": [_Address, _size],
    "cuMemSetAccess": [_Address, _size, _pointer(_Access), _size],
    "cuMemExportToShareableHandle": [_pointer(_Descriptor), _Handle, ctypes.c_int, ctypes.c_uint64],
    "cuMemImportFromShareableHandle": [_pointer(_Handle), ctypes.c_void_p, ctypes.c_int],
}  # fmt: skip


class CudaMemoryError(ExtError):
    """Error raised when device memory cannot be allocated, lent or mapped.

    The message says what was asked and what the driver answered.
    """


@lru_cache(maxsize=4)
def _driver(library: str) -> ctypes.CDLL:
    try:
        found = ctypes.CDLL(library)
        for name, arguments in _FUNCTIONS.items():
            getattr(found, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise CudaMemoryError(
            f"the CUDA driver cannot share memory: {error}; install a driver of CUDA 10.2 or later"
        ) from None
    _check(found, found.cuInit(0), "initialize")
    return found


def _check(driver: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, name)
        said = (name.value or b"an unknown error").decode()
        raise CudaMemoryError(f"the CUDA driver cannot {what}: {said} ({code})")


class CudaMemory:
    """A piece of device memory that any process with a descriptor of it can map.

    The physical memory is freed when this object, all mappings and all descriptors are gone.

    Attributes:
        device: number of the CUDA device.
        size: bytes; for created memory a multiple of the device's :func:`granularity`.
    """

    def __init__(self, driver: ctypes.CDLL, device: int, handle: int, size: int) -> None:
        self._driver, self._handle = driver, handle
        self.device, self.size = device, size
        # Not at exit: the driver may be unloaded by then, and the kernel frees the memory.
        weakref.finalize(self, driver.cuMemRelease, handle).atexit = False

    @classmethod
    def create(cls, device: int, size: int, *, library: str = "libcuda.so.1") -> CudaMemory:
        """Allocates device memory with undefined contents.

        Args:
            size: bytes, rounded up to a multiple of the device's granularity.

        Raises:
            CudaMemoryError: the device does not exist or has too little free memory.
        """
        driver = _driver(library)
        step = granularity(device, library=library)
        size = -(-max(size, 1) // step) * step
        handle = _Handle()
        code = driver.cuMemCreate(handle, size, _properties(device), 0)
        _check(driver, code, f"allocate {size:,} B on device {device}")
        return cls(driver, device, handle.value, size)

    @classmethod
    def of(
        cls, descriptor: int, device: int, size: int, *, library: str = "libcuda.so.1"
    ) -> CudaMemory:
        """Imports memory that another process of this user has lent.

        Args:
            descriptor: file descriptor of the memory; the caller still closes it.
            size: bytes, as the lender reported; mapping the memory fails if the size is wrong.

        Raises:
            CudaMemoryError: the descriptor does not refer to memory of this machine's devices.
        """
        driver, handle = _driver(library), _Handle()
        at = ctypes.c_void_p(descriptor)
        code = driver.cuMemImportFromShareableHandle(handle, at, _POSIX_DESCRIPTOR)
        _check(driver, code, f"import descriptor {descriptor} as memory")
        return cls(driver, device, handle.value, size)

    def descriptor(self) -> int:
        """Returns a new file descriptor of the memory, which the caller closes.

        Raises:
            CudaMemoryError: the driver cannot export the memory.
        """
        found = _Descriptor(-1)
        driver = self._driver
        code = driver.cuMemExportToShareableHandle(found, self._handle, _POSIX_DESCRIPTOR, 0)
        _check(driver, code, f"export {self.size:,} B of device {self.device}")
        os.set_inheritable(found.value, False)
        return found.value

    def map_at(self, address: int) -> None:
        """Maps the memory at ``address``, readable and writable by its device.

        Only :class:`CudaMapping` calls this.

        Raises:
            CudaMemoryError: the driver cannot map it.
        """
        driver, size = self._driver, self.size
        what = f"map {size:,} B of device {self.device}"
        _check(driver, driver.cuMemMap(address, size, 0, self._handle, 0), what)
        access = _Access(_Location(_DEVICE, self.device), _READ_WRITE)
        if code := driver.cuMemSetAccess(address, size, access, 1):
            driver.cuMemUnmap(address, size)
            _check(driver, code, what)


class CudaMapping:
    """Address range on a device that torch reads as one ``uint8`` tensor (``torch.as_tensor``).

    No kernel or copy may use an address range while it is put or dropped: wait for the device
    first. The tensor keeps this object alive.

    Args:
        device: number of the CUDA device.
        size: bytes of addresses, rounded up to a multiple of the device's granularity.
        library: path of the CUDA driver, with which the mapped memory is made, too.

    Raises:
        CudaMemoryError: the device does not exist, or no addresses are left.
    """

    def __init__(self, device: int, size: int, *, library: str = "libcuda.so.1") -> None:
        driver = self._driver = _driver(library)
        step = granularity(device, library=library)
        self.size = -(-max(size, 1) // step) * step
        address = _Address()
        code = driver.cuMemAddressReserve(address, self.size, 0, 0, 0)
        _check(driver, code, f"reserve {self.size:,} B of address space")
        self.address: int = address.value
        self.device, self.library = device, library
        self._pieces: dict[int, CudaMemory] = {}
        weakref.finalize(
            self, _free, driver.cuMemUnmap, driver.cuMemAddressFree, self.address, self.size,
            self._pieces,
        ).atexit = False  # fmt: skip
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.size,),
            "data": (self.address, False),
            "strides": None,
        }

    @property
    def pieces(self) -> dict[int, CudaMemory]:
        """The mapped pieces by offset."""
        return dict(self._pieces)

    def put(self, offset: int, memory: CudaMemory) -> None:
        """Maps a piece at ``offset``, in place of the pieces that are mapped there.

        Raises:
            ValueError: the piece does not fit, or would cut another piece; nothing has changed.
            CudaMemoryError: the driver cannot map the piece, and nothing is mapped there then; or
                it cannot unmap a piece that was there.
        """
        self.drop(offset, memory.size)
        memory.map_at(self.address + offset)
        self._pieces[offset] = memory

    def drop(self, offset: int, size: int) -> None:
        """Unmaps the pieces in ``[offset, offset + size)``; the addresses stay reserved.

        Raises:
            ValueError: the range leaves this mapping, or contains only a part of a piece; nothing
                has changed.
            CudaMemoryError: the driver cannot unmap a piece.
        """
        end = offset + size
        if not (0 <= offset < end <= self.size):
            raise ValueError(
                f"bytes {offset:,} to {end:,} are outside the mapping of {self.size:,} B"
            )
        inside = []
        for first, piece in self._pieces.items():
            last = first + piece.size
            if offset <= first and last <= end:
                inside.append(first)
            elif first < end and offset < last:
                raise ValueError(
                    f"bytes {offset:,} to {end:,} contain only a part of the piece at {first:,} "
                    f"to {last:,}"
                )
        for first in inside:
            piece = self._pieces[first]
            code = self._driver.cuMemUnmap(self.address + first, piece.size)
            _check(self._driver, code, f"unmap {piece.size:,} B")
            del self._pieces[first]


@lru_cache(maxsize=64)
def granularity(device: int, *, library: str = "libcuda.so.1") -> int:
    """Returns the granularity of pieces of a device's memory, in bytes.

    Raises:
        CudaMemoryError: the device does not exist.
    """
    driver, found = _driver(library), ctypes.c_size_t()
    code = driver.cuMemGetAllocationGranularity(found, _properties(device), 0)
    _check(driver, code, f"report the allocation granularity of device {device}")
    return found.value


def _properties(device: int) -> _Properties:
    return _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_DEVICE, device))


def _free(
    unmap: Callable[[int, int], int],
    free: Callable[[int, int], int],
    address: int,
    size: int,
    pieces: dict[int, CudaMemory],
) -> None:
    for offset, piece in pieces.items():
        unmap(address + offset, piece.size)
    pieces.clear()
    free(address, size)
