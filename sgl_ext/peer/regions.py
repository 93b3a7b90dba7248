"""Which of a master's blocks lie in which worker's memory.

Blocks are numbered through by address: first those in the master's own memory, then a *region* for
each worker, with room for all that this one may lend. A worker lends the end of its memory, so of a
region the last blocks are there. Pages of memory are mapped whole, so that a region can end only
where a block and a page end together.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import NamedTuple


class Region(NamedTuple):
    """Blocks ``[first, end)``, and the bytes of memory that they lie in."""

    first: int
    end: int
    offset: int
    """Of the memory, from block 0."""
    size: int
    """Bytes."""

    def blocks(self, lent: int, block_bytes: int) -> int:
        """First of the whole blocks in the last ``lent`` bytes; ``end`` if there is none."""
        return self.end - lent // block_bytes


class Regions:
    """Finds room for workers among the blocks that have addresses.

    Args:
        first: the first block that has no memory of the master's.
        end: behind the last block that has an address.
        block_bytes: bytes of a block.
        page: bytes of a page of memory.
    """

    def __init__(self, first: int, end: int, block_bytes: int, page: int) -> None:
        self._first, self._end = first, end
        self._block, self.page = block_bytes, page
        self._step = page // math.gcd(block_bytes, page)
        self._taken: list[Region] = []

    @property
    def largest(self) -> int:
        """Bytes of the largest region that :meth:`take` could give now."""
        return max((self._room(*gap)[1] for gap in self._gaps()), default=0)

    def take(self, size: int) -> Region | None:
        """A region for ``size`` bytes, whole pages; None if there are not so many addresses."""
        for low, high in self._gaps():
            end, room = self._room(low, high)
            if 0 < size <= room:
                # As low as it can be, so that others find room behind it.
                end = -(-(low * self._block + size) // (self._block * self._step)) * self._step
                region = Region(end - size // self._block, end, end * self._block - size, size)
                insort(self._taken, region)
                return region
        return None

    def give(self, region: Region) -> None:
        """The region is free again."""
        self._taken.remove(region)

    def _gaps(self) -> list[tuple[int, int]]:
        """Blocks ``[low, high)`` that are in no region, and do not touch one."""
        gaps, low = [], self._first + 1
        for region in self._taken:
            gaps.append((low, region.offset // self._block))
            low = region.end + 1
        return [*gaps, (low, self._end + 1)]

    def _room(self, low: int, high: int) -> tuple[int, int]:
        """Where the last possible region in a gap ends, and its bytes."""
        end = (high - 1) // self._step * self._step
        pages = (end * self._block - low * self._block) // self.page
        return end, max(pages * self.page, 0)
