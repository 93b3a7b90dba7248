"""The worker, which lends memory that it does not need and reclaims it in time (SwiftCache §3.5).

It decides between two steps of its engine, in a few microseconds, and never waits for the master.
Times are in seconds of any monotonic clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sgl_ext.errors import ExtError
from sgl_ext.memory.lent import Extent
from sgl_ext.peer.lending import Granularity, Lending, choose_unit
from sgl_ext.peer.loan import Lender
from sgl_ext.peer.messages import Keep, Lend
from sgl_ext.peer.need import NeedWindow
from sgl_ext.peer.process import Identity, Process

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """A worker's KV blocks, of which the last ones can be removed and added again."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""

    def removable(self, blocks: int) -> int:
        """Returns how many of the last ``blocks`` blocks could be removed if caches were evicted.

        Returns 0 while a temporary condition forbids removal.
        """

    def vacate(self, blocks: int) -> int:
        """Evicts caches from the last ``blocks`` blocks where nothing else holds them.

        Returns:
            Number of blocks up to the last one that is still in use.
        """

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks`` blocks; returns False, with nothing changed, if it cannot."""

    def grow(self, blocks: int) -> None:
        """Adds ``blocks`` blocks after the last one."""


class Memory(Protocol):
    """A worker's lendable memory; see :class:`~sgl_ext.memory.lent.Lendable`."""

    @property
    def extents(self) -> tuple[Extent, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def retired(self) -> int: ...
    def replace(self, size: int) -> None: ...
    def discard(self) -> None: ...


@dataclass(frozen=True)
class Terms:
    """Terms on which a worker lends; times are in seconds."""

    granularity: Granularity = "auto"
    """Unit of lending; see :func:`~sgl_ext.peer.lending.choose_unit`"""
    window: float = 60.0
    """Time for which a past need is expected to recur (``t`` in Algorithm 1)"""
    interval: float = 1.0
    """Shortest time between two attempts to lend more"""
    deadline: float = 10.0
    """Time in which the master must return reclaimed memory"""
    lease: float = 10.0
    """Silence after which a master loses the memory that was lent to it"""
    keep: int = 0
    """Number of tokens for which memory is never lent"""


@dataclass
class Counts:
    """Totals since the start."""

    lent: int = 0
    """Bytes that were lent"""
    reclaimed: int = 0
    """Bytes that were reclaimed"""
    replaced: int = 0
    """Number of times that memory was replaced because its master did not return it"""


class Worker:
    """One process that lends memory.

    Args:
        memory: memory that may be lent.
        pool: the KV blocks; none of them is lent yet.
        terms: terms of lending.
        block: bytes per block.
        page: tokens per block.
        first: number of blocks before the first block of the pool.
        memory_page: bytes per page of memory.
        identity: identity of this process.
        gpu: UUID of the GPU that has the memory; empty for host memory.
        process: constructor of an object that tells whether a pid is alive.
    """

    def __init__(
        self,
        memory: Memory,
        pool: Pool,
        terms: Terms,
        *,
        block: int,
        page: int,
        first: int,
        memory_page: int,
        identity: Identity,
        gpu: str = "",
        process: Callable[[int], Process] = Process,
    ) -> None:
        self._memory, self._pool, self._terms = memory, pool, terms
        self._block, self._page, self._first = block, page, first
        self._memory_page = memory_page
        self._capacity = pool.blocks
        self._process_of = process
        self._master: Process | None = None
        self._needs = NeedWindow(terms.window)
        self._tried = self._received = self._failed = float("-inf")
        # Number and time of each grant that reclaims memory, until the master keeps to it.
        self._reclaims: deque[tuple[int, float]] = deque()
        # Masters by name that did not return memory in time and may still use replaced memory.
        self._late: dict[bytes, Process] = {}
        self._closed = False
        self._lender = Lender(*identity, memory.extents, gpu)
        self.lending: Lending | None = None
        """Lending policy for the current master; None without a master"""
        self.refused = ""
        """Reason why the master borrows no memory; empty if there is none"""
        self.counts = Counts()
        """Totals since the start"""

    @property
    def message(self) -> Lend:
        """The message for the master, to be sent when it changes and at every beat."""
        return self._lender.message

    @property
    def lent(self) -> int:
        """Upper bound of the bytes that the master may be using."""
        return self._lender.bound

    @property
    def used(self) -> int:
        """Bytes that the master reports as used."""
        return self._lender.latest.used if self._lender.latest else 0

    def receive(self, keep: Keep, now: float) -> None:
        """Processes a message of the master."""
        if self._lender.receive(keep):
            if not self._end(now):
                return
            logger.info("another master has replaced the previous one")
            self._lender.receive(keep)
        if self._lender.latest is not keep:
            return
        self._received = now
        while self._reclaims and self._reclaims[0][0] <= keep.number:
            self._reclaims.popleft()
        if keep.refused != self.refused:
            self.refused = keep.refused
            if keep.refused:
                logger.warning("the master does not borrow memory of this worker: %s", keep.refused)
        # The refusal must be about the latest grant, not about an earlier one.
        if keep.refused and self._lender.granted and keep.number == self._lender.number:
            self._reclaim(0, now)
            self._tried = now + self._terms.window
        if self._master is None:
            self._master = self._process_of(keep.pid)
        # A master that answers in this session uses no memory of earlier ones.
        self._late.pop(keep.master, None)
        most = min(self._memory.size, keep.most)
        if self.lending is None or self.lending.size != most:
            self.lending = Lending(
                most, self._memory.end, self._block, self._page, self._first,
                choose_unit(
                    self._block, keep.block, most, self._memory_page, self._terms.granularity
                ),
            )  # fmt: skip

    def step(self, need: int, now: float) -> None:
        """Reclaims memory that is needed and lends memory that is not.

        Runs between two steps of the engine.

        Args:
            need: sum of the tokens that all requests have and may soon have.
        """
        self._lender.busy = need > 0
        need = max(need, self._terms.keep)
        self._needs.add(need, now)
        if self._memory.retired:
            self._late = {name: late for name, late in self._late.items() if late.alive()}
            if not self._late:
                self._memory.discard()
        if (lending := self.lending) is None:
            return
        granted = self._lender.granted
        less = 0 if self._closed else lending.scale_up(granted, need)
        if less < granted:
            self._reclaim(less, now)
        overdue = bool(self._reclaims) and now - self._reclaims[0][1] > self._terms.deadline
        lost = now - self._received > self._terms.lease or not self._alive()
        if self._lender.bound and (overdue or lost):
            self._end(now)
            return
        self._add_returned()
        idle = self._lender.settled and not (lost or self._closed)
        if idle and now - self._tried >= self._terms.interval:
            self._tried = now
            self._lend_more(lending, now)

    def close(self) -> None:
        """Stops lending, and reclaims all lent memory during the next steps."""
        self._closed = True

    def check_integrity(self) -> None:
        """Checks the loan and that the pool does not reach into it, between two steps.

        Raises:
            AssertionError: the pool has blocks that the master may be using, or a reclaim is
                awaited although the master uses no more than it may.
        """
        self._lender.check_integrity()
        if self._lender.bound and (self.lending is None or self._master is None):
            raise AssertionError(f"{self._lender.bound:,} B are lent, but to no master")
        if (blocks := self._pool.blocks) > self._local:
            raise AssertionError(f"the pool has {blocks} blocks, {self._local} are not lent")
        if self._reclaims and self._lender.settled:
            raise AssertionError(f"{self._reclaims} are awaited, but all memory is returned")

    def _reclaim(self, size: int, now: float) -> None:
        self._lender.grant(size)
        self._reclaims.append((self._lender.number, now))

    def _alive(self) -> bool:
        return self._master is not None and self._master.alive()

    def _lend_more(self, lending: Lending, now: float) -> None:
        granted, need = self._lender.granted, self._needs.largest(now)
        if (most := lending.scale_down(granted, need, 0)) == granted:
            return
        # Check first how much could be removed: caches must not be evicted at every attempt from
        # blocks that cannot be lent.
        blocks = self._pool.blocks
        held = blocks - self._pool.removable(blocks - lending.local(most))
        if (most := lending.scale_down(granted, need, held)) == granted:
            return
        used = self._pool.vacate(blocks - lending.local(most))
        more = lending.scale_down(granted, need, used)
        if more > granted and self._pool.shrink(self._pool.blocks - lending.local(more)):
            self._lender.grant(more)
            self.counts.lent += more - granted

    @property
    def _local(self) -> int:
        """Number of blocks before the memory that the master may be using."""
        if not self._lender.bound or self.lending is None:
            return self._capacity
        return min(self.lending.local(self._lender.bound), self._capacity)

    def _add_returned(self) -> None:
        """Adds the blocks that the master has returned to the pool."""
        if (back := self._local - self._pool.blocks) > 0:
            self._pool.grow(back)
            self.counts.reclaimed += back * self._block

    def _end(self, now: float) -> bool:
        """Ends the session; replaces lent memory that a live master has not returned.

        Returns:
            False if the memory cannot be replaced now; the session then continues.
        """
        bound = self._lender.bound
        if bound and self._alive():
            if now - self._failed < self._terms.interval:
                return False
            try:
                self._memory.replace(bound)
            except ExtError as error:
                self._failed = now
                logger.error(
                    "the master has not returned %s B by the deadline: %s", f"{bound:,}", error
                )
                return False
            self.counts.replaced += 1
            if self._master is not None:
                self._late[self._lender.master] = self._master
            logger.warning(
                "the master has not returned %s B by the deadline; they are replaced by other "
                "memory",
                f"{bound:,}",
            )
        self._lender.end(self._memory.extents)
        self._reclaims.clear()
        self._tried = float("-inf")  # another master need not refuse as this one has
        self.lending = self._master = None
        self._add_returned()
        return True
