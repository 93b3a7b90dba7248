"""Elastic KV: how many blocks a worker lends its master, and when (SwiftCache §3.4, Eq. 6-9).

A *worker* lends the tail of its block-major pool to a *master*, whose blocks have another size. By
default both sides move whole minimum elastic units, of equal bytes. That unit can be large (1,024
blocks of SmolLM2 beside an LWM worker: 360 MiB); lending single blocks (``granularity="block"``)
instead leaves less than one master block unused in all that is lent. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import deque
from operator import index
from typing import Literal, NamedTuple, Protocol


class BlockGeometry(Protocol):
    """What one block of a pool holds; :class:`~.slab.Layout` says it.

    Eq. 6-7 count the elements of one of K and V, which gives the same units only if both models
    have one dtype. Units are computed from bytes, which always hold.
    """

    @property
    def page(self) -> int:
        """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers of it."""


class ElasticUnits(NamedTuple):
    """Blocks of equal bytes: ``worker`` ones leave when ``master`` ones come, and back."""

    worker: int
    master: int


NOTHING = ElasticUnits(0, 0)


def minimum_elastic_units(*, worker: BlockGeometry, master: BlockGeometry) -> ElasticUnits:
    """The fewest whole blocks of both models that have equal bytes: the MEU (Eq. 8-9)."""
    common = math.lcm(worker.block_bytes, master.block_bytes)
    return ElasticUnits(common // worker.block_bytes, common // master.block_bytes)


def scale_up(blocks: int, page: int, units: ElasticUnits, request_length: int) -> ElasticUnits:
    """What a worker must get back to hold one request (Algorithm 1, ``ScaleUp``).

    Args:
        blocks: KV blocks that the worker has.
        page: tokens of one of them.
        request_length: tokens.

    Returns:
        Blocks that the worker gains and that the master loses.
    """
    missing = -(-request_length // page) - blocks
    return _times(units, -(-missing // units.worker)) if missing > 0 else NOTHING


def scale_down(blocks: int, page: int, units: ElasticUnits, longest: int) -> ElasticUnits:
    """What a worker can spare if no longer request comes (Algorithm 1, ``ScaleDown``).

    Args:
        blocks: KV blocks that the worker has.
        page: tokens of one of them.
        longest: tokens of the longest request of late, see ``LengthWindow``.

    Returns:
        Blocks that the worker loses and that the master gains.
    """
    spare = blocks - -(-longest // page)
    return _times(units, spare // units.worker) if spare > 0 else NOTHING


def blocks_in(size: int, master: BlockGeometry) -> int:
    """Whole blocks of the master in ``size`` bytes; less than one block is wasted."""
    return size // master.block_bytes


def _times(units: ElasticUnits, factor: int) -> ElasticUnits:
    return ElasticUnits(factor * units.worker, factor * units.master)


class LengthWindow:
    """The longest request of the last ``seconds``. Amortized O(1) a request."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"a window of {seconds} seconds sees no request; it must be positive")
        self.seconds = seconds
        # Times rise, lengths fall: what a longer, later request hides is not kept.
        self._longest: deque[tuple[float, int]] = deque()
        self._now = -math.inf

    def add(self, length: int, now: float) -> None:
        """A request of ``length`` tokens was seen at ``now`` (seconds of any monotonic clock).

        Raises:
            ValueError: ``now`` lies before an earlier call's; nothing has changed.
        """
        if not length >= 0:
            raise ValueError(f"a request has 0 tokens or more, not {length}")
        self._advance(now)
        while self._longest and self._longest[-1][1] <= length:
            self._longest.pop()
        self._longest.append((now, length))

    def longest(self, now: float) -> int:
        """Tokens of the longest request since ``now - seconds``; 0 if there was none.

        Raises:
            ValueError: ``now`` lies before an earlier call's; nothing has changed.
        """
        self._advance(now)
        return self._longest[0][1] if self._longest else 0

    def _advance(self, now: float) -> None:
        if not now >= self._now:
            raise ValueError(f"time went from {self._now} to {now}; use one monotonic clock")
        self._now = now
        while self._longest and self._longest[0][0] < now - self.seconds:
            self._longest.popleft()


