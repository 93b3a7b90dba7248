"""Tier on a Mooncake store: memory of many machines behind one master, shared by key.

This tier, not the store, validates pages: every fetched page is checked against its trailer. A
page that is torn, has another layout or belongs to another key is a miss.

The library accesses only the landing memory of this tier, and pages are copied between it and the
arena. There are two reasons. The library may still write after a call has returned: it gives up a
transfer after 60 s, but its transport continues with its queue; an arena slot must not change
after ``load`` has returned. And other tiers write the trailers of the arena in place. The copy is
several times faster than the network.

The store trusts its network: every host that reaches its ports can read and write all of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers import mooncake
from sgl_ext.tiers.arena import VERSION, Arena, Key, Pages
from sgl_ext.tiers.mooncake import TIMEOUT, Client, Codes
from sgl_ext.tiers.tier import TierStatistics, leading

_BATCH_BYTES = 8 << 20
"""Largest transfer in bytes: larger ones are not faster, and each must end by the deadline."""
_BATCH_PAGES = 256
"""Largest transfer in pages: the TCP transport rejects what exceeds its queue, some 2,000 pages for
a peer."""


class RemoteTier:
    """:class:`~sgl_ext.tiers.tier.Tier` on Mooncake Store.

    Everything is a miss while the master is unreachable. A restarted master has lost all pages.
    """

    name = "remote"
    immediate = False

    def __init__(
        self,
        arena: Arena,
        *,
        master: str,
        segment: int = 1 << 30,
        deadline: float = 2.0,
        host: str | None = None,
    ) -> None:
        """Joins the store; waits up to ``deadline`` for it, then starts without it.

        Args:
            arena: Memory that pages are stored from and loaded to.
            master: ``HOST:PORT`` of the master.
            segment: Bytes of this machine's memory that this process adds to the store; 0 for none.
            deadline: Seconds that a lookup, or one batch of a load or a store, may take.
            host: Address at which peers reach this machine; by default, the local address of the
                route to the master.

        Raises:
            ExtError: The client library is missing, or an argument is invalid.
        """
        self._arena = arena
        self._prefix = f"sgl_ext-v{VERSION}-{arena.digest.hex()}-"
        self._batch = max(1, min(_BATCH_PAGES, _BATCH_BYTES // arena.stride))
        self._landing = Arena(arena.layout, mooncake.WORKERS * self._batch)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(0, self._landing.pages, self._batch):
            self._free.put(place)
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._stored = 0
        # Increases across restarts, too.
        self._sequence = time.time_ns()
        self._deadline = deadline
        self._client = Client(
            self._landing.memory,
            master=master,
            segment=segment,
            deadline=deadline,
            host=host,
        )

    @property
    def available(self) -> bool:
        """True unless the store is unreachable."""
        return self._client.available

    def lookup(self, keys: Sequence[Key]) -> int:
        """Returns the number of leading ``keys`` that the store reports as present."""
        return leading(self._present(self._names(keys)) == 1)

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Fetches pages into arena slots.

        Returns:
            A mask, bool ``[keys]``, that is True where a page has landed and verifies.
        """
        names = self._names(keys)
        landed = np.zeros(len(keys), np.bool_)
        for batch in self._batches(len(keys)):
            landed[batch] = self._load(keys[batch], names[batch], pages[batch])
        return landed

    def store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Seals and sends the pages that the store does not have.

        Returns:
            A mask, bool ``[keys]``, that is True where the store has a page of the key.
        """
        names = self._names(keys)
        present = self._present(names)
        kept: NDArray[np.bool_] = present == 1
        absent = np.flatnonzero(present == 0)
        for batch in self._batches(len(absent)):
            rows = absent[batch]
            chosen = rows.tolist()
            kept[rows] = self._put(
                [keys[row] for row in chosen], [names[row] for row in chosen], pages[rows]
            )
        return kept

    def statistics(self) -> TierStatistics:
        """Returns the pages that this process has stored, and the failures.

        Capacity and evictions are 0: this process does not know those of the store.
        """
        with self._lock:
            return TierStatistics(self._stored, 0, 0, dict(self._failures))

    def close(self) -> None:
        """Leaves the store; the pages in this process's segment are lost.

        See :meth:`~sgl_ext.tiers.mooncake.Client.close`.
        """
        self._client.close()

    def _names(self, keys: Sequence[Key]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _batches(self, pages: int) -> Iterator[slice]:
        return (slice(start, start + self._batch) for start in range(0, pages, self._batch))

    def _present(self, names: list[str]) -> Codes:
        codes = self._client.call(len(names), "batch_is_exist", names)
        self._count(codes)
        return codes

    def _load(self, keys: Sequence[Key], names: list[str], pages: Pages) -> NDArray[np.bool_]:
        good = np.zeros(len(keys), np.bool_)
        with self._room(len(keys)) as room:
            if room is None:
                return good
            codes = room.transfer("batch_get_into", names)
            whole = np.flatnonzero(codes == self._arena.stride)
            self._arena.memory[pages[whole]] = self._landing.memory[room.rows[whole]]
        self._count(codes)
        # Verified in the arena: the landing memory may change until its call has ended.
        if len(whole):
            good[whole] = self._arena.verify([keys[row] for row in whole.tolist()], pages[whole])
        wrong = np.flatnonzero((codes >= 0) & ~good).tolist()
        if wrong:
            with self._lock:
                self._failures["checksum"] += len(wrong)
            # They are of no use, and prevent valid pages of the same keys from being stored.
            self._client.call(len(wrong), "batch_remove", [names[row] for row in wrong], True)
        return good

    def _put(self, keys: list[Key], names: list[str], pages: Pages) -> NDArray[np.bool_]:
        with self._lock:
            sequence = self._sequence
            self._sequence += len(keys)
        with self._room(len(keys)) as room:
            if room is None:
                return np.zeros(len(keys), np.bool_)
            self._landing.memory[room.rows] = self._arena.memory[pages]
            self._landing.seal(keys, room.rows, sequence)
            codes = room.transfer("batch_put_from", names)
        self._count(codes)
        kept: NDArray[np.bool_] = codes == 0
        with self._lock:
            self._stored += int(kept.sum())
        return kept

    def _count(self, codes: Codes) -> None:
        with self._lock:
            self._failures.update(mooncake.reason(code) for code in codes[codes < 0].tolist())

    @contextmanager
    def _room(self, pages: int) -> Iterator[_Room | None]:
        """Yields rows of the landing memory for one transfer of ``pages`` pages.

        The rows stay reserved until the library's call has ended. Yields None, and counts a
        timeout for each page, if no rows are free within the deadline.
        """
        try:
            first = self._free.get(timeout=self._deadline)
        except queue.Empty:
            self._count(np.full(pages, TIMEOUT))
            yield None
            return
        room = _Room(self._client, self._landing, first + np.arange(pages))
        try:
            yield room
        finally:
            room.call.add_done_callback(lambda _: self._free.put(first))


class _Room:
    """Rows of the landing memory, reserved for one transfer."""

    def __init__(self, client: Client, landing: Arena, rows: Pages) -> None:
        self._client, self._landing, self.rows = client, landing, rows
        self.call: Future[list[int]] = Future()
        self.call.cancel()

    def transfer(self, method: str, names: list[str]) -> Codes:
        """Calls ``method`` of the library for ``names`` and these rows; returns their codes."""
        stride = self._landing.stride
        addresses = (self._landing.address + self.rows * stride).tolist()
        self.call = self._client.submit(method, names, addresses, [stride] * len(names))
        return self._client.result(self.call, len(names))
