"""What a worker and its master agree on: how much of the worker's memory the master may use.

That is one number for each worker: bytes, counted from the end of its memory. The worker
(:class:`Lender`) numbers its grants; the master (:class:`Borrower`) says which grant it keeps to::

    Lender                                     Borrower
      grant(size): bound = max(bound, size)
      -------------- Lend(n, size) -------------> may use up to size; if it uses more, it leaves
                                                  that first
      <------------- Keep(n) -------------------- keeps to grant n, and to later ones only
      bound = largest of the grants from n on

``bound`` is what the worker has to leave alone. It never is below what the master uses, whatever
the network does. A master that is not heard of, or does not leave in time, keeps the memory that it
has mapped, and the worker puts other memory in its place (:meth:`Lender.end` says when it must):
what such a master still writes reaches nobody. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque

from sgl_ext.memory.lent import Extent
from sgl_ext.peer.messages import Keep, Lend


class Lender:
    """A worker's side.

    Args:
        worker: names this process.
        pid: of this process.
        memory: what may be lent.

    Attributes:
        master: whom the session is with; empty before one has answered.
        granted: bytes, by the latest grant.
        bound: bytes that the master may be using.
        heard: the master's latest message.
        busy: whether the worker has requests of its own; set by the owner.
    """

    def __init__(self, worker: bytes, pid: int, memory: tuple[Extent, ...]) -> None:
        self.worker = worker
        self._pid = pid
        self._session = 0
        self.busy = False
        self._begin(memory)

    def _begin(self, memory: tuple[Extent, ...]) -> None:
        self._session += 1
        self._memory = memory
        self.master = b""
        self.granted = self.bound = 0
        self.heard: Keep | None = None
        self._number = 0
        # Number and size of the grants that the master may keep to.
        self._open: deque[tuple[int, int]] = deque()

    @property
    def lendable(self) -> int:
        """Bytes that may be lent at most."""
        return sum(extent.size for extent in self._memory)

    @property
    def number(self) -> int:
        """Of the latest grant."""
        return self._number

    @property
    def settled(self) -> bool:
        """Whether the master is known to keep to the latest grant."""
        return self.bound == self.granted

    @property
    def message(self) -> Lend:
        """All that this side knows."""
        return Lend(
            self.worker, self._session, self.master, self._number, self.granted, self._pid,
            self._memory, self.busy,
        )  # fmt: skip

    def grant(self, size: int) -> None:
        """The master may use so much from when it hears of it, and no more from when it says so.

        Raises:
            ValueError: there is not so much, or nobody to lend it to.
        """
        if size and not self.master:
            raise ValueError("there is no master to lend to")
        if not 0 <= size <= self.lendable:
            raise ValueError(f"cannot lend {size:,} B of {self.lendable:,} B")
        if size != self.granted:
            self._number += 1
            self.granted = size
            self._open.append((self._number, size))
            self.bound = max(self.bound, size)

    def hear(self, keep: Keep) -> bool:
        """What the master says.

        Returns:
            Whether another master has taken the place of this session's: the session is to be
            ended, and this to be heard again.
        """
        if (keep.worker, keep.session) != (self.worker, self._session):
            return False
        if not self.master:
            self.master = keep.master
        elif self.master != keep.master:
            return True
        self.heard = keep
        while self._open and self._open[0][0] < keep.number:
            self._open.popleft()
        if keep.number:
            self.bound = max((size for _, size in self._open), default=self.granted)
        return False

    def end(self, memory: tuple[Extent, ...]) -> None:
        """This session is over, another one begins.

        Args:
            memory: what may be lent from now on. None of the last ``bound`` bytes of what was
                there before: a master that was only slow may still use those.
        """
        self._begin(memory)


class Borrower:
    """A master's side of one worker's loan.

    Args:
        master: names this process.
        pid: of this process.
        block: bytes of one of its blocks.
        lend: the worker's first message.

    Attributes:
        size: bytes that may be used, by the latest grant.
        memory: the worker's, in this session.
        over: whether the worker has ended the session: its memory is to be left.
        busy: whether the worker has requests of its own.
        most: bytes that can be used at all; set by the owner.
        refused: why nothing is taken from this worker; set by the owner.
    """

    def __init__(self, master: bytes, pid: int, block: int, lend: Lend) -> None:
        self._master, self._pid, self._block = master, pid, block
        self.worker = lend.worker
        self.refused = ""
        self.most = 0
        self._used = 0
        self._begin(lend)
        self.hear(lend)

    def _begin(self, lend: Lend) -> None:
        self.session, self.memory, self.pid = lend.session, lend.memory, lend.pid
        self.size = self._number = self._kept = 0
        self.over = False

    def hear(self, lend: Lend) -> None:
        """What the worker says. A new session begins when nothing is used of the one before."""
        self.busy = lend.busy
        if lend.session > self.session:
            self.over, self.size = True, 0
            if self._used:
                return
            self._begin(lend)
        if (lend.session, lend.master) == (self.session, self._master) and not self.over:
            # The latest grant counts again when a worker that was silent is heard.
            if lend.number >= self._number:
                self._number, self.size = lend.number, lend.size
            self._settle()

    def silent(self) -> None:
        """The worker has not been heard of for long: what it lent is left until it is."""
        self.size = 0

    @property
    def used(self) -> int:
        """Bytes that are used; raised to at most ``size``."""
        return self._used

    @used.setter
    def used(self, size: int) -> None:
        if size > max(self.size, self._used):
            raise ValueError(f"{size:,} B are more than the {self.size:,} B that were lent")
        self._used = size
        self._settle()

    @property
    def untouched(self) -> bool:
        """Whether the worker has granted nothing yet: nothing is lost if it is forgotten."""
        return not self._number and not self._used

    @property
    def excess(self) -> int:
        """Bytes to leave."""
        return max(self._used - self.size, 0)

    @property
    def message(self) -> Keep:
        """All that this side knows."""
        return Keep(
            self.worker, self.session, self._master, self._kept, self._pid, self._block,
            self.most, self._used, self.refused,
        )  # fmt: skip

    def _settle(self) -> None:
        if self._used <= self.size:
            self._kept = self._number
