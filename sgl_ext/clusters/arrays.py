"""Arrays and their description in a safetensors file of which every byte is verified.

The metadata holds a JSON text with the version, the description and a digest of each array, and a
digest of that text. A reader of the header, or of some of the arrays, can therefore verify what it
reads. A digest is not a signature, so shapes and ranges of the data are checked as well.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from sgl_ext.decoding import decode
from sgl_ext.errors import ExtError, reason_of
from sgl_ext.own_files import open_own

VERSION = 5
_PLANTED = {errno.EPERM, errno.ELOOP}
"""Errors of :func:`~sgl_ext.own_files.open_own` for links, devices and files of other users."""
_LARGEST_HEADER = 1 << 20
_READ = 1 << 30
"""Largest size of one read, in bytes."""
_DTYPES = {"U8": "|u1", "U16": "<u2", "I32": "<i4", "F32": "<f4", "I64": "<i8", "U64": "<u8"}
"""Dtypes that can be read, by their name in safetensors."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Arrays = dict[str, NDArray[Any]]
Shapes = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
"""Dtype and shape of each array, by its name."""
About = TypeVar("About", bound=msgspec.Struct)
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class DamagedError(ExtError):
    """Error for a file that is missing, damaged, of another format or of another version."""


class UnreadableError(ExtError):
    """Error for a file that cannot be read now, so that nobody knows whether it is damaged."""

    status = 503


class _Header(msgspec.Struct):
    version: int
    about: msgspec.Raw
    digests: dict[str, str]
    """Digest of each array, by its name."""


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    sgl_ext: str
    """JSON text of the :class:`_Header`."""
    digest: str
    """Digest of that text."""


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def save(arrays: Arrays, path: Path, about: msgspec.Struct) -> None:
    """Writes arrays and their description to a file that only this user can access.

    Raises:
        OSError: The file cannot be written.
    """
    # Written here, because the library writes to a temporary file of its own, which stays if the
    # process is killed, and hides the system's error.
    ordered = sorted(arrays.items(), key=lambda each: -each[1].itemsize)  # so that all are aligned
    contiguous = {name: np.ascontiguousarray(array) for name, array in ordered}
    digests = {name: _digest(array) for name, array in contiguous.items()}
    text = msgspec.json.encode({"version": VERSION, "about": about, "digests": digests}).decode()
    header: dict[str, object] = {"__metadata__": _Metadata(text, _digest_of(text))}
    at = 0
    for name, array in contiguous.items():
        offsets = at, (at := at + array.nbytes)
        header[name] = _Tensor(_NAMES[array.dtype.str], array.shape, offsets)
    raw = msgspec.json.encode(header)
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        path.chmod(0o600)
        file.write(len(raw).to_bytes(8, "little") + raw)
        for array in contiguous.values():
            file.write(array.reshape(-1).view(np.uint8).data)


def load(path: Path, kind: type[About], shapes: Callable[[About], Shapes]) -> tuple[Arrays, About]:
    """Reads and verifies a file that :func:`save` wrote.

    Args:
        kind: Type of the description.
        shapes: Returns the expected dtypes and shapes for a description. It is called before any
            array is read, and may raise ExtError.

    Returns:
        The arrays by name, and their description.

    Raises:
        DamagedError: The file is missing, is damaged, has other arrays or is of another version.
        UnreadableError: The file cannot be read now.
    """
    file = ArrayFile(path, kind, shapes)
    return {name: file.read(name) for name in file.shapes}, file.about


