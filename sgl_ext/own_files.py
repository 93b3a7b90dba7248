"""Files and folders that belong to this user alone, and are no links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(file: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Opens a regular file of this user; by default for reading and writing, made if need be.

    Raises:
        OSError: it is anything else: a link, another user's, a device.
    """
    # Who may write to the directory may have put something there that is not for us to use.
    opened = os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is no regular file of this user", str(file))
        if stat.S_IMODE(status.st_mode) != 0o600:
            os.fchmod(opened, 0o600)
    except BaseException:
        os.close(opened)
        raise
    return opened


def make_own_folder(folder: Path) -> None:
    """Makes a folder that only this user can enter, if it is not there.

    Raises:
        OSError: it is anything else: a link, another user's, a file.
    """
    folder.mkdir(0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is no directory of this user", str(folder))
    folder.chmod(0o700)
