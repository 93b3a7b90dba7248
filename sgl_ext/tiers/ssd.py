"""Tier on local SSDs: slots are written as they lie in the arena and verified when read.

A page is published by its own write, and the disk holds no other metadata about it. A crash can
therefore not leave an inconsistent state: a slot verifies, or it is a miss.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import FileLane, Lane, TransferEngine
from sgl_ext.tiers.arena import Arena, Key, Pages
from sgl_ext.tiers.batches import CLOSED, Batch, Batches, Reason, label
from sgl_ext.tiers.progress import Progress
from sgl_ext.tiers.scan import restore
from sgl_ext.tiers.slots import spread
from sgl_ext.tiers.tier import TierStatistics
from sgl_ext.tiers.volume import FULL, Volume, VolumeStatistics

CHECKSUM, EVICTED, NO_ROOM, REMOVED = "checksum", "evicted", "no_room", "removed"
"""Reasons for failed pages, in addition to those of a batch: the page does not verify; its slot was
reused while it was read; one call stored more pages than there are slots; the directory was
removed."""

_ENDED = frozenset({errno.ENODATA})  # the file was truncated: pages are lost, the device works
_PHASE = (5**0.5 - 1) / 2  # any number of its multiples are evenly spread modulo 1


class SsdTier:
    """:class:`~sgl_ext.tiers.tier.Tier` over one or more directories, each on a separate SSD.

    The pages of one call are spread over all devices. Each device evicts its least recently used
    pages. Of the pages of one call the last are evicted first, because a prefix is of use without
    the pages that follow it.

    The index is in memory and takes about 200 B per page. It is rebuilt from the files when the
    tier is opened, which reads 4 KiB of each slot.

    Args:
        arena: Memory of the pages, registered with ``engine`` by the caller.
        directories: One for each device; files in them are private to the user.
        capacity: Bytes for each directory.
        fsync: Whether a page counts as stored only once it would survive a power failure. Without
            it, a page that had not reached the device before a power failure is a miss afterwards.
        backend: See :meth:`TransferEngine.file_lane`.
        wrap: Wraps the lane of each directory, to emulate another device.
        deadline: Seconds without progress after which a device counts as stalled.

    Raises:
        ExtError: A directory is missing, not writable, in use by another server, named twice or
            smaller than ``capacity``; the capacity is less than one page; or a device does not
            answer.
    """

    name = "ssd"
    immediate = True

    def __init__(
        self,
        arena: Arena,
        engine: TransferEngine,
        directories: Sequence[Path],
        capacity: int,
        *,
        fsync: bool = False,
        backend: str = "auto",
        wrap: Callable[[FileLane], Lane] | None = None,
        deadline: float = 10.0,
    ) -> None:
        if not directories:
            raise ExtError("an SSD tier needs a directory; give at least one")
        present = [path.stat() for path in directories if path.exists()]
        if len({(each.st_dev, each.st_ino) for each in present}) < len(present):
            raise ExtError(
                f"{', '.join(map(str, directories))}: the same directory is given twice; give "
                "each once"
            )
        self._arena = arena
        self._deadline = deadline
        self._lock = threading.Lock()  # guards the index and all counts; not held during I/O
        self._io = Batches(engine, self._lock, fsync=fsync, deadline=deadline)
        self._idle = threading.Condition(self._lock)
        self._users = 0
        self._closed = False
        self._calls = 0
        self._failures: Counter[str] = Counter()
        self._volumes: list[Volume] = []
        progress: dict[object, Progress] = {}
        with ExitStack() as undo:
            for directory in directories:
                volume = Volume(
                    arena,
                    engine,
                    directory,
                    capacity,
                    backend=backend,
                    wrap=wrap,
                    deadline=deadline,
                )
                undo.callback(volume.close)
                volume.progress = progress.setdefault(volume.lane._native, volume.progress)
                self._volumes.append(volume)
            self._sequence = restore(self._volumes, arena, engine, deadline)
            undo.pop_all()

    @property
    def available(self) -> bool:
        """True if at least one device is neither dead nor stalled, and the tier is open."""
        with self._lock:
            return not self._closed and bool(self._usable())

    @property
    def volumes(self) -> tuple[VolumeStatistics, ...]:
        """State of each directory; does not wait for I/O."""
        with self._lock:
            return tuple(volume.statistics() for volume in self._volumes)

    def lookup(self, keys: Sequence[Key]) -> int:
        """Returns the number of leading ``keys`` that usable devices hold.

        Does not count as a use.
        """
        with self._lock:
            indexes = [volume.slots.index for volume in self._usable()]
        # Without the lock: load detects what has changed meanwhile.
        for count, key in enumerate(keys):
            for index in indexes:
                if key in index:
                    break
            else:
                return count
        return len(keys)

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Reads pages into arena slots, and removes pages that do not verify from the index.

        Returns:
            A mask, bool ``[keys]``, that is True where a page has landed and verifies.
        """
        return self._read(keys, pages, None)

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """Layers ``(first, end)`` of each part of a page; none if pages are read whole."""
        return self._arena.parts

    def load_part(self, keys: Sequence[Key], pages: Pages, part: int) -> NDArray[np.bool_]:
        """Reads one part of each page, like :meth:`load`.

        The last part comes first, because it includes the checksums of the others.
        """
        return self._read(keys, pages, part)

    def _read(self, keys: Sequence[Key], pages: Pages, part: int | None) -> NDArray[np.bool_]:
        good = np.zeros(len(keys), bool)
        with self._use():
            with self._lock:
                batches = self._find(keys)
            parts = self._io.run(batches, pages, write=False, part=part)
            if batches:
                rows = np.concatenate([batch.rows for batch in batches])
                asked = [keys[row] for row in rows.tolist()]
                good[rows] = self._arena.verify(asked, pages[rows], part)
            with self._lock:
                self._judge(parts, _ENDED)
                for batch, reason in parts:
                    self._loaded(batch, reason, keys, good)
        return good

    def store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Seals and writes the pages that the tier does not have; marks the others as used.

        If a key is stored twice, the slot with the higher sequence number counts after a restart.

        Returns:
            A mask, bool ``[keys]``, that is True where the tier holds the page.
        """
        stored = np.zeros(len(keys), bool)
        with self._use():
            with self._lock:
                for batch in self._find(keys):
                    stored[batch.rows] = True
                missing = np.flatnonzero(~stored)
                batches = self._place(missing)
                sequence = self._sequence
                self._sequence += len(missing)
            if batches:
                # The first page gets the highest number, to be evicted last after a restart, too.
                rows = missing[::-1]
                self._arena.seal([keys[row] for row in rows.tolist()], pages[rows], sequence)
            parts = self._io.run(batches, pages, write=True)
            with self._lock:
                self._judge(parts, FULL)
                for batch, reason in parts:
                    if self._stored(batch, reason, keys):
                        stored[batch.rows] = True
        return stored

    def statistics(self) -> TierStatistics:
        """Returns the totals of all directories; does not wait for I/O."""
        with self._lock:
            slots = [volume.slots for volume in self._volumes]
            return TierStatistics(
                pages=sum(len(one.index) for one in slots),
                capacity=sum(one.limit for one in slots),
                evicted=sum(one.evictions for one in slots),
                failures=dict(+self._failures),
                directories={str(one.directory): one.state for one in self._volumes},
            )

    def close(self) -> None:
        """Cancels I/O that has not started, waits for the calls in flight and closes all files.

        Waits for the deadline at most.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._io.closed = True
            for volume in self._volumes:
                volume.cancel()
            self._idle.wait_for(lambda: not self._users, timeout=self._deadline)
        for volume in self._volumes:
            volume.close()

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Keeps the files open, and gives up volumes whose file was removed."""
        with self._lock:
            self._users += 1
        try:
            self._look()
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._idle.notify_all()

    def _look(self) -> None:
        """Gives up volumes whose file was removed: a restart would not find what they write."""
        for volume in self._volumes:
            if not (volume.dead or self._closed) and volume.removed():
                with self._lock:
                    if not volume.dead:
                        self._failures[REMOVED] += volume.give_up(
                            "its folder was removed while the server ran, and the pages in it are "
                            "lost; create the directory again"
                        )

    # Operations on the index; the caller holds the lock

    def _usable(self) -> list[Volume]:
        return [volume for volume in self._volumes if volume.usable()]

    def _find(self, keys: Sequence[Key]) -> list[Batch]:
        """Returns where ``keys`` lie, as a batch for each volume.

        Marks them as most recently used, the first key last.
        """
        if self._closed:
            return []
        batches = []
        rest = list(range(len(keys)))
        for volume in self._usable():
            index = volume.slots.index
            rows = [row for row in rest if keys[row] in index]
            for row in reversed(rows):
                index.move_to_end(keys[row])
            if rows:
                slots = np.array([index[keys[row]] for row in rows], np.int64)
                batches.append(Batch(volume, np.array(rows, np.int64), slots))
                # A volume that was stalled may hold pages that another one has stored meanwhile.
                rest = [row for row in rest if keys[row] not in index]
        return batches

    def _place(self, rows: NDArray[np.int64]) -> list[Batch]:
        """Takes slots for ``rows`` from all volumes, as :func:`spread` assigns them."""
        if self._closed:
            self._failures[CLOSED] += len(rows)
            return []
        volumes = self._usable()
        self._calls += 1
        now = time.monotonic()
        owners = spread(
            len(rows),
            [volume.slots.room(now) for volume in volumes],
            [volume.slots.reused for volume in volumes],
            phase=self._calls * _PHASE % 1,
        )
        self._failures[NO_ROOM] += len(rows) - len(owners)
        batches = []
        for number, volume in enumerate(volumes):
            own = rows[: len(owners)][owners == number]
            if len(own):
                slots = volume.slots.take(len(own), now)
                batches.append(Batch(volume, own, np.array(slots, np.int64)))
        return batches

    def _loaded(
        self,
        batch: Batch,
        reason: Reason,
        keys: Sequence[Key],
        good: NDArray[np.bool_],
    ) -> None:
        lost = ~good[batch.rows]
        for row, slot in zip(batch.rows[lost].tolist(), batch.slots[lost].tolist(), strict=True):
            if isinstance(reason, str):
                self._failures[reason] += 1
            elif batch.volume.dead or batch.volume.slots.drop(keys[row], slot):
                self._failures[label(reason) if reason else CHECKSUM] += 1
            else:
                self._failures[EVICTED] += 1

    def _stored(self, batch: Batch, reason: Reason, keys: Sequence[Key]) -> bool:
        slots = batch.volume.slots
        if reason is not None or batch.volume.dead:
            self._failures[label(reason)] += len(batch.rows)
            taken = batch.slots.tolist()
            if isinstance(reason, OSError) and reason.errno in FULL:
                batch.volume.ran_full(taken)
            elif isinstance(reason, OSError) and len(taken) == 1:  # it was divided up to the slot
                slots.release_doubtful(taken)
            else:
                slots.release(taken)
            return False
        indexes = [volume.slots.index for volume in self._usable()]
        for row, slot in zip(batch.rows[::-1].tolist(), batch.slots[::-1].tolist(), strict=True):
            key = keys[row]
            # Another thread may have stored the key meanwhile, or it occurs twice in this call.
            if any(key in index for index in indexes):
                slots.release([slot])
            else:
                slots.publish(key, slot)
        return True

    def _judge(self, parts: Sequence[tuple[Batch, Reason]], harmless: frozenset[int]) -> None:
        """Records one success and one failure at most for each volume: a device on which a part of
        a batch succeeds works."""
        for volume in dict.fromkeys(batch.volume for batch, _ in parts):
            reasons = [reason for batch, reason in parts if batch.volume is volume]
            errors = [e for e in reasons if isinstance(e, OSError) and e.errno not in harmless]
            if None in reasons:
                volume.succeeded()
            if errors:
                volume.failed(errors[0])
