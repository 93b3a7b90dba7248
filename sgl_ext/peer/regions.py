"""Placement of the workers' memory among a master's blocks.

Blocks are numbered by address. The blocks in the master's own memory come first, then a *region*
for each worker, with room for everything that the worker may lend. A worker lends the end of its
memory, so the last blocks of a region are available. Memory is mapped in whole pages, so a region
can end only where a block and a page end together.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple


class Region(NamedTuple):
    """Blocks ``[first, end)`` and the range of memory that contains them."""

    first: int
    """First block"""
    end: int
    """First block after the region"""
    offset: int
    """Start of the memory, in bytes from block 0"""
    size: int
    """Size of the memory, in bytes"""

    def blocks(self, lent: int, block_bytes: int) -> int:
        """Returns the first whole block in the last ``lent`` bytes; ``end`` if there is none."""
        return self.end - lent // block_bytes


class Regions:
    """Allocator of regions among the blocks that have addresses.

    Args:
        first: first block that is not in the master's own memory.
        end: first block that has no address.
        block_bytes: bytes per block.
        page: bytes per page of memory.
    """

    def __init__(self, first: int, end: int, block_bytes: int, page: int) -> None:
        self._first, self._end = first, end
        self._block, self.page = block_bytes, page
        self._step = page // math.gcd(block_bytes, page)
        self._taken: list[Region] = []

    @property
    def largest(self) -> int:
        """Size of the largest region that can be allocated now, in bytes."""
        return max((self._room(*gap)[1] for gap in self._gaps()), default=0)

    def allocate(self, size: int) -> Region | None:
        """Allocates a region for ``size`` bytes of whole pages; None if no gap is large enough."""
        for low, high in self._gaps():
            end, room = self._room(low, high)
            if 0 < size <= room:
                # As low as possible, so that other regions find room after it.
                end = -(-(low * self._block + size) // (self._block * self._step)) * self._step
                region = Region(end - size // self._block, end, end * self._block - size, size)
                insort(self._taken, region)
                return region
        return None

    def free(self, region: Region) -> None:
        """Frees a region."""
        self._taken.remove(region)

    def check_integrity(self, regions: Iterable[Region]) -> None:
        """Checks that exactly ``regions`` are allocated, in whole pages that share no block.

        Raises:
            AssertionError: they are not.
        """
        if (expected := sorted(regions)) != self._taken:
            raise AssertionError(f"{self._taken} are allocated, expected {expected}")
        low = self._first + 1
        for region in self._taken:
            if region.offset < low * self._block or region.end > self._end:
                raise AssertionError(f"{region} exceeds its range of blocks [{low}, {self._end})")
            if region.offset % self.page or region.end * self._block % self.page:
                raise AssertionError(f"{region} is not whole pages of {self.page:,} B")
            low = region.end + 1

    def _gaps(self) -> list[tuple[int, int]]:
        """Returns gaps ``(low, high)``; a region within ``[low, high - 1)`` touches no other."""
        gaps, low = [], self._first + 1
        for region in self._taken:
            gaps.append((low, region.offset // self._block))
            low = region.end + 1
        return [*gaps, (low, self._end + 1)]

    def _room(self, low: int, high: int) -> tuple[int, int]:
        """Returns the end of the highest possible region in a gap, and its size in bytes."""
        end = (high - 1) // self._step * self._step
        pages = (end * self._block - low * self._block) // self.page
        return end, max(pages * self.page, 0)