class Resizable(Protocol):
    """Blocks whose tail can go and come back: :class:`~.block_groups.BlockGroups`, or what keeps an
    engine's accounts of them true too."""

    @property
    def blocks(self) -> int:
        """Blocks that there are."""

    @property
    def tail_free(self) -> int:
        """Blocks behind the last one in use."""

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks``; False, with nothing changed, if that cannot be."""

    def grow(self, blocks: int) -> None:
        """Adds ``blocks`` behind the last one."""


class ElasticPool:
    """A worker's side of lending: which blocks are local, which are with the master.

    ``local + lent == capacity`` always. Lending cuts the pool's tail at once; blocks that are asked
    back become local only by ``reclaimed``, when the master has left them.

    Args:
        groups: the worker's blocks, all of them local; resized only through this object.
        worker: geometry of the worker's blocks.
        master: geometry of the master's.
        minimum: blocks that are never lent.
        window: seconds that ``scale_down`` looks back (the paper: one minute).
        granularity: move whole minimum elastic units, or single blocks.

    Attributes:
        capacity: blocks of the worker, wherever they are.
        unit: the fewest blocks that move.
    """

    def __init__(
        self,
        groups: Resizable,
        worker: BlockGeometry,
        master: BlockGeometry,
        *,
        minimum: int = 1,
        window: float = 60.0,
        granularity: Literal["unit", "block"] = "unit",
    ) -> None:
        if not 1 <= minimum <= groups.blocks:
            raise ValueError(
                f"cannot keep at least {minimum} of {groups.blocks} blocks; keep one or more"
            )
        if granularity not in ("unit", "block"):
            raise ValueError(f"granularity is 'unit' or 'block', not {granularity!r}")
        self._groups = groups
        self._worker = worker
        self._master = master
        self._window = LengthWindow(window)
        self.minimum = minimum
        self.capacity = groups.blocks
        whole = minimum_elastic_units(worker=worker, master=master)
        # For single blocks only the worker's side of a step has a number: see ``master_blocks``.
        self._units = whole if granularity == "unit" else ElasticUnits(1, 0)
        self.unit = self._units.worker

    @property
    def local(self) -> int:
        """Blocks that the worker can use."""
        return self._groups.blocks

    @property
    def lent(self) -> int:
        """Blocks of the worker that the master has, or has not yet left."""
        return self.capacity - self._groups.blocks

    @property
    def master_blocks(self) -> int:
        """Whole blocks of the master in what is lent."""
        return blocks_in(self.lent * self._worker.block_bytes, self._master)

    def observe(self, request_length: int, now: float) -> None:
        """A request of so many tokens has come; see ``LengthWindow.add``."""
        self._window.add(request_length, now)

    def scale_up(self, request_length: int) -> int:
        """Blocks to ask back so that a request of so many tokens fits: whole units, if lent.

        Less than Algorithm 1 asks for if less is lent. Changes nothing: see ``reclaimed``.
        """
        wanted = scale_up(self.local, self._worker.page, self._units, request_length)
        return min(wanted.worker, self.lent)

    def scale_down(self, now: float) -> int:
        """Blocks that could be lent: Algorithm 1, but neither in use nor below ``minimum``.

        Whole units, from the tail on; to be called periodically. Changes nothing: see ``lend``.
        """
        longest = self._window.longest(now)
        spare = scale_down(self.local, self._worker.page, self._units, longest)
        possible = min(self._groups.tail_free, self.local - self.minimum)
        return min(spare.worker, possible - possible % self.unit)

    def lend(self, blocks: int) -> bool:
        """Gives the last ``blocks`` to the master.

        Returns:
            False, with nothing changed, if one is in use or ``minimum`` would not be kept.

        Raises:
            ValueError: not whole units; nothing has changed.
        """
        self._check_units(blocks)
        return self.local - blocks >= self.minimum and self._groups.shrink(blocks)

    def reclaimed(self, blocks: int) -> None:
        """The master has left the ``blocks`` that lie directly behind the local ones.

        Raises:
            ValueError: not whole units, or more than is lent; nothing has changed.
        """
        self._check_units(blocks)
        if blocks > self.lent:
            raise ValueError(f"cannot take back {blocks} blocks: {self.lent} are lent")
        self._groups.grow(blocks)

    def _check_units(self, blocks: int) -> None:
        if index(blocks) < 0 or blocks % self.unit:
            raise ValueError(f"cannot move {blocks} blocks; ask for a multiple of {self.unit}")
