"""Files and folders that belong to this user alone and are not links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(file: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Opens a regular file of this user; by default for reading and writing, created if missing.

    The mode of the file becomes 0600.

    Raises:
        OSError: The file cannot be opened, is a link or a device, or belongs to another user.
    """
    # Another user who may write to the directory may have put a link or a device there.
    opened = os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(
                errno.EPERM, "it is not a regular file that this user owns", str(file)
            )
        if stat.S_IMODE(status.st_mode) != 0o600:
            os.fchmod(opened, 0o600)
    except BaseException:
        os.close(opened)
        raise
    return opened


def flush(path: Path) -> None:
    """Flushes a file or a directory to its device, so that it survives a power failure."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_own_folder(folder: Path) -> None:
    """Creates a folder that only this user can enter; an existing one gets the mode 0700.

    Raises:
        OSError: The folder cannot be created, belongs to another user, or is a link or a file.
    """
    folder.mkdir(0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is not a directory that this user owns", str(folder))
    folder.chmod(0o700)
