"""Contexts that are open in a scheduler. Threads open and close them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from sgl_ext.clusters.files import names, own_folders
from sgl_ext.clusters.geometry import Geometry
from sgl_ext.clusters.paths import record_folder
from sgl_ext.clusters.reader import Device
from sgl_ext.clusters.recorded import RecordedKV
from sgl_ext.clusters.selection import blocks_of
from sgl_ext.clusters.stored import Stored
from sgl_ext.clusters.stored_kv import StoredKV
from sgl_ext.config import Clusters
from sgl_ext.engine.clusters.attended import Attended
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.memory import StoredMemory
from sgl_ext.engine.clusters.metrics import BLOCKS
from sgl_ext.engine.clusters.parameters import IsRecorded
from sgl_ext.engine.clusters.recorded_attention import RecordedAttention
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.build import emulated

_LOOKED_EVERY_S = 1.0
_FETCHED_BYTES = 32 << 20
"""Memory for the fetched blocks of a layer, unless ``clusters.largest`` needs more. Rows of a
forward that want different blocks share their reads as far as all of these blocks fit."""
_RECORD = ":"
"""Character between the id of a context that is recorded and the number of its tokens; ids of
stored contexts do not contain it."""


def record_id(asked: IsRecorded) -> str:
    """Returns the id, in :class:`OpenContexts`, of the tokens known before a prompt."""
    return f"{asked.id}{_RECORD}{asked.start}"


class OpenContexts:
    """Open contexts of one scheduler.

    Args:
        config: the ``clusters`` section.
        geometry: geometry of this process's model.
        longest: context length of the model, in tokens.
        engine: transfer engine that reads the contexts.
    """

    def __init__(
        self, config: Clusters, geometry: Geometry, longest: int, engine: TransferEngine
    ) -> None:
        self._config, self._geometry, self._longest = config, geometry, longest
        self._engine = engine
        slow = emulated(self._engine, config.emulate)
        self._folders = own_folders(config.directories)
        lanes = [self._engine.disk_lane(folder) for folder in self._folders]
        self._devices = [
            Device(number, folder, lane, slow(lane) if slow else lane)
            for number, (folder, lane) in enumerate(zip(self._folders, lanes, strict=True))
        ]
        # Ordered by use, the most recently used last.
        self._open: dict[str, Future[Attended]] = {}
        self._gone: set[str] = set()
        """Ids of open contexts that were deleted, as of the last check."""
        self._looking: Future[None] | None = None
        """Latest check; a device that hangs is to occupy one thread only."""
        self._look = 0.0
        """Time of the next check on the monotonic clock, in seconds."""
        self._threads = ThreadPoolExecutor(2, "sgl_ext-stored")
        self._past: Counter[str] = Counter()
        """Costs of following contexts that are closed now: blocks and seconds."""

    def __contains__(self, id_: str) -> bool:
        """Returns whether a context is open or being opened."""
        return id_ in self._open

    def __len__(self) -> int:
        """Returns the number of contexts that are open or being opened."""
        return len(self._open)

    def begin(self, id_: str, recorded: IsRecorded | None, followed: Collection[str]) -> None:
        """Starts to open a context unless it is open; marks it as used.

        If the limit of open contexts is reached, closes the least recently used one that no request
        follows. Does nothing if there is none. Records do not count.

        Args:
            recorded: parameter of the request that follows the tokens of a record; None for a
                stored context.
            followed: ids of the contexts that requests follow.
        """
        if id_ in self._open:
            self._open[id_] = self._open.pop(id_)
            return
        if recorded is not None:
            self._open[id_] = self._threads.submit(self._opened_record, recorded)
            return
        stored = [one for one in self._open if _RECORD not in one]
        if len(stored) >= self._config.open:
            unused = self._unused(followed)
            if (oldest := next((one for one in stored if one in unused), None)) is None:
                return
            self._close(oldest)
        self._open[id_] = self._threads.submit(self._opened, id_)

    def find(self, id_: str) -> Attended | None:
        """Returns a context; None if it is not open yet. One that has failed is returned, too.

        Raises:
            Exception: the context cannot be opened. The next :meth:`begin` tries again.
        """
        future = self._open.get(id_)
        if future is None or not future.done():
            return None
        if future.exception() is not None:
            del self._open[id_]
        return future.result()

    def waits(self, id_: str) -> bool:
        """Returns whether a context is neither open nor known not to open. One that has failed is
        to be opened again."""
        future = self._open.get(id_)
        return future is None or not future.done() or _has_failed(future)

    def tidy(self, followed: Collection[str], used: Collection[str]) -> None:
        """Closes contexts that are deleted or could not be opened and that no request follows, and
        those that have failed and that no request uses.

        Until then, the files of deleted contexts occupy space.

        Args:
            followed: ids of the contexts that requests follow.
            used: those of requests that have begun to run. The others wait until a context that has
                failed is opened again.
        """
        if (now := time.monotonic()) >= self._look and (
            self._looking is None or self._looking.done()
        ):
            self._look = now + _LOOKED_EVERY_S
            self._looking = self._threads.submit(self._find_gone, {*self._open})
        # Requests that wait for a context are to see why it could not be opened.
        broken = {
            id_ for id_, one in self._open.items() if one.done() and one.exception() is not None
        }
        failed = {id_ for id_, one in self._open.items() if _has_failed(one)}
        over = (self._gone | broken) & self._unused(followed)
        for id_ in over | (failed & self._unused(used)):
            self._close(id_)

    @property
    def stored(self) -> dict[str, StoredAttention]:
        """Open stored contexts, by id."""
        return {
            id_: found
            for id_, future in self._open.items()
            if isinstance(found := _result(future), StoredAttention)
        }

    @property
    def costs(self) -> Counter[str]:
        """Costs of following contexts, those that are closed included: blocks and seconds."""
        return sum(map(_costs, self.stored.values()), self._past)

    def costs_of(self, ids: Collection[str]) -> Counter[str]:
        """Returns the costs of some contexts, as far as they are open, as :attr:`costs`."""
        stored = self.stored
        return sum((_costs(stored[id_]) for id_ in ids if id_ in stored), Counter[str]())

    def _unused(self, followed: Collection[str]) -> set[str]:
        return {id_ for id_, one in self._open.items() if one.done() and id_ not in followed}

    def _close(self, id_: str) -> None:
        self._gone.discard(id_)
        if (opened := self.stored.get(id_)) is not None:
            self._past += _costs(opened)
        self._threads.submit(_close, self._open.pop(id_))

    def _find_gone(self, opened: set[str]) -> None:
        """Finds deleted contexts, and releases what devices have given back since contexts were
        closed. It runs in a thread, because it reads directories and closes files."""
        self._engine.release()
        self._gone = opened - {*names(self._folders)} if opened else set()

    def _opened_record(self, asked: IsRecorded) -> RecordedAttention:
        """Opens the first tokens of a context that is recorded. It runs in a thread."""
        base = None
        if asked.base is not None:
            base = StoredKV(Stored.open(asked.base, self._folders, self._geometry, self._longest))
        kv = RecordedKV(record_folder(self._folders[0], asked.id), asked.start, base)
        if kv.tokens != asked.start or kv.geometry != self._geometry:
            raise ExtError(
                f"the record of context {asked.id} lacks a part; store the context again"
            )
        return RecordedAttention(kv, asked.id, self._config.deadline)

    def _opened(self, id_: str) -> StoredAttention:
        """Opens a context. It runs in a thread, because it reads files."""
        stored = Stored.open(id_, self._folders, self._geometry, self._longest)
        blocks = stored.about.blocks
        most = blocks_of(self._config.largest, blocks.blocks, blocks.devices)
        memory = StoredMemory(
            self._engine, self._devices, stored, hot=self._config.hot,
            most=max(most, min(_FETCHED_BYTES // blocks.block_bytes, blocks.blocks)),
            deadline=self._config.deadline,
        )  # fmt: skip
        return StoredAttention(stored, memory)


def _costs(opened: StoredAttention) -> Counter[str]:
    """Returns blocks and seconds under the names of
    :class:`~sgl_ext.engine.clusters.metrics.StoredMetrics`."""
    found = opened.memory.describe()
    return Counter({name: found[name] for name in BLOCKS}) + Counter(opened.seconds)


def _result(opened: Future[Attended]) -> Attended | None:
    """Returns a context that is open; None if it is not, or cannot be opened."""
    return opened.result() if opened.done() and opened.exception() is None else None


def _has_failed(opened: Future[Attended]) -> bool:
    """Returns whether a context is open and has failed."""
    found = _result(opened)
    return found is not None and bool(found.failed)


def _close(opened: Future[Attended]) -> None:
    if opened.exception() is None:
        opened.result().close()
