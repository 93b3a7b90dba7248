"""A private directory for one launcher's sockets, removed with it.

SGLang makes its sockets with ``tempfile`` and leaves them, and kills its workers, who leave
shared memory named after their instance or process. All of it is removed when the launcher exits;
what a killed launcher left is removed by the next one of the same user.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_PREFIX = "sgl_ext-"
_NOTE = "shm-"
_SHARED_MEMORY = Path("/dev/shm")

_directory: Path | None = None


@contextmanager
def as_temporary_directory() -> Iterator[None]:
    """Makes ``tempfile`` use this launcher's directory inside the block."""
    before = tempfile.tempdir
    directory = _ensure()
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


def remember_instance(instance_id: str) -> None:
    """Notes an SGLang instance whose shared memory goes with the directory."""
    _remember(f"sglang_loads_{instance_id}_*")


def remember_worker(pid: int) -> None:
    """Notes a worker process whose shared memory goes with the directory."""
    _remember(f"sgl_shm_*_{pid}_*")


def _remember(segments: str) -> None:
    (_ensure() / f"{_NOTE}{segments}").touch()


def _ensure() -> Path:
    global _directory
    if _directory is None:
        parent = Path(tempfile.gettempdir())
        _remove_stale(parent)
        # The start time tells this process from an earlier one with the same number.
        started = int(psutil.Process().create_time() * 1000)
        name = f"{_PREFIX}{os.getpid()}-{started}-"
        _directory = Path(tempfile.mkdtemp(prefix=name, dir=parent))  # mode 0700
        atexit.register(_remove, _directory, os.getpid())
    return _directory


def _remove_stale(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*-*-*"):
        try:
            pid, started = map(int, directory.name.removeprefix(_PREFIX).split("-")[:2])
            ours = directory.stat().st_uid == os.getuid()
        except (ValueError, OSError):
            continue
        if ours and not _runs(pid, started):
            _remove(directory)


def _runs(pid: int, started: int) -> bool:
    try:
        return int(psutil.Process(pid).create_time() * 1000) == started
    except psutil.Error:
        return False


def _remove(directory: Path, only_in_process: int | None = None) -> None:
    if only_in_process not in (None, os.getpid()):
        return  # a fork of the launcher exits through the same atexit list
    for note in directory.glob(f"{_NOTE}*"):
        for segment in _SHARED_MEMORY.glob(note.name.removeprefix(_NOTE)):
            segment.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
