"""Names of the files of stored contexts and of their records."""

from __future__ import annotations

import secrets
from pathlib import Path

PREFIX = "stx-"
"""Prefix of generated names of contexts."""
PART = ".part"
"""Suffix of the files of a record."""
INDEX, BLOCKS, RECORDED, SCRATCH = ".index", ".blocks", ".recorded", ".tmp"
"""Suffixes of an index file, a block file, a record folder and an incomplete file or folder."""
_FAILED = ".failed"
RESERVED = 4096
"""Bytes of the file that :func:`reserve_file` names."""


def new_id(name: str = "") -> str:
    """Returns a new id of a context.

    An id is never used twice, because the KV of requests is cached under it.

    Args:
        name: Beginning of the id after :data:`PREFIX`, by which people recognise it.
    """
    return PREFIX + (f"{name}-" if name else "") + secrets.token_urlsafe(12)


def scratch_of(path: Path) -> Path:
    """Returns the path that a file has until it is complete."""
    return path.with_name(path.name + SCRATCH)


def index_file(directory: Path, name: str) -> Path:
    return directory / f"{name}{INDEX}"


def record_folder(directory: Path, name: str) -> Path:
    """Returns the folder with the record of a context, which exists until it is stored."""
    return directory / f"{name}{RECORDED}"


def part_file(record: Path, part: str) -> Path:
    return record / f"{part}{PART}"


def failed_file(part: Path) -> Path:
    """Returns the path of the file that says in one line why a part of a record is missing."""
    return part.with_name(part.name + _FAILED)


def reserve_file(record: Path) -> Path:
    """Returns the path of a file of :data:`RESERVED` bytes, which becomes the one that says why a
    part is missing: the device may have no room for a new one then."""
    return record / "reserve"


def block_file(directory: Path, name: str, device: int, extent: int = 0) -> Path:
    return directory / f"{name}.{device}{f'.{extent}' if extent else ''}{BLOCKS}"
