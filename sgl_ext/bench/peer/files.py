"""What processes of servers have: files with KV blocks that are open or mapped, and each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from sgl_ext.bench.harness.mapped import mapped_files
from sgl_ext.bench.harness.server import Server

_OURS = "/memfd:sgl_ext-kv"
"""Memory that can be lent; a master's layer buffers are its own."""


@dataclass(frozen=True)
class Files:
    """Files with KV blocks, by inode, that the processes of a server have.

    Attributes:
        opened: bytes of memory of those that they have open: a server's own.
        mapped: those that they have mapped.
    """

    opened: Mapping[int, int]
    mapped: frozenset[int]


def leaked_files(master: Files, worker: Files, room: int) -> list[str]:
    """What a pair has that it should not have.

    Args:
        room: bytes of both slabs.
    """
    found = []
    if strange := master.mapped - master.opened.keys() - worker.opened.keys():
        found.append(f"the master maps {len(strange)} files that no worker has")
    if len(master.opened) > 1:
        found.append(f"the master has {len(master.opened)} files, not one")
    if kept := worker.opened.keys() - worker.mapped:
        found.append(f"the worker keeps {len(kept)} files that it does not use")
    if (size := sum(master.opened.values()) + sum(worker.opened.values())) > room:
        found.append(f"files in memory have {size:,} B, slabs {room:,} B")
    return found


def opened_files(pids: Sequence[int]) -> dict[int, os.stat_result]:
    """Files with KV blocks that are open, by inode."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(each.readlink()).startswith(_OURS):
                        status = each.stat()
                        found[status.st_ino] = status
    return found


def files_of(server: Server) -> Files:
    pids = processes_of(server.process.pid)
    opened = {inode: status.st_blocks * 512 for inode, status in opened_files(pids).items()}
    maps = mapped_files(pids)
    return Files(opened, frozenset(at for at in maps if maps[at].startswith(_OURS)))


def processes_of(leader: int) -> list[int]:
    """Processes of a server: it leads a group of its own, which outlives it with its last one."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
