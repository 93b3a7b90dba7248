"""Files of stored contexts: their folders and names, and the removal of incomplete contexts.

Every folder has a file ``<folder>/<name>.<device>.blocks``, and the first one a ``<name>.index``,
which the second one has, too, if there are two copies of the blocks. Further extents are in
``<name>.<device>.<extent>.blocks``; contexts that share an extent have hard links to the same file.
The index is written last: without it the context does not exist. Among the files of blocks, the
first one of the first folder is created first and removed last, so that the first folder shows
every incomplete context.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sgl_ext.clusters.paths import (
    BLOCKS,
    INDEX,
    PREFIX,
    RECORDED,
    SCRATCH,
    block_file,
    index_file,
    record_folder,
    scratch_of,
)
from sgl_ext.clusters.records import KEPT_S, expire, remove_record, resumable
from sgl_ext.errors import ExtError, UnknownContextError
from sgl_ext.own_files import make_own_folder, open_own

_FOLDER = "sgl_ext-contexts"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
MOST_COPIES = 2
"""Maximum number of copies of a context's blocks, and of its index."""


def unknown(name: str) -> UnknownContextError:
    """Returns the error for a context that does not exist, or belongs to another tenant."""
    return UnknownContextError(f"stored context {name!r:.200} not found; store it again")


def own_folders(directories: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the folder of contexts in each directory, which only this user can enter.

    Missing folders are created.

    Raises:
        ExtError: A folder cannot be created, or belongs to another user.
    """
    folders = tuple(directory / _FOLDER for directory in directories)
    for folder in folders:
        try:
            make_own_folder(folder)
        except OSError as error:
            raise ExtError(
                f"cannot store contexts in {folder}: {error.strerror}; give the user of this "
                "server write permission there, or choose another directory"
            ) from None
    return folders


def require(name: str, directories: Sequence[Path]) -> list[Path]:
    """Returns the paths of a context's indexes, which are copies of each other.

    Raises:
        UnknownContextError: There is no index.
        ExtError: There is none where the index can be looked up.
    """
    if not _NAME.fullmatch(name):
        raise unknown(name)
    found, failed = [], None
    for device, directory in enumerate(directories[:MOST_COPIES]):
        path = index_file(directory, name)
        try:
            path.lstat()
            found.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            failed = failed or ExtError(
                f"cannot look up context {name} on device {device}: {error.strerror}; check the "
                "device"
            )
    if not found:
        raise failed or unknown(name)
    return found


def names(directories: Sequence[Path]) -> list[str]:
    """Returns the names of all contexts that have an index, sorted."""
    found = set()
    for directory in directories[:MOST_COPIES]:
        with suppress(OSError):  # the other one may have them
            found |= {path.name.removesuffix(INDEX) for path in directory.glob(f"*{INDEX}")}
    return sorted(name for name in found if _NAME.fullmatch(name))


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a device that has no room."""


def no_room(device: int, directory: Path, needed: int, error: OSError | None = None) -> ExtError:
    """Returns the error for a device that has no room for ``needed`` bytes of a context."""
    free = shutil.disk_usage(directory).free
    why = "" if error is None else f" ({error.strerror})"
    return ExtError(
        f"device {device} has not enough free space: the context needs {needed:,} B, {free:,} B "
        f"are free{why}; delete contexts, or configure larger or more directories"
    )


def require_writable(name: str, directories: Sequence[Path]) -> None:
    """Checks that the files of a context can be removed.

    Raises:
        ExtError: A folder cannot be reached, so that it may have files that would come back, or
            the file system that has one of them is read-only.
    """
    for device, directory in enumerate(directories):
        try:
            read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
            found = any(directory.glob(f"{name}.*"))
        except OSError as error:
            raise ExtError(
                f"context {name} cannot be deleted: device {device} cannot be reached "
                f"({error.strerror}); mount it, or restart the server if it is replaced, and "
                "delete the context again"
            ) from None
        if read_only and found:
            raise ExtError(
                f"context {name} cannot be deleted: the file system of device {device} is "
                "read-only; mount it writable, and delete the context again"
            )


def remove(name: str, directories: Sequence[Path]) -> None:
    """Removes all files of a context, complete or not; its index first."""
    remove_indexes(name, directories)
    remove_record(record_folder(directories[0], name))
    remove_blocks(name, directories)


def remove_indexes(name: str, directories: Sequence[Path]) -> None:
    """Removes the indexes of a context, without which it does not exist."""
    for directory in directories[:MOST_COPIES]:
        _remove(index_file(directory, name))


def remove_blocks(name: str, directories: Sequence[Path]) -> None:
    """Removes what was stored of a context that has no index; its record is kept."""
    _remove_scratch(name, directories)
    for at, directory in reversed([*enumerate(directories)]):
        for extent in directory.glob(f"{name}.{at}.*{BLOCKS}"):
            _remove(extent)
        _remove(block_file(directory, name, at))


def _remove_scratch(name: str, directories: Sequence[Path]) -> None:
    for directory in directories[:MOST_COPIES]:
        _remove(scratch_of(index_file(directory, name)))


def _remove(path: Path) -> None:
    """Removes a file if it exists. Where nothing can be written, ``unlink`` fails if it does not,
    too."""
    with suppress(FileNotFoundError):
        path.lstat()
        path.unlink()


@contextmanager
def storing(directory: Path) -> Iterator[None]:
    """Prevents a :func:`sweep` of contexts whose indexes are in ``directory``.

    Several processes may store contexts at once.

    Raises:
        ExtError: A sweep is in progress.
    """
    with _locked(directory, fcntl.LOCK_SH) as ours:
        if not ours:
            raise ExtError(
                "cannot store a context while a server that starts removes incomplete contexts; "
                "try again"
            )
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
    """Removes the files of contexts that were not stored completely; returns their names.

    Recent records that can go on are kept (:mod:`sgl_ext.clusters.records`). Removes nothing while
    a process is :func:`storing` a context. Files in further directories are kept if the first
    directory has no file of their context: it may not be mounted, or it may be another directory
    than before.
    """
    with _locked(directories[0], fcntl.LOCK_EX) as ours:
        return _sweep(directories) if ours else []


def _sweep(directories: Sequence[Path]) -> list[str]:
    first = directories[0]
    expire(first, KEPT_S)
    stored = set(names(directories))
    kept = {path.name.partition(".")[0] for path in resumable(first)}
    found = {
        path.name.partition(".")[0]
        for path in first.glob(f"{PREFIX}*")
        if path.name.endswith((f".0{BLOCKS}", RECORDED, SCRATCH))
    }
    for name in found & stored:
        remove_record(record_folder(first, name))
        _remove_scratch(name, directories)
    for name in found & kept - stored:
        remove_blocks(name, directories)
    for name in found - kept - stored:
        remove(name, directories)
    return sorted(found - kept - stored)
