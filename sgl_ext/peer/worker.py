"""A worker: lends what it does not need, and has it back in time (SwiftCache §3.5).

Decides between two steps of its engine, in a few microseconds, and waits for nobody. Times are
seconds of any monotonic clock.
"""

from __future__ import annotations

import logging
import os
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
from sgl_ext.peer.process import Process

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """A worker's KV blocks, of which the last ones can go and come back."""

    @property
    def blocks(self) -> int:
        """Blocks that there are."""

    def removable(self, blocks: int) -> int:
        """How many of the last ``blocks`` could be removed now, if caches left them.

        None while something forbids it that passes.
        """

    def vacate(self, blocks: int) -> int:
        """Makes the last ``blocks`` free where only a cache holds them.

        Returns:
            Blocks up to the last one that is still in use.
        """

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks``; False, with nothing changed, if that cannot be."""

    def grow(self, blocks: int) -> None:
        """Adds ``blocks`` behind the last one."""


class Memory(Protocol):
    """A worker's memory: :class:`~sgl_ext.memory.lent.Lendable`."""

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
    """On which a worker lends; times in seconds."""

    granularity: Granularity = "auto"
    window: float = 60.0
    """A need is expected to come again for so long (Algorithm 1: t)."""
    interval: float = 1.0
    """Between two looks at what could be lent."""
    deadline: float = 10.0
    """In which the master leaves what is asked back."""
    lease: float = 10.0
    """A master that is not heard of for so long has lost what was lent to it."""
    keep: int = 0
    """Tokens that are never lent."""


@dataclass
class Counts:
    """What has happened since the start."""

    lent: int = 0
    """Bytes, as :attr:`reclaimed`."""
    reclaimed: int = 0
    replaced: int = 0
    """Times that memory was replaced because its master did not leave it."""


class Worker:
    """One process that lends.

    Args:
        memory: what may be lent.
        pool: the blocks that lie in it, all of them there.
        block: bytes of a block.
        page: tokens of a block.
        first: blocks in front of the pool's.
        memory_page: bytes of a page of memory.
        process: tells whether a process runs.
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
        process: Callable[[int], Process] = Process,
    ) -> None:
        self._memory, self._pool, self._terms = memory, pool, terms
        self._block, self._page, self._first = block, page, first
        self._memory_page = memory_page
        self._capacity = pool.blocks
        self._process_of = process
        self._master: Process | None = None
        self._needs = NeedWindow(terms.window)
        self._looked = self._heard = self._failed = float("-inf")
        # Numbers of the grants that asked something back and that the master may not keep to yet,
        # and when they did.
        self._asked: deque[tuple[int, float]] = deque()
        # By name; who has not left in time, and may still use what was replaced.
        self._late: dict[bytes, Process] = {}
        self._closed = False
        self._lender = Lender(os.urandom(8), os.getpid(), memory.extents)
        self.lending: Lending | None = None
        """How much, with the master that there is."""
        self.refused = ""
        """Why the master takes nothing."""
        self.counts = Counts()

    @property
    def message(self) -> Lend:
        """All that the master should know; to be sent when it changes, and again and again."""
        return self._lender.message

    @property
    def lent(self) -> int:
        """Bytes that the master may be using."""
        return self._lender.bound

    @property
    def used(self) -> int:
        """Bytes that the master says it uses."""
        return self._lender.heard.used if self._lender.heard else 0

    def hear(self, keep: Keep, now: float) -> None:
        """What the master says."""
        if self._lender.hear(keep):
            if not self._end(now):
                return
            logger.info("another master has taken the place of the one before")
            self._lender.hear(keep)
        if self._lender.heard is not keep:
            return
        self._heard = now
        while self._asked and self._asked[0][0] <= keep.number:
            self._asked.popleft()
        if keep.refused != self.refused:
            self.refused = keep.refused
            if keep.refused:
                logger.warning("the master takes no memory of this worker: %s", keep.refused)
        # Of the latest grant, and not of one before.
        if keep.refused and self._lender.granted and keep.number == self._lender.number:
            self._ask_back(0, now)
            self._looked = now + self._terms.window
        if self._master is None:
            self._master = self._process_of(keep.pid)
        # Who answers in this session has left the one before.
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
        """Between two steps of the engine.

        Args:
            need: tokens that all requests have, or come to have, together.
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
            self._ask_back(less, now)
        overdue = bool(self._asked) and now - self._asked[0][1] > self._terms.deadline
        lost = now - self._heard > self._terms.lease or not self._alive()
        if self._lender.bound and (overdue or lost):
            self._end(now)
            return
        self._take_back()
        idle = self._lender.settled and not (lost or self._closed)
        if idle and now - self._looked >= self._terms.interval:
            self._looked = now
            self._lend_more(lending, now)

    def close(self) -> None:
        """Asks everything back in the next steps, and lends nothing any more."""
        self._closed = True

    def _ask_back(self, size: int, now: float) -> None:
        self._lender.grant(size)
        self._asked.append((self._lender.number, now))

    def _alive(self) -> bool:
        return self._master is not None and self._master.alive()

    def _lend_more(self, lending: Lending, now: float) -> None:
        granted, need = self._lender.granted, self._needs.largest(now)
        if (most := lending.scale_down(granted, need, 0)) == granted:
            return
        # What is evicted where nothing can be lent would be evicted for nothing, again and again.
        blocks = self._pool.blocks
        held = blocks - self._pool.removable(blocks - lending.local(most))
        if (most := lending.scale_down(granted, need, held)) == granted:
            return
        used = self._pool.vacate(blocks - lending.local(most))
        more = lending.scale_down(granted, need, used)
        if more > granted and self._pool.shrink(self._pool.blocks - lending.local(more)):
            self._lender.grant(more)
            self.counts.lent += more - granted

    def _take_back(self) -> None:
        """What the master has left is the pool's again."""
        bound = self._lender.bound
        local = self._capacity
        if bound and self.lending is not None:
            local = min(self.lending.local(bound), self._capacity)
        if (back := local - self._pool.blocks) > 0:
            self._pool.grow(back)
            self.counts.reclaimed += back * self._block

    def _end(self, now: float) -> bool:
        """The session is over: the worker has its memory, or other memory in its place."""
        bound = self._lender.bound
        if bound and self._alive():
            if now - self._failed < self._terms.interval:
                return False
            try:
                self._memory.replace(bound)
            except ExtError as error:
                self._failed = now
                logger.error("the master has not left %s B in time, and: %s", f"{bound:,}", error)
                return False
            self.counts.replaced += 1
            if self._master is not None:
                self._late[self._lender.master] = self._master
            logger.warning(
                "the master has not left %s B in time: other memory takes their place",
                f"{bound:,}",
            )
        self._lender.end(self._memory.extents)
        self._asked.clear()
        self.lending = self._master = None
        self._take_back()
        return True
