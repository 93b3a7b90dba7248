"""Agreement between a worker and its master on how much of the worker's memory the master may use.

The agreement is one number for each worker: bytes, counted from the end of its memory. The worker
(:class:`Lender`) numbers its grants. The master (:class:`Borrower`) reports which grant it keeps
to::

    Lender                                     Borrower
      grant(size): bound = max(bound, size)
      -------------- Lend(n, size) -------------> may use up to size; if it uses more, it returns
                                                  the excess first
      <------------- Keep(n) -------------------- keeps to grant n, and to later grants only
      bound = largest of the grants from n on

The worker must not use the last ``bound`` bytes. ``bound`` is never below what the master uses,
even if messages are lost, duplicated or reordered. A master that is silent, or that does not
return memory in time, keeps the memory that it has mapped. The worker maps other memory in its
place (:meth:`Lender.end` says when it must), so that later writes of this master do not reach the
worker. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque

from sgl_ext.memory.lent import Extent
from sgl_ext.peer.messages import Keep, Lend


class Lender:
    """The worker's side of a loan.

    Args:
        worker: unique name of this process.
        pid: pid of this process.
        memory: memory that may be lent, ordered by address.
        gpu: UUID of the GPU that has the memory; empty for host memory.

    Attributes:
        master: name of the master of this session; empty before a master has answered.
        granted: bytes of the latest grant.
        bound: upper bound of the bytes that the master may be using.
        latest: the master's latest message in this session; None before the first.
        busy: whether the worker has requests of its own; set by the owner of this object.
    """

    def __init__(self, worker: bytes, pid: int, memory: tuple[Extent, ...], gpu: str = "") -> None:
        self.worker = worker
        self._pid, self._gpu = pid, gpu
        self._session = 0
        self.busy = False
        self._begin(memory)

    def _begin(self, memory: tuple[Extent, ...]) -> None:
        self._session += 1
        self._memory = memory
        self._message: Lend | None = None
        self.master = b""
        self.granted = self.bound = 0
        self.latest: Keep | None = None
        self._number = 0
        # Number and size of the grants that the master may be keeping to.
        self._open: deque[tuple[int, int]] = deque()

    @property
    def lendable(self) -> int:
        """Largest number of bytes that may be lent."""
        return sum(extent.size for extent in self._memory)

    @property
    def number(self) -> int:
        """Number of the latest grant; 0 before the first."""
        return self._number

    @property
    def settled(self) -> bool:
        """True if the master is known to use no more than the latest grant allows."""
        return self.bound == self.granted

    @property
    def message(self) -> Lend:
        """The message with the full state of this side; the same object while nothing changes."""
        state = self.master, self._number, self.granted, self.busy
        last = self._message
        # Memory of a device has thousands of extents, which a new message checks one by one.
        if last is None or state != (last.master, last.number, last.size, last.busy):
            self._message = last = Lend(
                self.worker, self._session, self.master, self._number, self.granted, self._pid,
                self._memory, self.busy, self._gpu,
            )  # fmt: skip
        return last

    def grant(self, size: int) -> None:
        """Grants ``size`` bytes in total.

        The master may use them as soon as it receives the grant. It uses no more as soon as it
        reports that it keeps to the grant.

        Raises:
            ValueError: ``size`` is negative or exceeds ``lendable``, or there is no master.
        """
        if size and not self.master:
            raise ValueError("there is no master to lend to")
        if not 0 <= size <= self.lendable:
            raise ValueError(f"cannot lend {size:,} B: expected 0 to {self.lendable:,} B")
        if size != self.granted:
            self._number += 1
            self.granted = size
            self._open.append((self._number, size))
            self.bound = max(self.bound, size)

    def receive(self, keep: Keep) -> bool:
        """Processes a message of the master; ignores messages of other workers or sessions.

        Returns:
            True if another master has replaced the master of this session. The caller then ends
            the session and passes the message again.
        """
        if (keep.worker, keep.session) != (self.worker, self._session):
            return False
        if not self.master:
            self.master = keep.master
        elif self.master != keep.master:
            return True
        self.latest = keep
        while self._open and self._open[0][0] < keep.number:
            self._open.popleft()
        if keep.number:
            self.bound = max((size for _, size in self._open), default=self.granted)
        return False

    def end(self, memory: tuple[Extent, ...]) -> None:
        """Ends this session and begins another one.

        Args:
            memory: memory that may be lent from now on. It must not contain the last ``bound``
                bytes of the previous memory while a slow master may still use them.
        """
        self._begin(memory)

    def check_integrity(self) -> None:
        """Raises AssertionError if the bound does not cover a grant that the master may keep to."""
        last = self._number, self.granted
        numbers = [number for number, _ in self._open]
        if numbers != [*range(last[0] - len(numbers) + 1, last[0] + 1)]:
            raise AssertionError(f"grants {numbers} are open, but the latest is {last[0]}")
        if self._open and self._open[-1] != last:
            raise AssertionError(f"the latest grant is {last}, but {self._open[-1]} is open")
        most = max((size for _, size in self._open), default=self.granted)
        if not most <= self.bound <= self.lendable:
            raise AssertionError(
                f"open grants of up to {most:,} B have a bound of {self.bound:,} B, "
                f"of {self.lendable:,} B that may be lent"
            )
        if self.bound and self.latest is None:
            raise AssertionError(f"{self.bound:,} B are lent, but no master has answered")


class Borrower:
    """The master's side of the loan of one worker.

    Args:
        master: unique name of this process.
        pid: pid of this process.
        block: bytes per block of the master.
        lend: the worker's first message.

    Attributes:
        worker: name of the worker.
        gpu: UUID of the GPU that has the worker's memory; empty for host memory.
        session: number of the worker's session.
        pid: pid of the worker.
        size: bytes that may be used, by the latest grant.
        memory: memory that the worker may lend in this session, ordered by address.
        ended: whether the worker has ended the session, so that its memory must be returned.
        busy: whether the worker has requests of its own.
        most: largest number of bytes that can be used; set by the owner of this object.
        refused: reason why nothing is borrowed from this worker; set by the owner of this object.
    """

    def __init__(self, master: bytes, pid: int, block: int, lend: Lend) -> None:
        self._master, self._pid, self._block = master, pid, block
        self.worker, self.gpu = lend.worker, lend.gpu
        self.refused = ""
        self.most = 0
        self._used = 0
        self._begin(lend)
        self.receive(lend)

    def _begin(self, lend: Lend) -> None:
        self.session, self.memory, self.pid = lend.session, lend.memory, lend.pid
        self.size = self._number = self._kept = 0
        self.ended = False

    def receive(self, lend: Lend) -> None:
        """Processes a message of the worker.

        A new session begins once no memory of the previous session is used.
        """
        self.busy = lend.busy
        if lend.session > self.session:
            self.ended, self.size = True, 0
            if self._used:
                return
            self._begin(lend)
        if (lend.session, lend.master) == (self.session, self._master) and not self.ended:
            # A message of a worker that was silent makes the latest grant valid again.
            if lend.number >= self._number:
                self._number, self.size = lend.number, lend.size
            self._settle()

    def silent(self) -> None:
        """Marks the worker as silent: sets ``size`` to 0 until its next message."""
        self.size = 0

    @property
    def used(self) -> int:
        """Bytes that are used.

        Setting it raises ValueError if the new value exceeds both ``size`` and the old value.
        """
        return self._used

    @used.setter
    def used(self, size: int) -> None:
        if size > max(self.size, self._used):
            raise ValueError(f"{size:,} B exceed the {self.size:,} B that were lent")
        self._used = size
        self._settle()

    @property
    def untouched(self) -> bool:
        """True if the worker has granted nothing in this session and none of its memory is used.

        Nothing is lost if such a worker is forgotten.
        """
        return not self._number and not self._used

    @property
    def excess(self) -> int:
        """Bytes in use beyond ``size``, which must be returned."""
        return max(self._used - self.size, 0)

    @property
    def message(self) -> Keep:
        """The message with the full state of this side."""
        return Keep(
            self.worker, self.session, self._master, self._kept, self._pid, self._block,
            self.most, self._used, self.refused,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raises AssertionError if the message would report a grant that is not kept to."""
        there = sum(extent.size for extent in self.memory)
        if not 0 <= max(self._used, self.size) <= there:
            raise AssertionError(
                f"{self._used:,} B are used of {self.size:,} B granted; the worker has {there:,} B"
            )
        if self.ended and self.size:
            raise AssertionError(f"the session has ended, but grants {self.size:,} B")
        if self._kept > self._number or (not self.excess and self._kept != self._number):
            raise AssertionError(
                f"grant {self._kept} is reported as kept, the latest is {self._number}, and "
                f"{self.excess:,} B exceed it"
            )

    def _settle(self) -> None:
        if self._used <= self.size:
            self._kept = self._number
