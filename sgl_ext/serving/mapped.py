"""Files that processes have mapped, and POSIX shared memory among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

_SHARED = Path("/dev/shm")


def mapped_files(pids: Sequence[int]) -> dict[int, str]:
    """Returns the paths of the files that processes have mapped, by inode."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    found[int(fields[4])] = fields[5]
    return found


def mapped_segments(pids: Sequence[int]) -> frozenset[int]:
    """Returns the inodes of the POSIX shared memory that processes have mapped.

    Names would not do, because a named semaphore is mapped before it gets its name.
    """
    maps = mapped_files(pids)
    return frozenset(inode for inode in maps if maps[inode].startswith(f"{_SHARED}/"))


def segments(inodes: Collection[int]) -> list[Path]:
    """Returns the existing files of POSIX shared memory with these inodes."""
    found = []
    for path in _SHARED.iterdir():
        with suppress(OSError):  # a file of another process, removed meanwhile
            if path.stat().st_ino in inodes:
                found.append(path)
    return found