class ArrayFile(Generic[About]):
    """File that :func:`save` wrote, of which single arrays are read. Threads may read at once.

    The arguments and errors are those of :func:`load`.

    Attributes:
        about: Description of the arrays.
        shapes: Dtype and shape of each array, by its name.
    """

    def __init__(self, path: Path, kind: type[About], shapes: Callable[[About], Shapes]) -> None:
        self._path = path
        with _opened(path) as fd:
            header, tensors, start = _read_header(path, fd)
            self.about: About = decode(header.about, kind)
            self.shapes = shapes(self.about)
            _require_shapes(tensors, self.shapes, os.fstat(fd).st_size - start)
            if header.digests.keys() != self.shapes.keys():
                raise ValueError("it has other checksums than arrays")
        self._digests = header.digests
        self._offsets = {name: start + each.data_offsets[0] for name, each in tensors.items()}

    def read(self, name: str, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """Reads and verifies an array.

        Args:
            into: Contiguous array for it, of its dtype and shape; a new one if None.

        Raises:
            DamagedError: See :func:`load`.
            UnreadableError: See :func:`load`.
        """
        dtype, shape = self.shapes[name]
        with _opened(self._path) as fd:
            array = np.empty(shape, dtype) if into is None else into
            _read(fd, self._offsets[name], array)
        if _digest(array) != self._digests[name]:
            raise _differing(self._path)
        return array


def load_about(path: Path, kind: type[About]) -> About:
    """Reads the description of the arrays, without the arrays.

    Raises:
        DamagedError: See :func:`load`.
        UnreadableError: See :func:`load`.
    """
    with _opened(path) as fd:
        return decode(_read_header(path, fd)[0].about, kind)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = open_own(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)
    except (FileNotFoundError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise DamagedError(
            f"{path.name} is not a context file of sgl_ext: {reason_of(error)}; store the context "
            "again"
        ) from None
    except MemoryError:
        raise UnreadableError(
            f"{path.name} cannot be read: there is too little memory; free some, and try again"
        ) from None
    except OSError as error:
        if error.errno in _PLANTED:
            raise DamagedError(f"{path.name} is no file of sgl_ext: {reason_of(error)}") from None
        raise UnreadableError(
            f"{path.name} cannot be read: {reason_of(error)}; check the device, and try again, or "
            "remove the files of this name there"
        ) from None


def _differing(path: Path) -> DamagedError:
    return DamagedError(f"{path.name} is damaged (its checksum differs); store the context again")


def _read_header(path: Path, fd: int) -> tuple[_Header, dict[str, _Tensor], int]:
    """Returns the header, the tensors by name, and the offset of their data in the file."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= _LARGEST_HEADER:
        raise ValueError(f"its header has an invalid length of {length} B")
    found = decode(os.pread(fd, length, 8), dict[str, msgspec.Raw])
    if "__metadata__" not in found:
        raise ValueError("it has no metadata")
    metadata = decode(found.pop("__metadata__"), _Metadata)
    if _digest_of(metadata.sgl_ext) != metadata.digest:
        raise _differing(path)
    header = decode(metadata.sgl_ext, _Header)
    if header.version != VERSION:
        raise DamagedError(
            f"{path.name} has format version {header.version}, but sgl_ext reads version "
            f"{VERSION}; store the context again"
        )
    tensors = {name: decode(raw, _Tensor) for name, raw in found.items()}
    return header, tensors, 8 + length


def _require_shapes(tensors: Mapping[str, _Tensor], expected: Shapes, size: int) -> None:
    """Raises ValueError unless there are exactly the expected arrays, in ``size`` bytes."""
    if tensors.keys() != expected.keys():
        raise ValueError(
            f"it has the arrays {', '.join(sorted(tensors))}, expected "
            f"{', '.join(sorted(expected))}"
        )
    for name, (dtype, shape) in expected.items():
        tensor = tensors[name]
        if _DTYPES.get(tensor.dtype) != np.dtype(dtype).str or tensor.shape != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{np.dtype(dtype).name} {list(shape)}"
            )
    at = 0
    for tensor in sorted(tensors.values(), key=lambda each: each.data_offsets):
        length = math.prod(tensor.shape) * np.dtype(_DTYPES[tensor.dtype]).itemsize
        if tensor.data_offsets != (at, at + length):
            raise ValueError("its arrays are not contiguous")
        at += length
    if at != size:
        raise ValueError(f"its arrays take {at:,} B, expected {size:,} B")


def _read(fd: int, offset: int, array: NDArray[Any]) -> None:
    """Reads a contiguous array from ``offset``.

    The file is not mapped, because a mapping ends the process if the file becomes shorter.
    """
    left = array.reshape(-1).view(np.uint8)
    while len(left):
        count = os.preadv(fd, [left[:_READ].data], offset)
        if not count:
            raise ValueError("it was truncated while it was read")
        left, offset = left[count:], offset + count


def _digest(array: NDArray[Any]) -> str:
    found = xxhash.xxh3_64(f"{array.dtype.str} {array.shape}".encode())
    found.update(array.data)
    return found.hexdigest()


def _digest_of(text: str) -> str:
    return xxhash.xxh3_64(text.encode()).hexdigest()
