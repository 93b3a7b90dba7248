"""Acknowledged pages survive ``kill -9``; torn, truncated and corrupted pages are misses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tier_kit import LARGE, arena, directories, folder, get, holds, keys, put, usable_backends, wipe

from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.arena import TRAILER
from sgl_ext.tiers.ssd import SsdTier

ROUNDS = int(os.environ.get("SGLEXT_ROUNDS", "60"))
NUMBERS = 96
SLOTS = 24

# A program that forks a writer for each line "backend seed" that it reads, and waits for its end.
WRITERS = """
import os, random, sys, traceback
import numpy as np
from pathlib import Path
from tier_kit import LARGE, arena, get, keys, put
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.ssd import SsdTier

NUMBERS, SLOTS, directories = int(sys.argv[1]), int(sys.argv[2]), [Path(p) for p in sys.argv[3:]]

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def write(backend, seed):
    say("pid", os.getpid())
    rng = random.Random(seed)
    engine = TransferEngine()
    host = arena(engine, 16, LARGE)
    tier = SsdTier(host, engine, directories, SLOTS * host.stride, backend=backend)
    present = lambda: {n for n in range(NUMBERS) if tier.lookup(keys(n))}
    while True:
        some = rng.sample(range(NUMBERS), rng.randint(1, 12))
        if rng.random() < 0.3:
            get(tier, host, *some)
        else:
            before = present()
            say("storing", *some)
            good = put(tier, host, *some)
            say("evicted", *(before - present()))
            say("stored", *(n for n, there in zip(some, good) if there))

for line in sys.stdin:
    backend, seed = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            write(backend, int(seed))
        except BaseException:
            say("error", repr(traceback.format_exc()))
        os._exit(1)
    os.waitpid(pid, 0)
    say("ended")
