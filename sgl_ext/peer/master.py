"""The master, which serves requests in memory that workers lend it (SwiftCache §3.2, §3.5).

It decides between two steps of its engine and never waits for a worker. Times are in seconds of any
monotonic clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from sgl_ext.errors import ExtError
from sgl_ext.memory.lent import Extent
from sgl_ext.peer.loan import Borrower
from sgl_ext.peer.messages import Keep, Lend
from sgl_ext.peer.process import Identity, Process
from sgl_ext.peer.regions import Region, Regions

logger = logging.getLogger(__name__)

_WORKERS = 64
"""Largest number of workers whose loans are kept; a master has addresses for fewer"""


class Addresses(Protocol):
    """Addresses at which the memory of workers is mapped."""

    def refusal(self, gpu: str) -> str:
        """Returns why memory of a GPU cannot be mapped; an empty string if it can.

        Args:
            gpu: UUID of the GPU; empty for host memory.
        """

    def map(self, region: Region, worker: Identity, extents: Sequence[Extent]) -> None:
        """Maps memory of a worker in ``region``; raises ExtError if that fails."""

    def unmap(self, region: Region) -> None:
        """Unmaps the memory in ``region``."""


class Blocks(Protocol):
    """The engine's KV blocks; ranges are ``[start, end)``."""

    def clear(self, start: int, end: int) -> None:
        """Clears blocks that their worker may have used since this engine did."""

    def restore(self, start: int, end: int) -> None:
        """Makes the blocks available for allocation."""

    def withdraw(self, start: int, end: int) -> int:
        """Withdraws the blocks that are not in use; returns the number of blocks in use."""

    def vacate(self, start: int, end: int) -> None:
        """Makes requests and caches release the blocks, at once or as soon as they can."""


@dataclass
class Loan:
    """Loan of one worker.

    Attributes:
        borrower: the master's side of the agreement.
        process: the worker's process.
        received: time of the worker's last message.
        granted: bytes that the worker granted in its last message.
        session: number of the worker's session.
        region: region in which the worker's memory is mapped; None while it is not mapped.
        first: first block that is or may be in use; the region's end if there is none.
        returning: whether blocks from ``first`` on are still being vacated.
        tried: size of the grant for which mapping was tried last, in bytes; it is not tried again
            for the same size.
    """

    borrower: Borrower
    process: Process
    received: float
    granted: int = 0
    session: int = 0
    region: Region | None = None
    first: int = 0
    returning: bool = False
    tried: int = 0


