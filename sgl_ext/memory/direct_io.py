"""Test of whether a file system serves direct I/O. Needs no native code."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path


def takes_direct_io(directory: Path) -> bool:
    """Returns whether a file in ``directory`` accepts a write with O_DIRECT.

    Some file systems accept the flag and refuse only the write.

    Raises:
        OSError: the directory cannot be written to, or is full (ENOSPC, EDQUOT).
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".sgl_ext-direct-") as file:
        try:
            descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as block:
                os.write(descriptor, block)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(descriptor)
    return True
