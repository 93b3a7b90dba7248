"""Socket directory in which the engines of one user on one host find each other."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import IO

from sgl_ext.errors import ExtError

_SOCKET, _LOCK = "master", "lock"
_LONGEST_SOCKET_PATH = 107


class DirectoryError(ExtError):
    """Error raised when a socket directory cannot be used; the message says what was found."""


def address(directory: Path) -> str:
    """Returns the ZeroMQ address of the directory's master, and creates the directory if needed.

    Raises:
        DirectoryError: the directory cannot be created, belongs to another user or is accessible to
            others, or its path is too long.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise DirectoryError(
            f"the socket directory {directory} cannot be created: {error.strerror}; choose "
            "another directory"
        ) from None
    if status.st_uid != os.getuid():
        raise DirectoryError(
            f"the socket directory {directory} belongs to user {status.st_uid}, but this process "
            f"runs as user {os.getuid()}, and only engines of the same user lend to each other; "
            "choose another directory"
        )
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        raise DirectoryError(
            f"the socket directory {directory} has mode {mode:04o}, which gives other users "
            "access; run chmod 700 on it"
        )
    return f"ipc://{socket_path(directory)}"


def socket_path(directory: Path) -> Path:
    """Returns the path of the socket of the directory's master; the directory need not exist.

    Raises:
        DirectoryError: the path is too long.
    """
    path = directory.resolve() / _SOCKET
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise DirectoryError(
            f"{path} is too long for a socket (at most {_LONGEST_SOCKET_PATH} bytes); choose a "
            "shorter directory"
        )
    return path


def lock(directory: Path) -> IO[str]:
    """Makes this process the directory's master for as long as the returned file is open.

    Raises:
        DirectoryError: the directory already has a master, its lock file cannot be opened, or its
            file system does not support locks.
    """
    try:
        file = (directory / _LOCK).open("a+")
    except OSError as error:
        raise DirectoryError(f"{directory / _LOCK} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise DirectoryError(
            f"the socket directory {directory} already has a master (process {holder}); choose "
            "another directory, or make this engine a worker"
        ) from None
    except OSError as error:
        file.close()
        raise DirectoryError(
            f"{directory / _LOCK} cannot be locked: {error.strerror}; choose another directory"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
