"""Files that processes have mapped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

_SHARED = Path("/dev/shm")


def mapped_files(pids: Sequence[int]) -> dict[int, str]:
    """Files that are mapped, by inode."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    found[int(fields[4])] = fields[5]
    return found


def mapped_segments(pids: Sequence[int]) -> frozenset[int]:
    """Inodes of POSIX shared memory that is mapped.

    Not its names, because a named semaphore is mapped before it gets its own.
    """
    maps = mapped_files(pids)
    return frozenset(inode for inode in maps if maps[inode].startswith(f"{_SHARED}/"))


def segments(inodes: Collection[int]) -> list[Path]:
    """Those of POSIX shared memory that there are."""
    found = []
    for path in _SHARED.iterdir():
        with suppress(OSError):  # another's, that has just gone
            if path.stat().st_ino in inodes:
                found.append(path)
    return found
