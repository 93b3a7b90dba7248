"""Memory that this process can still allocate."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Returns the memory that this process can still allocate, in bytes.

    This is the available memory of the machine, or what the tightest cgroup (version 2) that
    contains this process leaves, if that is less.
    """
    available = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        group = _own_group()
        for path in (group, *group.parents):
            if path == _ROOT.parent:
                break
            with suppress(OSError, ValueError):  # this cgroup has no limit
                available = min(available, _left_in(path))
    return max(available, 0)


def _own_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            return _ROOT / line.removeprefix("0::/")
    raise ValueError("in no control group of version 2")


def _left_in(group: Path) -> int:
    limit = int((group / "memory.max").read_text())
    used = int((group / "memory.current").read_text())
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # The page cache counts as used, and is evicted when memory is allocated.
    return limit - used + int(fields["inactive_file"]) + int(fields["active_file"])
