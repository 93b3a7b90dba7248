"""Index of the pages of KV in host memory: slots, uses, pins and eviction."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.block_groups import BlockGroups
from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.runs import runs_of
from sgl_ext.memory.tickets import COPY_DEADLINE_S
from sgl_ext.planning.leaving import Reuse
from sgl_ext.tiers.arena import Key, Pages

logger = logging.getLogger(__name__)

_CHAINS = 64
"""Number of sequences with slots kept for their growth; the ones that grew last."""
_EXPECTED_PAGES = 60
"""Pages of the group of slots that such a sequence gets where there is room (FastSwitch §3.1)."""
_GHOSTS = 4
"""Evicted pages whose use counts are kept, as a multiple of the capacity."""


class HostPages:
    """Slots ``0 .. capacity - 1`` of an arena and the index of the pages in them.

    A slot is free, reserved (for a transfer that fills it, until :meth:`publish` or
    :meth:`release`) or holds a page that is in the index. The least recently used page is evicted
    first. Within one prompt the tail is evicted before the head, because a page is of no use
    without the pages before it. Pinned pages are not evicted.

    Not thread-safe: only the scheduler's thread uses it.

    Args:
        reading: Slots that copies to the device still read, although they may be free; None if
            the owner of a slot waits for such copies itself.
    """

    def __init__(self, capacity: int, reading: BlocksInFlight | None = None) -> None:
        self.capacity = capacity
        self._reading = reading
        self._groups = BlockGroups(capacity, page=1, first=0, expected_tokens=_EXPECTED_PAGES)
        self._chains: OrderedDict[int, None] = OrderedDict()
        self._chain_of = np.full(capacity, -1, np.int64)
        """Sequence of each slot, -1 for none, ``[capacity]``; not updated when a slot is freed."""
        self._begun = 0
        self._index: OrderedDict[Key, int] = OrderedDict()
        self._pins = np.zeros(capacity, np.int32)
        self._pinned = 0  # slots with at least one pin
        self._uses = np.zeros(capacity, np.uint32)
        self._copied = np.zeros(capacity, np.uint8)
        self._ghosts: OrderedDict[Key, int] = OrderedDict()
        """Uses of removed pages by key; the pages that were removed last are kept."""
        self.reuse = Reuse()
        """How often pages are used again, also after they were evicted."""
        self.evicted = 0
        """Pages evicted so far."""
        self.refused = 0
        """Pages refused so far, for want of room."""
        self.enabled = True
        """False after :meth:`disable`."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def room(self) -> int:
        """Slots that :meth:`reserve` can return: the free ones and those of unpinned pages."""
        if not self.enabled:
            return 0
        return self.free + len(self._index) - self._pinned

    @property
    def free(self) -> int:
        """Slots that are neither reserved nor hold a page."""
        return self._groups.available

    def lookup(self, keys: Sequence[Key]) -> int:
        """Returns the number of leading ``keys`` that are resident; 0 if it is disabled.

        Does not count as a use.
        """
        if not self.enabled:
            return 0
        return sum(1 for _ in takewhile(self._index.__contains__, keys))

    def missing(self, keys: Sequence[Key]) -> list[int]:
        """Returns the positions in ``keys`` of the pages that are not resident."""
        return [at for at, key in enumerate(keys) if key not in self._index]

    def present(self, keys: Iterable[Key]) -> list[Key]:
        """Returns the ``keys`` of pages that are resident, in order."""
        return [key for key in keys if key in self._index]

    def places(self, keys: Sequence[Key]) -> Pages:
        """Returns the slots of ``keys``, which must all be resident, ``[keys]``."""
        return np.fromiter(map(self._index.__getitem__, keys), np.int64, len(keys))

    def place(self, key: Key | None) -> int:
        """Returns the slot of a page; -1 if ``key`` is None or not resident."""
        return -1 if key is None else self._index.get(key, -1)

    def use(self, keys: Sequence[Key], times: int = 0) -> Pages:
        """Marks ``keys`` as most recently used, the first key last, and returns their slots.

        All of them must be resident.

        Args:
            times: Number of uses so far, including uses that this index has not seen; each page
                keeps its own count if that is higher. 0 adds one use.
        """
        pages = self.places(keys)
        deque(map(self._index.move_to_end, reversed(keys)), maxlen=0)
        before = self._uses[pages]
        self._uses[pages] = after = np.maximum(before + (times == 0), times)
        self.reuse.used(before, after)
        return pages

    def renew(self, keys: Sequence[Key]) -> int:
        """Marks those of ``keys`` that are resident as most recently used, the first key last.

        It does not count as a use.

        Returns:
            How many of them are not pinned. If fewer pages than the others are evicted, these stay.
        """
        here = self.present(keys)
        deque(map(self._index.move_to_end, reversed(here)), maxlen=0)
        return int(np.count_nonzero(self._pins[self.places(here)] == 0))

    def reserve(self, count: int, after: int | None = None) -> Pages | None:
        """Reserves ``count`` slots in as few runs as possible, and evicts pages if needed.

        Args:
            after: Slot of the page before the first one; the new slots are adjacent to it if
                there is room. -1 if they begin a sequence. With either, slots are kept for the
                growth of the sequence (FastSwitch §3.3); None keeps none.

        Returns:
            The slots ``[count]``; None, with nothing changed, if too many are pinned or reserved,
            or it is disabled. No copy reads them any more.
        """
        lacking = count - self._groups.available
        if not self.enabled or count > self.capacity or not self._evict(lacking):
            return None
        chain = None if after is None else self._chain(after)
        (runs,) = self._groups.allocate([(chain, count)]) or [[]]
        found = [np.arange(start, start + length) for start, length in runs]
        pages = np.concatenate(found) if found else np.empty(0, np.int64)
        if self._reading is not None:
            self._reading.wait(pages, COPY_DEADLINE_S)
        self._chain_of[pages] = -1 if chain is None else chain
        return pages

    def refuse(self, count: int) -> None:
        """Counts ``count`` pages that found no room, and logs a warning the first time."""
        if not self.enabled:
            return
        if count and not self.refused:
            logger.warning(
                "host memory for tiers has no free slots for %d pages (it has %d slots, %d in use "
                "by transfers): they are recomputed, or not stored; raise tiers.host.capacity, or "
                "tiers.staging without a host tier, so that it holds several prompts",
                count, self.capacity, self.capacity - self.room,
            )  # fmt: skip
        self.refused += count

    def publish(self, keys: Sequence[Key], pages: Pages) -> None:
        """Adds ``keys`` to the index; reserved ``pages`` now hold their KV.

        The slot of a key that is already resident is released.
        """
        fresh = [at for at, key in enumerate(keys) if key not in self._index]
        if len(fresh) < len(keys):
            self.release(np.delete(pages, fresh))
            keys, pages = [keys[at] for at in fresh], pages[fresh]
        # The use count of a page survives its eviction.
        seen = np.array([self._ghosts.pop(key, 0) for key in keys], np.uint32)
        self._uses[pages] = seen + 1
        self.reuse.used(seen, seen + 1)
        self._copied[pages] = 0
        self._index.update(zip(reversed(keys), reversed(pages.tolist()), strict=True))

    def release(self, pages: Pages) -> None:
        """Frees reserved slots."""
        self._groups.release(runs_of(pages))

    def pin(self, pages: Pages) -> None:
        """Protects ``pages`` from eviction until :meth:`unpin` is called as often.

        Each page occurs once in ``pages``.
        """
        self._pinned += int(np.count_nonzero(self._pins[pages] == 0))
        self._pins[pages] += 1

    def unpin(self, pages: Pages) -> None:
        """Undoes one :meth:`pin` of ``pages``."""
        self._pins[pages] -= 1
        self._pinned -= int(np.count_nonzero(self._pins[pages] == 0))

    def worth_keeping(self, pages: Pages, uses: int, tier: int) -> NDArray[np.bool_]:
        """Returns a mask of ``pages`` used at least ``uses`` times and not in ``tier``.

        Args:
            tier: Number of the tier, 0 to 7.
        """
        there = (self._copied[pages] & (1 << tier)) != 0
        worth: NDArray[np.bool_] = (self._uses[pages] >= uses) & ~there
        return worth

    def due_again(self, pages: Pages, tier: int) -> NDArray[np.bool_]:
        """Returns a mask of ``pages`` that ``tier`` is to be offered again, although it had them.

        A tier evicts what it sees no use of, and may have lost everything. It is told of uses at
        powers of two.

        Args:
            tier: Number of the tier, 0 to 7.
        """
        uses = self._uses[pages]
        there = (self._copied[pages] & (1 << tier)) != 0
        due: NDArray[np.bool_] = there & (uses > 1) & ((uses & (uses - 1)) == 0)
        return due

    def copied(self, pages: Pages) -> NDArray[np.bool_]:
        """Returns a mask of ``pages`` that a tier holds or is about to store."""
        there: NDArray[np.bool_] = self._copied[pages] != 0
        return there

    def mark_copied(self, pages: Pages, tier: int, copied: bool) -> None:
        """Records whether a tier holds ``pages`` or is about to store them.

        Args:
            tier: Number of the tier, 0 to 7.
        """
        self._copied[pages] &= ~np.uint8(1 << tier)
        self._copied[pages] |= np.uint8(copied << tier)

    def clear(self) -> None:
        """Removes every page that is not pinned, and keeps its use count."""
        self._remove([key for key, page in self._index.items() if not self._pins[page]])
        for chain in self._chains:
            self._groups.close(chain)
        self._chains.clear()

    def disable(self) -> None:
        """Clears the index; from now on :meth:`lookup` finds nothing, and no slot is reserved."""
        self.clear()
        self.enabled = False

    def _chain(self, after: int) -> int:
        """Returns the sequence that continues after slot ``after``, a new one if there is none.

        Slots are kept for the growth of the last ``_CHAINS`` sequences only.
        """
        chain = int(self._chain_of[after]) if after >= 0 else -1
        if chain not in self._chains:
            chain, self._begun = self._begun, self._begun + 1
        self._chains[chain] = None
        self._chains.move_to_end(chain)
        if len(self._chains) > _CHAINS:
            self._groups.close(self._chains.popitem(last=False)[0])
        return chain

    def _evict(self, count: int) -> bool:
        if count <= 0:
            return True
        unpinned = (key for key, page in self._index.items() if not self._pins[page])
        keys = list(islice(unpinned, count))
        if len(keys) < count:
            return False
        self.evicted += count
        self._remove(keys)
        return True

    def _remove(self, keys: Sequence[Key]) -> None:
        pages = np.fromiter(map(self._index.pop, keys), np.int64, len(keys))
        self._ghosts.update(zip(keys, self._uses[pages].tolist(), strict=True))
        while len(self._ghosts) > _GHOSTS * self.capacity:
            self._ghosts.popitem(last=False)
        self._groups.release(runs_of(np.sort(pages)))

    def check_integrity(self, pinned: Iterable[Pages] = (), reserved: Iterable[Pages] = ()) -> None:
        """Checks the index, the slots and the pins against each other. O(capacity).

        Args:
            pinned: Pages that their owners have pinned, once for each owner; all owners or some.
            reserved: Slots that their owners have reserved; all owners or some.

        Raises:
            AssertionError: A slot is counted twice or not at all, or the pins do not add up.
        """
        self._groups.check_integrity()
        places = _joined([np.fromiter(self._index.values(), np.int64, len(self)), *reserved])
        if len(np.unique(places)) < len(places):
            raise AssertionError(f"pages and reservations share places: {np.sort(places)}")
        if (free := self._groups.unused(places)) is not None:
            raise AssertionError(f"place {free} is free, and reserved or in the index")
        if (self._pins < 0).any():
            raise AssertionError(f"unpinned too often: {np.flatnonzero(self._pins < 0)}")
        if self._pinned != np.count_nonzero(self._pins):
            raise AssertionError(f"{self._pinned} places are counted as pinned: {self._pins}")
        owners = np.bincount(_joined(pinned), minlength=self.capacity)
        if (lacking := np.flatnonzero(owners > self._pins)).size:
            raise AssertionError(f"places {lacking} have more owners than pins")


def _joined(pages: Iterable[Pages]) -> Pages:
    return np.concatenate([np.empty(0, np.int64), *pages])
