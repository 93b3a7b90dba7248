"""Addresses on a CUDA device behind which memory of several processes can be put (SwiftCache §3.4).

The device's counterpart of :mod:`.mapping`, by the driver's virtual memory management: an owner
lends a piece of memory as a file descriptor, a borrower puts it behind addresses of its own, and an
owner that must have its room back puts other memory in its place, while what the borrower has
mapped stays what it was. Descriptors go from process to process over a Unix socket
(:func:`socket.send_fds`).

CUDA maps pieces as a whole only, so that an owner lends what it has made as pieces of their own.
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
    """CUmemAllocationProp."""

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
    """CUmemAccessDesc."""

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
    """Memory of a device cannot be had, lent or mapped: what was asked, what the driver said."""


@lru_cache(maxsize=4)
def _driver(library: str) -> ctypes.CDLL:
    try:
        found = ctypes.CDLL(library)
        for name, arguments in _FUNCTIONS.items():
            getattr(found, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise CudaMemoryError(
            f"the CUDA driver cannot lend memory: {error}; it needs a driver of CUDA 10.2 or later"
        ) from None
    _check(found, found.cuInit(0), "start")
    return found


def _check(driver: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, name)
        said = (name.value or b"an unknown error").decode()
        raise CudaMemoryError(f"the CUDA driver cannot {what}: {said} ({code})")


class CudaMemory:
    """A piece of a device's memory, which whoever has a descriptor of it can map.

    Physical memory is given back when this object and all mappings and descriptors are gone.

    Attributes:
        size: bytes, a multiple of the device's :func:`granularity`.
    """

    def __init__(self, driver: ctypes.CDLL, device: int, handle: int, size: int) -> None:
        self._driver, self._handle = driver, handle
        self.device, self.size = device, size
        # Not at exit, where the driver may be gone; the kernel gives the memory back then.
        weakref.finalize(self, driver.cuMemRelease, handle).atexit = False

    @classmethod
    def create(cls, device: int, size: int, *, library: str = "libcuda.so.1") -> CudaMemory:
        """New memory; what is in it is not said.

        Args:
            size: bytes; more are taken up to a multiple of the device's granularity.

        Raises:
            CudaMemoryError: no such device, or not so much memory on it.
        """
        driver = _driver(library)
        step = granularity(device, library=library)
        size = -(-max(size, 1) // step) * step
        handle = _Handle()
        code = driver.cuMemCreate(handle, size, _properties(device), 0)
        _check(driver, code, f"take {size:,} B of device {device}")
        return cls(driver, device, handle.value, size)

    @classmethod
    def of(
        cls, descriptor: int, device: int, size: int, *, library: str = "libcuda.so.1"
    ) -> CudaMemory:
        """Memory that another process of this user has lent.

        Args:
            descriptor: of it; still the caller's to close.
            size: bytes that it is said to have; a mapping refuses another size.

        Raises:
            CudaMemoryError: it is no memory of this machine's devices.
        """
        driver, handle = _driver(library), _Handle()
        at = ctypes.c_void_p(descriptor)
        code = driver.cuMemImportFromShareableHandle(handle, at, _POSIX_DESCRIPTOR)
        _check(driver, code, f"take descriptor {descriptor} as memory")
        return cls(driver, device, handle.value, size)

    def descriptor(self) -> int:
        """A new descriptor of it, the caller's to close.

        Raises:
            CudaMemoryError: the driver gives none.
        """
        found = _Descriptor(-1)
        driver = self._driver
        code = driver.cuMemExportToShareableHandle(found, self._handle, _POSIX_DESCRIPTOR, 0)
        _check(driver, code, f"lend {self.size:,} B of device {self.device}")
        os.set_inheritable(found.value, False)
        return found.value

    def map_at(self, address: int) -> None:
        """For :class:`CudaMapping`: behind these addresses, for its device to read and write."""
        driver, size = self._driver, self.size
        what = f"map {size:,} B of device {self.device}"
        _check(driver, driver.cuMemMap(address, size, 0, self._handle, 0), what)
        access = _Access(_Location(_DEVICE, self.device), _READ_WRITE)
        if code := driver.cuMemSetAccess(address, size, access, 1):
            driver.cuMemUnmap(address, size)
            _check(driver, code, what)


class CudaMapping:
    """Addresses of a device, which torch takes as one ``uint8`` tensor (``torch.as_tensor``).

    What is put or dropped must not be in use by a kernel or a copy at that moment: wait for the
    device first. The tensor keeps this object.

    Args:
        size: bytes of addresses, taken up to a multiple of the device's granularity.

    Raises:
        CudaMemoryError: no such device, or no addresses.
    """

    def __init__(self, device: int, size: int, *, library: str = "libcuda.so.1") -> None:
        driver = self._driver = _driver(library)
        step = granularity(device, library=library)
        self.size = -(-max(size, 1) // step) * step
        address = _Address()
        code = driver.cuMemAddressReserve(address, self.size, 0, 0, 0)
        _check(driver, code, f"reserve {self.size:,} B of addresses")
        self.address: int = address.value
        self.device = device
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

    def put(self, offset: int, memory: CudaMemory) -> None:
        """Puts a piece at ``offset``, in place of what is there.

        Raises:
            ValueError: it does not fit, or would cut another piece; nothing has changed.
            CudaMemoryError: the driver cannot; nothing is there then.
        """
        self.drop(offset, memory.size)
        memory.map_at(self.address + offset)
        self._pieces[offset] = memory

    def drop(self, offset: int, size: int) -> None:
        """There is nothing at ``[offset, offset + size)`` any more; its addresses stay taken.

        Raises:
            ValueError: not within this mapping, or only a part of a piece; nothing has changed.
            CudaMemoryError: the driver cannot.
        """
        end = offset + size
        if not (0 <= offset < end <= self.size):
            raise ValueError(f"bytes {offset:,} to {end:,} are not within {self.size:,}")
        inside = []
        for first, piece in self._pieces.items():
            last = first + piece.size
            if offset <= first and last <= end:
                inside.append(first)
            elif first < end and offset < last:
                raise ValueError(
                    f"bytes {offset:,} to {end:,} would cut what lies at {first:,} to {last:,}"
                )
        for first in inside:
            piece = self._pieces[first]
            code = self._driver.cuMemUnmap(self.address + first, piece.size)
            _check(self._driver, code, f"take {piece.size:,} B from their addresses")
            del self._pieces[first]


@lru_cache(maxsize=64)
def granularity(device: int, *, library: str = "libcuda.so.1") -> int:
    """Bytes of which pieces of a device's memory are multiples.

    Raises:
        CudaMemoryError: no such device.
    """
    driver, found = _driver(library), ctypes.c_size_t()
    code = driver.cuMemGetAllocationGranularity(found, _properties(device), 0)
    _check(driver, code, f"say how device {device} lends memory")
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
