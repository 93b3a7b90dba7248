"""Private directory for one launcher's sockets, which is removed with the launcher.

SGLang creates its sockets with ``tempfile`` and does not remove them. It kills its workers, which
leave shared memory named after their instance or process. All of it is removed when the launcher
exits. A launcher holds a lock in its directory. The directory of a killed launcher is not locked
any more, and the next launcher of the same user removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from sgl_ext.errors import ExtError

_PREFIX = "sgl_ext-"
_LOCK = "lock"
_NOTE = "shm-"
_WORKER = "sgl_shm_*_"
_SHARED_MEMORY = Path("/dev/shm")
_LONGEST_SOCKET_PATH = 107
_GRACE_S = 60.0
"""Minimum age of a directory that is removed, in seconds.

A younger directory may belong to a launcher that is about to lock it.
"""

_creation = threading.Lock()
_directory: Path | None = None
_lock: IO[str] | None = None


@contextmanager
def as_temporary_directory() -> Iterator[None]:
    """Makes ``tempfile`` use this launcher's directory inside the block.

    Raises:
        ExtError: the temporary directory's path is too long for a socket in it.
    """
    before = tempfile.tempdir
    directory = _ensure()
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


def remember_instance(instance_id: str) -> None:
    """Records an SGLang instance whose shared memory is removed with the directory."""
    _remember(f"sglang_loads_{instance_id}_*")


def remember_worker(pid: int) -> None:
    """Records a worker process whose shared memory is removed with the directory."""
    _remember(f"{_WORKER}{pid}_*")


def subdirectory() -> Path:
    """Creates a directory for a server that this process starts, inside the process's directory.

    It is removed with the process's directory.
    """
    return Path(tempfile.mkdtemp(dir=_ensure()))


def _remember(segments: str) -> None:
    (_ensure() / f"{_NOTE}{segments}").touch()


def _ensure() -> Path:
    with _creation:
        return _directory or _created()


def _created() -> Path:
    global _directory, _lock
    parent = Path(tempfile.gettempdir())
    _remove_stale(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
    if len(str(directory / "tmp01234567")) > _LONGEST_SOCKET_PATH:
        directory.rmdir()
        raise ExtError(
            f"the temporary directory {parent} is too long for the path of a socket (at most "
            f"{_LONGEST_SOCKET_PATH} characters with the socket); set TMPDIR to a shorter one"
        )
    _lock = (directory / _LOCK).open("w")
    fcntl.flock(_lock, fcntl.LOCK_EX)
    _directory = directory
    atexit.register(_remove_own, os.getpid())
    return directory


def _remove_own(owner: int) -> None:
    # A forked child of the launcher runs the same exit handlers.
    if _directory is not None and os.getpid() == owner:
        _remove(_directory)


def _remove_stale(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = directory.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _GRACE_S:
                continue
            with (directory / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory, stale=True)


def _remove(directory: Path, *, stale: bool = False) -> None:
    """Removes the directory and the shared memory that is recorded in it."""
    for note in directory.rglob(f"{_NOTE}*"):
        segments = note.name.removeprefix(_NOTE)
        if stale and _worker_lives(segments):
            continue
        for segment in _SHARED_MEMORY.glob(segments):
            with suppress(OSError):
                segment.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _worker_lives(segments: str) -> bool:
    """Returns whether a process has the number of the worker that the pattern names.

    Such a process belongs to another server, which received the number since. Instances have no
    process: an identifier may consist of digits only, and of more than a process id has.
    """
    if not segments.startswith(_WORKER):
        return False
    number = segments.removeprefix(_WORKER).strip("_*")
    return number.isdigit() and psutil.pid_exists(int(number))
