"""Policy of how much of its memory a worker lends (SwiftCache §3.4, Eq. 6-9, Algorithm 1).

Sizes are in bytes. Lent sizes are counted from the end of the worker's memory. Nothing here reads a
clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SMALL_UNITS = 16
"""Number of whole units in the lendable memory from which ``auto`` lends whole units, not pages"""

Granularity = Literal["auto", "unit", "block"]


@dataclass(frozen=True)
class Unit:
    """Unit in which memory is lent and reclaimed.

    Attributes:
        size: bytes of the unit.
        whole: whether a unit is whole blocks on both sides (a minimum elastic unit, Eq. 8-9).
        waste: upper bound of the lent bytes that the master cannot use.
    """

    size: int
    whole: bool
    waste: int


def choose_unit(
    worker_block: int, master_block: int, lendable: int, page: int, granularity: Granularity
) -> Unit:
    """Returns the unit of lending: a whole minimum elastic unit, or a page of memory.

    A minimum elastic unit (MEU) is the fewest whole blocks with equal bytes on both sides
    (Eq. 8-9), here in whole pages. Eq. 6-7 count elements, which gives the same units for models
    of one dtype.

    With ``auto``, whole units are used if at least :data:`SMALL_UNITS` fit into ``lendable``.

    Args:
        worker_block: bytes per block of the worker.
        master_block: bytes per block of the master.
        lendable: bytes that may be lent.
        page: bytes per page of memory; a page belongs to one side only.
        granularity: ``unit``, ``block`` (pages of memory) or ``auto``.
    """
    unit = math.lcm(worker_block, master_block, page)
    if granularity == "unit" or (granularity == "auto" and unit * SMALL_UNITS <= lendable):
        return Unit(unit, True, 0)
    return Unit(page, False, master_block)


@dataclass(frozen=True)
class Lending:
    """Algorithm 1 of SwiftCache, in bytes.

    In the paper the need is the longest request. Here it is the sum over all requests, because
    several are served at a time. For a single request both are the same.

    Args:
        size: bytes that may be lent.
        end: end of the lendable memory, in bytes from the start of the worker's memory.
        block: bytes per block of the worker.
        page: tokens per block.
        first: number of blocks before the first block of the pool.
        unit: unit in which memory is lent and reclaimed.
    """

    size: int
    end: int
    block: int
    page: int
    first: int
    unit: Unit

    def local(self, lent: int) -> int:
        """Returns the number of the pool's whole blocks before the last ``lent`` bytes."""
        return (self.end - lent) // self.block - self.first

    def scale_up(self, lent: int, need: int) -> int:
        """Returns the total bytes to lend so that the worker has room for ``need`` tokens.

        Args:
            lent: bytes that are lent now; the result is not larger.
            need: tokens that the worker needs now.
        """
        return min(lent, self._most(-(-need // self.page)))

    def scale_down(self, lent: int, need: int, used: int) -> int:
        """Returns the total bytes to lend if the worker will not need more than ``need`` tokens.

        Args:
            lent: bytes that are lent now; the result is not smaller.
            need: largest expected need of the worker, in tokens.
            used: number of blocks of the pool up to the last one in use, which cannot be lent.
        """
        return max(lent, self._most(max(used, -(-need // self.page))))

    def _most(self, blocks: int) -> int:
        """Returns the bytes, in whole units, that can be lent while ``blocks`` pool blocks stay."""
        free = min(self.end - (self.first + blocks) * self.block, self.size)
        return max(free, 0) // self.unit.size * self.unit.size
