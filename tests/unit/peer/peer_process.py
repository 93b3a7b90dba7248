"""Process with a light master or worker: ``python peer_process.py ROLE DIRECTORY SEED [LIBRARY]``.

With the library of a simulated CUDA device its memory is on that device.

Prints its status (:class:`Said`) whenever it reads a line. Ends with an error if a request finds
other data in its blocks than it has written.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import msgspec
from peer_kit import LightMaster, LightWorker

from sgl_ext.memory.slab import HostSlab
from sgl_ext.peer import directory
from sgl_ext.peer.link import Link
from sgl_ext.peer.worker import Terms

BLOCKS = 120
TERMS = Terms("block", window=0.2, interval=0.02, deadline=0.3, lease=0.5)


class Said(msgspec.Struct):
    """Status of a process."""

    served: int
    """Number of requests that have ended."""
    other: int
    """Blocks in memory of workers (master), or bytes that the master may be using (worker)."""
    files: list[str]
    """Files in memory: its own KV, and on a worker all that others can map. On a device these are
    the numbers of their inodes."""
    descriptors: int
    retired: int = 0
    """Bytes of replaced memory that others may still have mapped."""
    large: int = 0
    """Number of requests of unforeseen size that have received their memory."""
    waiting: float = 0.0
    """Seconds for which the next one has waited; a pause of the process counts at most 0.5 s."""


def asked() -> bool:
    """Returns whether the parent has asked for the status; exits if standard input is closed."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return False
    if not os.read(0, 4096):
        sys.exit(0)
    return True


def say(said: Said) -> None:
    print(msgspec.json.encode(said).decode(), flush=True)


def files(light: LightMaster | LightWorker) -> list[str]:
    """Returns the files in memory of a process's own slab."""
    if isinstance(light.slab, HostSlab):
        lent = light.memory.extents if isinstance(light, LightWorker) else ()
        return [light.slab.name, *(extent.name for extent in lent)]
    own = [piece for at, piece in light.slab.mapping.pieces.items() if at < light.slab.size]
    return [str(os.fstat(piece._handle).st_ino) for piece in own]


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def master(path: Path, seed: int, library: str | None) -> None:
    address = directory.address(path)
    with directory.lock(path):
        light = LightMaster(40, 1000, TERMS.lease, seed, library=library)
        link = Link("master", address, beat=0.05)
        while True:
            now = time.monotonic()
            for lend in link.received():
                light.master.receive(lend, now)
            light.serve(40)
            light.slow = light.choose.random() < 0.5
            light.master.step(now)
            light.check_integrity()
            link.publish(light.master.messages())
            if asked():
                borrowed = light.groups.blocks - 40
                say(Said(light.served, borrowed, files(light), descriptors()))
            time.sleep(0.002)


def worker(path: Path, seed: int, library: str | None) -> None:
    light = LightWorker(BLOCKS, TERMS, seed, library=library)
    large, waiting, before = 0, 0.0, time.monotonic()
    link = Link("worker", directory.address(path), beat=0.05)
    while True:
        now = time.monotonic()
        for keep in link.received():
            light.worker.receive(keep, now)
        light.serve(6)
        if not light.wanted and light.choose.random() < 0.02:
            light.wanted = light.choose.randrange(BLOCKS - light.held + 1)
        waiting = waiting + min(now - before, 0.5) if light.wanted else 0.0
        before, waits = now, light.wanted > 0
        light.step(now)
        light.check_integrity()
        large += waits and not light.wanted
        link.publish([light.worker.message])
        if asked():
            lent, retired = light.worker.lent, light.memory.retired
            say(Said(light.served, lent, files(light), descriptors(), retired, large, waiting))
        time.sleep(0.002)


if __name__ == "__main__":
    role, path, seed, *libraries = sys.argv[1:]
    run = master if role == "master" else worker
    run(Path(path), int(seed), libraries[0] if libraries else None)
