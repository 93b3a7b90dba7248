"""Files of stored contexts: their names, who may use them, and what is left of those not stored.

``<folder>/<name>.<device>.blocks`` is in every folder, and ``<name>.index`` in the first one, which
is written last: without it the others are nothing. Of the blocks those of the first folder are
written first and removed last, so that a look into it tells of all that has been left.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sgl_ext.errors import ExtError
from sgl_ext.own_files import make_own_folder, open_own

PREFIX = "stx-"
"""Of the names that servers give."""
_FOLDER = "sgl_ext-contexts"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_INDEX, _RECORDED, _FAILED, _SCRATCH = ".index", ".recorded", ".failed", ".tmp"


class UnknownContextError(ExtError):
    """No such name: it never was, has been deleted, or is another tenant's. Which, is not told."""

    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no stored context {name!r:.200}; store it again")


def own_folders(directories: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the folder of contexts in each directory, which only this user can enter.

    Raises:
        ExtError: it is not there and cannot be made, or is another user's.
    """
    folders = tuple(directory / _FOLDER for directory in directories)
    for folder in folders:
        try:
            make_own_folder(folder)
        except OSError as error:
            raise ExtError(
                f"cannot keep contexts in {folder}: {error.strerror}; the user of this server "
                "needs a directory to write to there, or name another one"
            ) from None
    return folders


def require(name: str, directories: Sequence[Path]) -> Path:
    """The index of a context.

    Raises:
        UnknownContextError: it is not there.
        ExtError: it cannot be looked for.
    """
    if not _NAME.fullmatch(name):
        raise UnknownContextError(name)
    path = index_file(directories[0], name)
    try:
        path.lstat()
    except FileNotFoundError:
        raise UnknownContextError(name) from None
    except OSError as error:
        raise ExtError(f"context {name} cannot be looked for: {error.strerror}") from None
    return path


def names(directories: Sequence[Path]) -> Iterator[str]:
    """Of all contexts that have an index."""
    for path in sorted(directories[0].glob(f"*{_INDEX}")):
        if _NAME.fullmatch(name := path.name.removesuffix(_INDEX)):
            yield name


def remove(name: str, directories: Sequence[Path]) -> None:
    """A context is no more, or has not come to be; its index goes first."""
    index_file(directories[0], name).unlink(missing_ok=True)
    _remove_written(name, directories[0])
    for at, directory in reversed([*enumerate(directories)]):
        block_file(directory, name, at).unlink(missing_ok=True)


def _remove_written(name: str, first: Path) -> None:
    """Returns the files of a context that exist only while it is being stored."""
    record, index = recorded_file(first, name), index_file(first, name)
    for path in (record, scratch_of(record), failed_file(first, name), scratch_of(index)):
        path.unlink(missing_ok=True)


@contextmanager
def storing(directory: Path) -> Iterator[None]:
    """Within it nobody sweeps contexts whose indexes are there.

    Raises:
        ExtError: somebody does at this moment.
    """
    with _locked(directory, fcntl.LOCK_SH) as ours:
        if not ours:
            raise ExtError("contexts are being cleaned by a server that starts: try again")
        yield


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[bool]:
    fd = open_own(directory / f"{PREFIX}lock")
    try:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def sweep(directories: Sequence[Path]) -> list[str]:
    """Removes what contexts have left that have not come to be; returns their names.

    Nothing, if anybody is :func:`storing` one. What lies in further directories is left alone where
    the first one has never heard of it: it may not be mounted, or be another one than it was.
    """
    with _locked(directories[0], fcntl.LOCK_EX) as ours:
        return _sweep(directories) if ours else []


def _sweep(directories: Sequence[Path]) -> list[str]:
    first = directories[0]
    stored = set(names(directories))
    found = {
        path.name.partition(".")[0]
        for path in first.glob(f"{PREFIX}*")
        if path.name.endswith((".0.blocks", _RECORDED, _FAILED, _SCRATCH))
    }
    for name in found & stored:
        _remove_written(name, first)
    for name in found - stored:
        remove(name, directories)
    return sorted(found - stored)


def new_id(name: str = "") -> str:
    """Of a context; no two are ever alike, since requests' KV is cached under it.

    Args:
        name: what it begins with, for people to know it by.
    """
    return PREFIX + (f"{name}-" if name else "") + secrets.token_urlsafe(12)


def scratch_of(path: Path) -> Path:
    """Returns the name that a file has until it is complete."""
    return path.with_name(path.name + _SCRATCH)


def index_file(directory: Path, name: str) -> Path:
    return directory / f"{name}{_INDEX}"


def recorded_file(directory: Path, name: str) -> Path:
    return directory / f"{name}{_RECORDED}"


def failed_file(directory: Path, name: str) -> Path:
    """Why there is no record, in a line."""
    return directory / f"{name}{_FAILED}"


def block_file(directory: Path, name: str, device: int) -> Path:
    return directory / f"{name}.{device}.blocks"
