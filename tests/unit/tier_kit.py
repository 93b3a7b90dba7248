"""Kit for tests of the tiers: pages whose content follows from their key."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.arena import Arena, Key, Pages
from sgl_ext.tiers.ssd import SsdTier
from sgl_ext.tiers.tier import Tier, TierStatistics
from sgl_ext.tiers.volume import Volume

DEADLINE_S = 60.0
LAYOUT = Layout(page=4, layers=2, kv_heads=2, head_dim=32, dtype="float16", fingerprint="test")
"""Layout of pages of 2 KiB, whose slots are one sector."""
LARGE = Layout(page=16, layers=4, kv_heads=2, head_dim=64, dtype="float16", fingerprint="test")
"""Layout of pages of 32 KiB, whose slots are nine sectors and can be torn."""
LAYOUTS = {
    page: Layout(page, layers=5, kv_heads=1, head_dim=8, dtype="float32", fingerprint="t")
    for page in (1, 4)
}
"""Layouts of small pages, by the number of tokens of a page."""


def key(number: int) -> Key:
    return hashlib.sha256(b"%d" % number).digest()


def keys(*numbers: int) -> list[Key]:
    return [key(number) for number in numbers]


def content(key: Key, layout: Layout) -> NDArray[np.uint8]:
    """Returns the content of a page; the contents of two keys differ in every sector."""
    return np.frombuffer((key * (layout.block_bytes // 32 + 1))[: layout.block_bytes], np.uint8)


def places(*numbers: int) -> Pages:
    return np.array(numbers, np.int64)


def arena(engine: TransferEngine, pages: int, layout: Layout = LAYOUT) -> Arena:
    """Returns an arena of ``pages`` slots that is registered with ``engine``."""
    made = Arena(layout, pages)
    engine.register(made.address, made.size, owner=made)
    return made


def fill(arena: Arena, keys: Sequence[Key], pages: Pages) -> None:
    """Writes the contents of ``keys`` into the slots ``pages``."""
    for one, page in zip(keys, pages.tolist(), strict=True):
        arena.memory[page, : arena.layout.block_bytes] = content(one, arena.layout)


def holds(arena: Arena, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
    """Returns whether each of the slots ``pages`` holds the content of its key, bool ``[keys]``."""
    size = arena.layout.block_bytes
    return np.array(
        [
            np.array_equal(arena.memory[page, :size], content(one, arena.layout))
            for one, page in zip(keys, pages.tolist(), strict=True)
        ],
        bool,
    )


def wipe(arena: Arena) -> None:
    arena.memory[:] = 0xEE


def directories(root: Path, count: int) -> list[Path]:
    paths = [root / f"disk{i}" for i in range(count)]
    for path in paths:
        path.mkdir(exist_ok=True)
    return paths


def folder(directory: Path) -> Path:
    (found,) = directory.glob("sgl_ext-v*")
    return found


def put(tier: Tier, arena: Arena, *numbers: int) -> list[bool]:
    where = np.arange(len(numbers))
    fill(arena, keys(*numbers), where)
    stored: list[bool] = tier.store(keys(*numbers), where).tolist()
    return stored


def get(tier: Tier, arena: Arena, *numbers: int) -> list[bool]:
    """Returns which pages the tier reports as loaded, and asserts that these have landed."""
    wipe(arena)
    where = np.arange(len(numbers))
    good: list[bool] = tier.load(keys(*numbers), where).tolist()
    landed = holds(arena, keys(*numbers), where)
    assert landed[good].all()
    return good


def occupy(path: Path) -> None:
    """Fills the file system of ``path``."""
    with path.open("wb", buffering=0) as ballast, pytest.raises(OSError, match="space"):
        while True:
            ballast.write(bytes(1 << 16))


def usable_backends() -> list[str]:
    """Returns the backends of a file lane that this machine supports."""
    with TransferEngine() as engine:
        try:
            engine.file_lane("/tmp", backend="io_uring", direct=False)
        except ExtError:
            return ["threads"]
    return ["io_uring", "threads"]


def in_volume(volume: Volume) -> list[bool]:
    return [key(number) in volume.slots.index for number in range(40)]


@contextmanager
def two_volumes(
    host: Arena, engine: TransferEngine, parent: Path, backend: str
) -> Iterator[SsdTier]:
    """Yields a tier of two volumes with pages 0 to 39: one has the even pages, one the odd ones."""
    tier = SsdTier(
        host,
        engine,
        directories(parent, 2),
        30 * host.stride,
        backend=backend,
        deadline=0.5,
    )
    assert all(put(tier, host, *range(40)))
    yield tier
    tier.close()


class Shelf:
    """Tier that keeps pages in a dict. I/O waits for ``open``; keys in ``lost`` do not land."""

    name = "shelf"
    immediate = True
    available = True

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.pages: dict[Key, bytes] = {}
        self.open = threading.Event()
        self.open.set()
        self.lost: set[Key] = set()
        self.loads = 0

    def lookup(self, keys: Sequence[Key]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.pages), len(keys))

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        self.loads += 1
        assert self.open.wait(DEADLINE_S)
        good = np.array([key in self.pages and key not in self.lost for key in keys], bool)
        for key, page, landed in zip(keys, pages, good, strict=True):
            stored = self.pages[key] if landed else b"\xee" * self.arena.stride
            self.arena.memory[page] = np.frombuffer(stored, np.uint8)
        return good

    def store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        assert self.open.wait(DEADLINE_S)
        self.pages |= {
            key: self.arena.memory[page].tobytes() for key, page in zip(keys, pages, strict=True)
        }
        return np.ones(len(keys), bool)

    def statistics(self) -> TierStatistics:
        return TierStatistics(len(self.pages), 0, 0, {})

    def close(self) -> None:
        self.open.set()
