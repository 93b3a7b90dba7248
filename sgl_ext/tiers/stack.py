"""The tiers as one: host memory, what lies below it, and what is on its way between them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, TypedDict

import numpy as np

from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.slab import Layout
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Priority, outlast
from sgl_ext.memory.transfer import State, Ticket
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies, LayerLoads
from sgl_ext.tiers.demotion import Demotion
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, Traffic, running_rate
from sgl_ext.tiers.waiting import Waiting

_NO_PAGES: Pages = np.empty(0, np.int64)

logger = logging.getLogger(__name__)


class Restored(TypedDict):
    """What one tier gave to a request."""

    tokens: int
    bytes: int
    seconds: float
    """Of the host tier: until the pages of all tiers had been copied to the device."""


class _Load(NamedTuple):
    pages: Pages
    blocks: Pages
    restored: Restored


@dataclass
class _Store:
    """Pages that come from the device; ``ticket`` is None where nothing had to be copied."""

    keys: Sequence[Key]
    pages: Pages
    ticket: Ticket | None
    whole: bool
    """Whether there was room for all that was to be stored."""
    success: bool | None = None


@dataclass(frozen=True, eq=False)
class Saved:
    """A copy of blocks that no key names."""

    pages: Pages
    """In host memory, held."""
    ticket: Ticket


class TierStack:
    """What the scheduler asks. Only its thread calls, and none of it waits for a device.

    Args:
        lower: the nearest first.
        wait: seconds that a request is held back, at most, while its pages come from below.
        spare: pages of host memory that these do not take.
    """

    def __init__(
        self,
        host: HostPages,
        copies: DeviceCopies,
        loads: LayerLoads,
        lower: Sequence[LowerTier],
        *,
        wait: float,
        wake: threading.Event,
        spare: int = 0,
        closing: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.host = host
        self.loads = loads
        self.lower = lower
        self.hits: Counter[str] = Counter()
        """Pages that were loaded, by the tier that had them."""
        self.computed_pages_per_second: float | None = None
        """Of late forwards; a tier that is slower than computing is not waited for."""
        self.loaded = Traffic()
        """To the device."""
        self.stored = Traffic()
        """From the device."""
        self.stores = Priority.BULK
        """Of copies that begin now."""
        self._copies = copies
        self._wake = wake
        self._closing = closing
        self._waiting = Waiting(host, lower, wait, spare=spare)
        self.keepers: list[Callable[[], bool]] = [self._waiting.give_up_one]
        """Each lets the pages be evicted that it keeps for one request that waits, and says whether
        there was one."""
        self._restored: dict[str, dict[str, Restored]] = {}
        self._queued: dict[str, _Load] = {}
        self._loading: dict[int, list[_Load]] = {}
        self._stores: deque[_Store] = deque()
        self._presumed = 0
        self.ended = 0
        """Stores that are over, however they ended."""
        self._behind: list[_Store] = []
        """Popped ones that are not over."""
        self._dropped: list[Saved] = []
        self._again: list[Saved] = []
        page_bytes = copies.layout.block_bytes
        self._demotions = [Demotion(at, tier, host, page_bytes) for at, tier in enumerate(lower)]
        self._off: str | None = None

    # --- loads ------------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: Sequence[Key]) -> int:
        """How many of ``keys``, from the first on, can be loaded now.

        What lies in lower tiers begins to come; :meth:`ready` says when it has.
        """
        here = self.here(keys)
        if self._off is None:
            self._waiting.ask(rid, keys, here, self.computed_pages_per_second)
        return here

    def here(self, keys: Sequence[Key]) -> int:
        """How many of ``keys``, from the first on, host memory has."""
        return 0 if self._off is not None else self.host.lookup(keys)

    def ready(self, rid: str) -> bool:
        """Whether no more pages will come for the request, or not in time.

        To be asked when it is the request's turn: from the first time on it waits.
        """
        return self._waiting.ready(rid)

    def load(self, rid: str, keys: Sequence[Key], blocks: Pages) -> bool:
        """Queues a load of ``keys`` into ``blocks`` of the device for :meth:`start`."""
        if self._off is not None or self.host.lookup(keys) < len(keys):
            return False
        pages = self.host.use(keys)
        self.host.pin(pages)
        restored: dict[str, Restored] = {}
        left = len(keys)
        if (staging := self._waiting.leave(rid)) is not None:
            for name, count in staging.landed.items():
                self._count(restored, name, min(count, left), staging.seconds)
                left -= min(count, left)
        self._count(restored, "host", left, 0.0)
        self._restored[rid] = restored
        self._queued[rid] = _Load(pages, blocks, restored["host"])
        self._offer(keys, pages)
        return True

    def take_restored(self, rid: str) -> dict[str, Restored]:
        """What the request's load was given by each tier; once. Empty if it loaded nothing.

        The seconds of the host tier are set when the load has landed.
        """
        return self._restored.pop(rid, {})

    def start(self) -> int:
        """Starts what is queued, layer by layer; its number for :class:`LayerLoads`, or -1."""
        if not self._queued:
            self.loads.set_consumer(-1)
            return -1
        loads = [*self._queued.values()]
        self._queued.clear()
        pages, blocks = (np.concatenate(parts) for parts in list(zip(*loads, strict=True))[:2])
        index = self.loads.start(self._copies.load(pages, blocks))
        # The batch that is being built runs next, whatever kind it is; SGLang names the consumer
        # for generation only, and an embedding would attend to what has not landed.
        self.loads.set_consumer(index)
        self._loading[index] = loads
        return index

    def finish(self, index: int) -> bool:
        """Waits until a load writes no more; whether all of it landed."""
        seconds = self.loads.finish(index)
        for load in self._loading.pop(index, ()):
            self.host.unpin(load.pages)
            if seconds is not None:
                load.restored["seconds"] = seconds
                self.loaded.pages += len(load.pages)
        self.loaded.seconds += seconds or 0.0
        return seconds is not None

    def cancel(self, rid: str) -> bool:
        """The request is gone; whether a load of it was queued, and is not any more."""
        self.forget(rid)
        if (queued := self._queued.pop(rid, None)) is None:
            return False
        self.host.unpin(queued.pages)
        return True

    def forget(self, rid: str) -> None:
        """The request does not wait any more; what is on its way for it lands nevertheless."""
        self._waiting.leave(rid)
        self._restored.pop(rid, None)

    def hold(self, rid: str, keys: Sequence[Key]) -> Pages:
        """Places of ``keys``, from the first on as far as they can be read now.

        They stay there until :meth:`let_go`. The request does not wait any more.
        """
        self._waiting.leave(rid)
        here = keys[: self.host.lookup(keys)] if self._off is None else ()
        pages = self.host.use(here)
        self.host.pin(pages)
        self.hits["host"] += len(pages)
        self._offer(here, pages)
        return pages

    def fill(self, pages: Pages, blocks: Pages) -> None:
        """Copies held ``pages`` into ``blocks`` of the device, and returns when that is done.

        Raises:
            TimeoutError, TransferError: it is not, and nobody may read the blocks.
        """
        self.begin_fill(pages, blocks).wait(COPY_DEADLINE_S)

    def begin_fill(self, pages: Pages, blocks: Pages) -> Ticket:
        """Begins to copy held ``pages`` into ``blocks`` of the device."""
        return self._copies.fill(pages, blocks)

    def fill_from_the_top(self, pages: Pages, blocks: Pages) -> list[Ticket]:
        """Begins to copy held ``pages`` into ``blocks`` of the device, the last layer first.

        Returns:
            A ticket for each layer, by its number.
        """
        return self._copies.load_from_the_top(pages, blocks)

    def let_go(self, pages: Pages) -> None:
        self.host.unpin(pages)

    def addresses(self, pages: Pages) -> Pages:
        """Of the first byte of each."""
        return self._copies.addresses(pages)

    def used(self, keys: Sequence[Key], times: int) -> None:
        """Pages that lie in the device, too, were asked for so often by now."""
        keys = self.host.present(keys)
        self._offer(keys, self.host.use(keys, times))

    # --- stores -----------------------------------------------------------------------------------

    def store(self, keys: Sequence[Key], blocks: Pages, parent: Key | None = None) -> None:
        """Begins to copy ``blocks`` of the device, which must not change before :meth:`pop`.

        Args:
            parent: of the page before; None if there is none.
        """
        wanted = self.host.missing(keys)
        if (store := self._begin(keys, blocks, wanted, parent)) is None:
            store = _Store((), _NO_PAGES, None, not wanted, success=not wanted)
        self._stores.append(store)

    def store_lost(self, keys: Sequence[Key], blocks: Pages) -> None:
        """As :meth:`store`, of what SGLang takes for stored: host memory has given it up since, or
        had no room for it. Nobody pops it; who is given the blocks waits (:attr:`in_flight`)."""
        coming = {key for store in self._under_way for key in store.keys}
        wanted = [at for at in self.host.missing(keys) if keys[at] not in coming]
        if (store := self._begin(keys, blocks, wanted)) is not None:
            self._behind.append(store)

    def completed(self) -> int:
        """Stores that are over and wait to be popped, in the order of their beginning."""
        self.poll()
        over = sum(1 for _ in takewhile(lambda store: store.success is not None, self._stores))
        return max(over, self._presumed)

    def pop(self) -> bool:
        """Forgets the oldest store, which is over; whether its pages can be found now."""
        store = self._stores.popleft()
        self._presumed = max(self._presumed - 1, 0)
        if store.success is None:
            self._behind.append(store)
            return store.whole
        return store.success

    def presume(self) -> int:
        """Takes the stores that are under way for over, so that their blocks can be given to
        others, who wait for the copies (:attr:`in_flight`); how many wait to be popped."""
        self._presumed = len(self._stores)
        return self._presumed

    def make_room(self, count: int) -> None:
        """Has requests that only wait give up pages that are kept for them, until there is room
        for ``count`` pages of one that loses its blocks now."""
        for give_up_one in self.keepers:
            while self.host.room < count and give_up_one():
                pass

    def save(self, blocks: Pages) -> Saved | None:
        """Begins to copy ``blocks`` of the device for their owner alone, until :meth:`drop`.

        Returns:
            None if there is no room.
        """
        if self._off is not None or (pages := self.host.reserve(len(blocks))) is None:
            return None
        return Saved(pages, self._copies.store(blocks, pages, self.stores))

    def copy_again(self, keys: Sequence[Key], blocks: Pages) -> None:
        """Copies ``blocks`` to the pages of ``keys``, which host memory has; to measure with."""
        if keys:
            pages = self.host.places(keys)
            self.host.pin(pages)
            self._again.append(Saved(pages, self._copies.store(blocks, pages, self.stores)))

    def drop(self, saved: Saved) -> None:
        """Nobody needs the copy any more."""
        saved.ticket.cancel()
        self._dropped.append(saved)
        self._forget_dropped()

    # --- what goes on meanwhile -------------------------------------------------------------------

    def poll(self) -> None:
        """Takes note of what has ended. The scheduler calls it once a step at least."""
        for store in self._under_way:
            if store.ticket is not None and store.ticket.poll():
                self._settle(store)
        if self._behind:
            self._behind = [store for store in self._behind if store.success is None]
        self._forget_dropped()
        self._waiting.advance()
        for demotion in self._demotions:
            demotion.advance()

    @property
    def layout(self) -> Layout:
        """Of a page."""
        return self._copies.layout

    @property
    def enabled(self) -> bool:
        """Whether anything is found and kept."""
        return self._off is None

    @property
    def stores_under_way(self) -> int:
        """Copies from the device that have not ended."""
        return len(self._under_way)

    def storing(self, key: Key) -> bool:
        """Whether a page of that key is about to be found."""
        return any(key in store.keys for store in self._under_way)

    @property
    def in_flight(self) -> BlocksInFlight:
        """Blocks of the device that are being copied."""
        return self._copies.in_flight

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward took so long for so many new tokens."""
        rate = tokens / self.layout.page / seconds
        self.computed_pages_per_second = running_rate(self.computed_pages_per_second, rate)

    def pending(self) -> bool:
        """Whether a request waits for a lower tier."""
        return self._waiting.pending()

    def wait(self, timeout: float) -> None:
        """Sleeps until a thread of a lower tier has ended something, or ``timeout`` seconds."""
        self._wake.wait(timeout)
        self._wake.clear()

    def clear(self) -> None:
        """Forgets host memory's pages, once nothing reads or writes the device any more."""
        self._waiting.leave_all()
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._loading):
            self.finish(index)
        for store in self._under_way:
            if store.ticket is not None:
                store.ticket.cancel()
                outlast(store.ticket)
                self._settle(store)
        for saved in self._again:
            outlast(saved.ticket)
        self._forget_dropped()
        self._stores.clear()
        self._behind.clear()
        self._presumed = 0
        self.host.clear()

    def disable(self, reason: str) -> None:
        """From now on nothing is found and nothing kept, because ``reason``."""
        if self._off is None:
            logger.warning("the tiers are off from now on: %s", reason)
            self._off = reason
            # Copies that are under way end as they would: SGLang waits to be told of each.
            self._waiting.leave_all()
            self.host.clear()

    def close(self) -> None:
        """Ends everything."""
        self.clear()
        self._off = "closed"
        for tier in self.lower:
            tier.close()
        for close in self._closing:
            close()

    @property
    def _under_way(self) -> list[_Store]:
        return [store for store in (*self._stores, *self._behind) if store.success is None]

    def _begin(
        self, keys: Sequence[Key], blocks: Pages, wanted: Sequence[int], parent: Key | None = None
    ) -> _Store | None:
        """Begins to copy those of the pages that there is room for; None if it is none."""
        missing = wanted[: self.host.room if self._off is None else 0]
        if self._off is None:
            self.host.refuse(len(wanted) - len(missing))
        before = keys[missing[0] - 1] if missing and missing[0] else parent
        behind = self.host.place(before)
        if not missing or (pages := self.host.reserve(len(missing), behind)) is None:
            return None
        ticket = self._copies.store(blocks[missing], pages, self.stores)
        names = [keys[at] for at in missing]
        return _Store(names, pages, ticket, len(missing) == len(wanted))

    def _forget_dropped(self) -> None:
        over = [saved for saved in self._dropped if saved.ticket.poll()]
        for saved in over:
            self._dropped.remove(saved)
            self.host.release(saved.pages)
        for saved in [saved for saved in self._again if saved.ticket.poll()]:
            self._again.remove(saved)
            self.host.unpin(saved.pages)

    def _count(self, restored: dict[str, Restored], name: str, pages: int, seconds: float) -> None:
        self.hits[name] += pages
        page, block_bytes = self.layout.page, self.layout.block_bytes
        restored[name] = Restored(tokens=pages * page, bytes=pages * block_bytes, seconds=seconds)

    def _settle(self, store: _Store) -> None:
        self.ended += 1
        ticket = store.ticket
        if ticket is None or ticket.state != State.DONE:
            store.success = False
            self.host.release(store.pages)
            return
        store.success = store.whole
        self.stored.add(len(store.pages), ticket.seconds)
        self.host.publish(store.keys, store.pages)
        self._offer(store.keys, self.host.places(store.keys))

    def _offer(self, keys: Sequence[Key], pages: Pages) -> None:
        for demotion in self._demotions:
            demotion.offer(keys, pages)
