"""Records of contexts that are being stored: who adds to one, how long it is kept, its removal."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sgl_ext.clusters.paths import PREFIX, RECORDED, new_id, record_folder, scratch_of
from sgl_ext.own_files import make_own_folder, open_own

KEPT_S = 86_400.0
"""Time in seconds that an interrupted record is kept after its latest part."""
_KEY = "key"


@contextmanager
def claimed(directory: Path, key: str) -> Iterator[tuple[str, Path]]:
    """Yields the id of a context and the folder of its record, which no other process gets.

    It is a record with the same key that was interrupted, or else a new one.

    Args:
        key: digest of the model, the token ids, the size of the parts and the tenant.

    Raises:
        OSError: The folder cannot be created.
    """
    for folder in records(directory):
        if (fd := _claim(folder)) is not None:
            try:
                if os.pread(fd, len(key) + 1, 0) == key.encode():
                    yield folder.name.removesuffix(RECORDED), folder
                    return
            finally:
                os.close(fd)
    folder = record_folder(directory, id_ := new_id())
    fd = _made(folder, key)
    try:
        yield id_, folder
    finally:
        os.close(fd)


def _made(folder: Path, key: str) -> int:
    """Makes and locks a record; leaves nothing if the device has no room for it."""
    try:
        make_own_folder(folder)
        fd = open_own(folder / _KEY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, key.encode())
        except BaseException:
            os.close(fd)
            raise
    except OSError:
        remove_record(folder)
        raise
    return fd


def expire(directory: Path, seconds: float) -> None:
    """Removes interrupted records to which nothing was added for ``seconds``."""
    for folder in records(directory):
        if (fd := _claim(folder)) is not None:
            try:
                with suppress(FileNotFoundError):
                    if time.time() - folder.stat().st_mtime >= seconds:
                        remove_record(folder)
            finally:
                os.close(fd)


def resumable(directory: Path) -> list[Path]:
    """Returns the records that :func:`claimed` can go on with, in use or not."""
    return [each for each in records(directory) if (each / _KEY).is_file()]


def records(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"{PREFIX}*{RECORDED}"))


def _claim(folder: Path) -> int | None:
    """Locks a record; None if another process has locked it, or it cannot go on."""
    try:
        fd = open_own(folder / _KEY, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def remove_record(folder: Path) -> None:
    """Removes the record of a context if it exists, even while a part of it is written."""
    gone = scratch_of(folder)
    _discard(gone)
    with suppress(FileNotFoundError):
        folder.rename(gone)  # from here on no part can be added
    _discard(gone)


def _discard(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
