"""How much of its memory a worker lends (SwiftCache §3.4, Eq. 6-9, Algorithm 1).

Sizes are bytes, those that are lent counted from the end of the worker's memory. Nothing here reads
a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

SMALL_UNITS = 16
"""Whole minimum elastic units are lent if there are so many of them, else any number of bytes."""

Granularity = Literal["auto", "unit", "block"]


class ElasticUnits(NamedTuple):
    """Blocks of equal bytes: ``worker`` ones leave when ``master`` ones come, and back."""

    worker: int
    master: int


def minimum_elastic_units(worker_block: int, master_block: int) -> ElasticUnits:
    """The fewest whole blocks of both models that have equal bytes: the MEU (Eq. 8-9).

    Eq. 6-7 count elements, which gives the same units if both models have one dtype.
    """
    common = math.lcm(worker_block, master_block)
    return ElasticUnits(common // worker_block, common // master_block)


@dataclass(frozen=True)
class Unit:
    """In what steps memory moves.

    Attributes:
        size: bytes.
        whole: whether both sides move whole blocks by it (a minimum elastic unit, Eq. 8-9).
        waste: bytes of what is lent that the master cannot use, at most.
    """

    size: int
    whole: bool
    waste: int


def choose_unit(
    worker_block: int, master_block: int, lendable: int, page: int, granularity: Granularity
) -> Unit:
    """Whole units where they are small beside what can be lent, else pages of memory.

    Args:
        worker_block: bytes of a worker's block.
        master_block: bytes of a master's block.
        lendable: bytes that may be lent.
        page: bytes of a page of memory, which can belong to one side only.
    """
    unit = math.lcm(worker_block, master_block, page)
    if granularity == "unit" or (granularity == "auto" and unit * SMALL_UNITS <= lendable):
        return Unit(unit, True, 0)
    return Unit(page, False, master_block)


@dataclass(frozen=True)
class Lending:
    """Algorithm 1, in bytes.

    The paper's need is the longest request; here it is what all requests have together, as several
    are served at a time. Of one request both are the same.

    Args:
        size: bytes that may be lent.
        end: bytes of the worker's memory, up to which it lends.
        block: bytes of a worker's block.
        page: tokens of a block.
        first: blocks before those of the pool.
        unit: in what steps memory moves.
    """

    size: int
    end: int
    block: int
    page: int
    first: int
    unit: Unit

    def local(self, lent: int) -> int:
        """Blocks of the pool in front of the last ``lent`` bytes."""
        return (self.end - lent) // self.block - self.first

    def scale_up(self, lent: int, need: int) -> int:
        """Bytes to lend in all, so that ``need`` tokens have room: ``lent`` or less."""
        return min(lent, self._most(-(-need // self.page)))

    def scale_down(self, lent: int, need: int, used: int) -> int:
        """Bytes to lend in all, if no larger need than ``need`` tokens comes: ``lent`` or more.

        Args:
            used: blocks of the pool up to the last one in use, which cannot be lent.
        """
        return max(lent, self._most(max(used, -(-need // self.page))))

    def _most(self, blocks: int) -> int:
        """Bytes that can be lent while so many blocks of the pool stay: whole units."""
        free = min(self.end - (self.first + blocks) * self.block, self.size)
        return max(free, 0) // self.unit.size * self.unit.size