"""


@dataclass
class Round:
    """Pages of the tier, as a writer reported them before it was killed."""

    held: set[int]
    unknown: set[int] = field(default_factory=set)
    """Pages of the store in progress, which may or may not be in the tier."""
    acknowledged: int = 0

    def hear(self, line: str) -> None:
        what, *words = line.split()
        assert what in ("storing", "evicted", "stored"), line
        numbers = {int(word) for word in words}
        if what == "storing":
            self.unknown = numbers
        elif what == "evicted":
            self.held -= numbers
        else:
            self.held |= numbers
            self.acknowledged += len(numbers)
            self.unknown = set()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    paths = map(str, directories(tmp_path, 2))
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(NUMBERS), str(SLOTS), *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def killed_writer(
    writers: subprocess.Popen[str], backend: str, seed: int, after: float, held: set[int]
) -> Round:
    assert writers.stdin is not None
    assert writers.stdout is not None
    writers.stdin.write(f"{backend} {seed}\n")
    pid = int(writers.stdout.readline().removeprefix("pid "))
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    said = Round(set(held))
    while (line := writers.stdout.readline()) != "ended\n":
        said.hear(line)
    return said


def test_acknowledged_pages_survive_kills_of_the_writer(
    writers: subprocess.Popen[str], engine: TransferEngine, tmp_path: Path
) -> None:
    """Kills writers at any moment of opening, storing, evicting and loading, on the same files.

    ``SGLEXT_ROUNDS`` sets the number of kills.
    """
    rng = random.Random(11)  # noqa: S311
    host = arena(engine, NUMBERS, LARGE)
    backends = usable_backends()
    held: set[int] = set()
    acknowledged = interrupted = number = 0
    # A slow machine stores less before each kill, and needs more of them.
    while number < ROUNDS or acknowledged <= 10 * ROUNDS or interrupted <= ROUNDS / 10:
        assert number < 20 * ROUNDS, f"{acknowledged} acknowledged, {interrupted} interrupted"
        backend = backends[number % len(backends)]
        said = killed_writer(writers, backend, number, rng.uniform(0, 0.08), held)
        tier = SsdTier(
            host, engine, directories(tmp_path, 2), SLOTS * host.stride, backend="threads"
        )
        good = get(tier, host, *range(NUMBERS))  # asserts that the right bytes have landed
        found = {number for number in range(NUMBERS) if good[number]}
        tier.close()
        # The store in progress may have taken a slot for each of its pages.
        assert len(said.held - found) <= len(said.unknown), f"round {number}"
        assert found - said.held <= said.unknown, f"round {number}"
        held = found
        acknowledged += said.acknowledged
        interrupted += bool(said.unknown)
        number += 1


def filled(engine: TransferEngine, root: Path) -> tuple[SsdTier, list[Path]]:
    """Returns a closed tier with pages 0 to 39 in two volumes, and the files of the volumes."""
    paths = directories(root, 2)
    host = arena(engine, 40, LARGE)
    tier = SsdTier(host, engine, paths, 40 * host.stride, backend="threads")
    assert all(put(tier, host, *range(40)))
    tier.close()
    return tier, [folder(path) / "pages" for path in paths]


@pytest.mark.parametrize("seed", range(20))
def test_truncated_file_loses_only_the_truncated_pages(
    engine: TransferEngine, tmp_path: Path, seed: int
) -> None:
    tier, files = filled(engine, tmp_path)
    host = tier._arena
    cut = random.Random(seed).randrange(20 * host.stride + 1)  # noqa: S311
    os.truncate(files[0], cut)
    again = SsdTier(host, engine, directories(tmp_path, 2), 40 * host.stride)
    assert sum(get(again, host, *range(40))) == 20 + cut // host.stride
    assert again.statistics().failures == {}
    assert all(put(again, host, *range(40)))
    assert all(get(again, host, *range(40)))
    again.close()


@pytest.mark.parametrize("seed", range(20))
def test_pages_with_flipped_bits_are_misses(
    engine: TransferEngine, tmp_path: Path, seed: int
) -> None:
    """Flips bits in pages, in trailers, and in the padding between them, which carries no data."""
    tier, files = filled(engine, tmp_path)
    host = tier._arena
    rng = random.Random(seed)  # noqa: S311
    hit: set[tuple[Path, int]] = set()
    for _ in range(rng.randint(1, 12)):
        file, slot = rng.choice(files), rng.randrange(20)
        at = rng.choice(
            [
                rng.randrange(LARGE.block_bytes),
                rng.randrange(host.stride - TRAILER.itemsize, host.stride),
                rng.randrange(LARGE.block_bytes, host.stride - TRAILER.itemsize),
            ]
        )
        if at < LARGE.block_bytes or at >= host.stride - TRAILER.itemsize:
            hit.add((file, slot))
        with file.open("r+b") as opened:
            opened.seek(slot * host.stride + at)
            (byte,) = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ (1 << rng.randrange(8))]))
    again = SsdTier(host, engine, directories(tmp_path, 2), 40 * host.stride)
    lost = 40 - sum(get(again, host, *range(40)))
    assert lost <= len(hit)  # two flips of one bit cancel out
    assert lost >= len(hit) - 1
    counted = again.statistics().failures.get("checksum", 0)
    assert again.statistics().pages == 40 - lost
    assert counted <= lost  # invalid trailers account for the others
    assert sum(get(again, host, *range(40))) == 40 - lost
    assert again.statistics().failures.get("checksum", 0) == counted
    again.close()


def test_torn_write_is_a_miss(engine: TransferEngine, tmp_path: Path) -> None:
    """Puts leading sectors of one page before the rest of another, as a torn write does."""
    tier, files = filled(engine, tmp_path)
    host = tier._arena
    whole = np.fromfile(files[0], np.uint8).reshape(20, host.stride)
    torn = whole.copy()
    for slot in range(8):
        torn[slot, : 4096 * (slot + 1)] = whole[slot + 10, : 4096 * (slot + 1)]
    torn.tofile(files[0])
    again = SsdTier(host, engine, directories(tmp_path, 2), 40 * host.stride)
    assert sum(get(again, host, *range(40))) == 32
    assert again.statistics().failures == {"checksum": 8}
    wipe(host)
    assert not holds(host, keys(0), np.array([0])).any()
    again.close()
