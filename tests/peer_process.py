"""A light master or worker as a process of its own: ``python peer_process.py ROLE DIRECTORY SEED``.

Says how it is whenever it is asked for a line; ends with an error if one of its requests has not
found what it has written.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import msgspec
from peer_kit import LightMaster, LightWorker

from sgl_ext.peer import directory
from sgl_ext.peer.link import Link
from sgl_ext.peer.worker import Terms

BLOCKS = 120
TERMS = Terms("block", window=0.2, interval=0.02, deadline=0.3, lease=0.5)


class Said(msgspec.Struct):
    """How a process is."""

    served: int
    """Requests."""
    other: int
    """Blocks in others' memory, or bytes that others may be using."""
    files: list[str]
    """In memory: its own, and what others could map."""
    descriptors: int
    retired: int = 0
    """Bytes that others may still have mapped."""
    large: int = 0
    """Requests of unforeseen size that have got their memory."""
    waiting: float = 0.0
    """Seconds that the next one waits already, without those when this process was stopped."""


def asked() -> bool:
    """Whether the parent wants to know."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return False
    if not os.read(0, 4096):
        sys.exit(0)
    return True


def say(said: Said) -> None:
    print(msgspec.json.encode(said).decode(), flush=True)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def master(path: Path, seed: int) -> None:
    address = directory.address(path)
    with directory.lock(path):
        light = LightMaster(40, 1000, TERMS.lease, seed)
        link = Link("master", address, beat=0.05)
        while True:
            now = time.monotonic()
            for lend in link.heard():
                light.master.hear(lend, now)
            light.serve(40)
            light.slow = light.choose.random() < 0.5
            light.master.step(now)
            link.say(light.master.messages())
            if asked():
                borrowed = light.groups.blocks - 40
                say(Said(light.served, borrowed, [light.slab.name], descriptors()))
            time.sleep(0.002)


def worker(path: Path, seed: int) -> None:
    light = LightWorker(BLOCKS, TERMS, seed)
    large, waiting, before = 0, 0.0, time.monotonic()
    link = Link("worker", directory.address(path), beat=0.05)
    while True:
        now = time.monotonic()
        for keep in link.heard():
            light.worker.hear(keep, now)
        light.serve(6)
        if not light.wanted and light.choose.random() < 0.02:
            light.wanted = light.choose.randrange(BLOCKS - light.held + 1)
        waiting = waiting + min(now - before, 0.5) if light.wanted else 0.0
        before, waits = now, light.wanted > 0
        light.step(now)
        large += waits and not light.wanted
        link.say([light.worker.message])
        if asked():
            files = {light.slab.name, *(extent.name for extent in light.memory.extents)}
            lent, retired = light.worker.lent, light.memory.retired
            say(Said(light.served, lent, list(files), descriptors(), retired, large, waiting))
        time.sleep(0.002)


if __name__ == "__main__":
    role, path, seed = sys.argv[1:]
    (master if role == "master" else worker)(Path(path), int(seed))
