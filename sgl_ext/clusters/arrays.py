"""Arrays, and what they are of, in a file of safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sgl_ext.errors import ExtError

VERSION = 2
_ABOUT = "sgl_ext"

Arrays = dict[str, NDArray[Any]]
About = TypeVar("About", bound=msgspec.Struct)


class _Header(msgspec.Struct):
    version: int
    about: msgspec.Raw
    digest: str
    """Of all arrays."""


def save(arrays: Arrays, path: Path, about: msgspec.Struct) -> None:
    """Writes a file that is the user's alone.

    Raises:
        OSError: it cannot be written.
    """
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = {"version": VERSION, "about": about, "digest": _digest(contiguous)}
    text = msgspec.json.encode(header).decode()
    try:
        save_file(contiguous, path, metadata={_ABOUT: text})
        path.chmod(0o600)
    except SafetensorError as error:  # it hides what the system has said
        raise OSError(f"{path}: {error}") from None


def load(path: Path, kind: type[About]) -> tuple[Arrays, About]:
    """What :func:`save` wrote.

    Raises:
        ExtError: nothing of the kind is there, or of another version.
    """
    with _opened(path) as file:
        header = _header(path, file)
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _digest(arrays) != header.digest:
            raise ExtError(f"{path} is not what was written; store the context again")
        return arrays, msgspec.json.decode(header.about, type=kind)


def load_about(path: Path, kind: type[About]) -> About:
    """What the arrays are of; reads none of them.

    Raises:
        ExtError: see :func:`load`.
    """
    with _opened(path) as file:
        return msgspec.json.decode(_header(path, file).about, type=kind)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise ExtError(f"{path} is no context of sgl_ext: {error}") from None


def _header(path: Path, file: Any) -> _Header:
    header = msgspec.json.decode((file.metadata() or {}).get(_ABOUT, ""), type=_Header)
    if header.version != VERSION:
        raise ExtError(
            f"{path} is of version {header.version}, this is version {VERSION}; store the context "
            "again"
        )
    return header


def _digest(arrays: Arrays) -> str:
    found = xxhash.xxh3_64()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype.str} {array.shape}".encode())
        found.update(array.data)
    return found.hexdigest()