class Master:
    """One process that borrows memory.

    Args:
        addresses: addresses at which the memory of workers is mapped.
        blocks: the engine's KV blocks.
        regions: allocator of regions.
        block: bytes per block.
        capacity: largest number of bytes to borrow.
        lease: silence of a worker after which its memory is returned, in seconds, because the
            worker may need it.
        identity: identity of this process.
        process: constructor of an object that tells whether a pid is alive.
    """

    def __init__(
        self,
        addresses: Addresses,
        blocks: Blocks,
        regions: Regions,
        *,
        block: int,
        capacity: int,
        lease: float,
        identity: Identity,
        process: Callable[[int], Process] = Process,
    ) -> None:
        self._addresses, self._blocks, self._regions = addresses, blocks, regions
        self._block, self._capacity, self._lease = block, capacity, lease
        self._process_of = process
        self._identity = identity
        self._loans: dict[bytes, Loan] = {}
        self._closed = False
        self._crowded = False
        self._unseen = 0
        """Pid of the last worker that sends messages and is no process here."""

    @property
    def loans(self) -> Sequence[Loan]:
        """Loans of all known workers."""
        return list(self._loans.values())

    @property
    def borrowed(self) -> int:
        """Borrowed bytes that are in use."""
        return sum(loan.borrower.used for loan in self._loans.values())

    @property
    def worker_busy(self) -> bool:
        """True if a worker whose memory is in use has requests of its own."""
        return any(loan.borrower.busy and loan.borrower.used for loan in self._loans.values())

    def messages(self) -> Iterator[Keep]:
        """Yields one message for each worker, to be sent when it changes and at every beat."""
        for loan in self._loans.values():
            yield loan.borrower.message

    def receive(self, lend: Lend, now: float) -> None:
        """Processes a message of a worker; ignores new workers while there are too many."""
        if (loan := self._loans.get(lend.worker)) is None:
            if len(self._loans) >= _WORKERS:
                if not self._crowded:
                    logger.warning(
                        "%d workers lend to this master, which ignores further workers until one "
                        "of them ends: give some of the workers another socket directory and "
                        "another master",
                        _WORKERS,
                    )
                self._crowded = True
                return
            borrower = Borrower(*self._identity, self._block, lend)
            loan = Loan(borrower, self._process_of(lend.pid), now, session=lend.session)
            self._loans[lend.worker] = loan
            if lend.pid != self._unseen and not loan.process.alive():
                self._unseen = lend.pid
                logger.warning(
                    "process %d, which offers memory, does not exist here, so that none is "
                    "borrowed: it has ended, or runs in another PID namespace (run both engines "
                    "in one)",
                    lend.pid,
                )
        loan.borrower.receive(lend)
        loan.received, loan.granted = now, lend.size

    def step(self, now: float) -> None:
        """Returns reclaimed memory and borrows lent memory, between two steps of the engine."""
        for worker, loan in list(self._loans.items()):
            borrower = loan.borrower
            gone = not loan.process.alive()
            silent = now - loan.received > self._lease
            if gone or self._closed or silent:
                borrower.silent()
            if loan.region is None:
                self._offer(borrower)
            elif borrower.excess:
                self._return(loan, loan.region)
            if loan.region is not None and loan.session != borrower.session:
                self._unmap(loan, loan.region)
            loan.session = borrower.session
            if self._wanted(loan) > borrower.used or (loan.returning and not borrower.excess):
                self._borrow(loan)
            if not borrower.size:
                loan.tried = 0
            if self._closed:
                borrower.refused = "this master is shutting down"
            if (gone and not borrower.used) or (borrower.untouched and silent):
                if loan.region is not None:
                    self._unmap(loan, loan.region)
                del self._loans[worker]
                self._crowded = False

    @property
    def granted(self) -> int:
        """Bytes that workers have granted, in use or not."""
        return sum(loan.granted for loan in self._loans.values())

    def close(self) -> None:
        """Stops borrowing memory, and returns the memory in use during the next steps.

        Workers then reclaim what they lend.
        """
        self._closed = True

    def check_integrity(self) -> None:
        """Checks the loans against the regions, between two steps. O(workers).

        Raises:
            AssertionError: memory in use is not mapped, a region is lost or shared, or the regions
                exceed the capacity.
        """
        regions = [loan.region for loan in self._loans.values() if loan.region is not None]
        self._regions.check_integrity(regions)
        if (taken := sum(region.size for region in regions)) > self._capacity:
            raise AssertionError(f"{taken:,} B are mapped, of {self._capacity:,} B at most")
        for loan in self._loans.values():
            loan.borrower.check_integrity()
            used, region = loan.borrower.used, loan.region
            if used > (0 if region is None else region.size):
                raise AssertionError(f"{used:,} B are used, but the region is {region}")
            if region is not None and loan.first != region.blocks(used, self._block):
                raise AssertionError(f"{used:,} B of {region} are used, from {loan.first} on")
            if loan.returning and not used:
                raise AssertionError(f"blocks of {region} are returned, but none is used")

    def _offer(self, borrower: Borrower) -> None:
        """Sets how many bytes could be used of a worker whose memory is not mapped."""
        taken = sum(loan.region.size for loan in self._loans.values() if loan.region is not None)
        most = max(min(self._regions.largest, self._capacity - taken), 0)
        borrower.most = most // self._regions.page * self._regions.page
        full = "this master has borrowed as much as it can; raise its peer.capacity to borrow more"
        if refusal := self._addresses.refusal(borrower.gpu):
            borrower.most = 0
            borrower.refused = refusal
        elif not borrower.most:
            borrower.refused = full
        elif borrower.refused == full:
            borrower.refused = ""

    def _wanted(self, loan: Loan) -> int:
        """Returns how many of the lent bytes to use."""
        size = loan.borrower.size
        return size if loan.region is None else min(size, loan.region.size)

    def _return(self, loan: Loan, region: Region) -> None:
        first = region.blocks(loan.borrower.size, self._block)
        if loan.returning:  # the grant may have grown meanwhile
            self._blocks.restore(first, region.end)
        if self._blocks.withdraw(loan.first, first):
            self._blocks.vacate(loan.first, first)
            if self._blocks.withdraw(loan.first, first):
                loan.returning = True
                return
        loan.first, loan.returning = first, False
        loan.borrower.used = loan.borrower.size

    def _borrow(self, loan: Loan) -> None:
        borrower = loan.borrower
        if loan.region is None:
            loan.region = self._map(loan)
        if (region := loan.region) is None:
            return
        wanted = self._wanted(loan)
        first = region.blocks(wanted, self._block)
        if first < loan.first:
            self._blocks.clear(first, loan.first)
        self._blocks.restore(first, region.end)
        loan.first, loan.returning = first, False
        borrower.used = wanted

    def _map(self, loan: Loan) -> Region | None:
        borrower = loan.borrower
        if not borrower.most or loan.tried == borrower.size:
            return None
        loan.tried = borrower.size
        memory = _last(borrower.memory, borrower.most)
        region = self._regions.allocate(sum(extent.size for extent in memory))
        if region is None:
            return None
        try:
            self._addresses.map(region, Identity(borrower.worker, borrower.pid), memory)
        except ExtError as error:
            self._addresses.unmap(region)  # a part may have been mapped
            self._regions.free(region)
            logger.warning("cannot use memory of worker process %d: %s", borrower.pid, error)
            borrower.refused = str(error)
            return None
        borrower.refused = ""
        borrower.most = region.size
        loan.first = region.end
        return region

    def _unmap(self, loan: Loan, region: Region) -> None:
        """Unmaps and frees the region of a loan that is not in use."""
        self._addresses.unmap(region)
        self._regions.free(region)
        loan.region = None


def _last(memory: Sequence[Extent], size: int) -> list[Extent]:
    """Returns the last ``size`` bytes of ``memory``, ordered by address."""
    parts: list[Extent] = []
    for extent in reversed(memory):
        if part := min(extent.size, size):
            offset = extent.offset + extent.size - part
            parts.insert(0, replace(extent, offset=offset, size=part))
        size -= part
    return parts
