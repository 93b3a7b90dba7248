"""Open stored contexts of a scheduler, and the requests that follow them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from sgl_ext.clusters.files import names, own_folders, record_folder
from sgl_ext.clusters.reader import Device
from sgl_ext.clusters.recorded import Geometry
from sgl_ext.clusters.selection import blocks_of
from sgl_ext.clusters.stored import Stored
from sgl_ext.config import Clusters
from sgl_ext.engine.clusters.attended import Attended
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.follower import Follower, end_request
from sgl_ext.engine.clusters.memory import StoredMemory
from sgl_ext.engine.clusters.metrics import BLOCKS, StoredMetrics
from sgl_ext.engine.clusters.parameters import FollowsStored, IsRecorded
from sgl_ext.engine.clusters.recorded_attention import RecordedAttention
from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.errors import ExtError, reason_of
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.build import emulated

if TYPE_CHECKING:
    from sgl_ext.engine.clusters.device import DeviceForward
    from sgl_ext.engine.clusters.forward import StoredForward

logger = logging.getLogger(__name__)

_LOOKED_EVERY_S = 1.0
_RECORD = ":"
"""Character between the id of a context that is recorded and the number of its tokens; ids of
stored contexts do not contain it."""


class UnavailableError(ExtError):
    """Error for a context that was not opened in time."""

    status = 503


class StoredContexts:
    """Registry of open contexts and their followers. Its threads open contexts.

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
        self.refused: dict[str, ExtError] = {}
        """Errors of waiting requests that cannot follow their context, by request id. The scheduler
        is to abort these requests."""
        self.given_up: set[str] = set()
        """Ids of requests whose latest forward gave no valid output."""
        self.running: StoredForward | DeviceForward | None = None
        """Current forward if any of its rows follows a context, or else None."""
        self.stale = ""
        """Reason why no context can be followed any more; empty if contexts can be followed."""
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
        self._look = 0.0
        """Time of the next check on the monotonic clock, in seconds."""
        self._followers: dict[str, Follower] = {}
        self._threads = ThreadPoolExecutor(2, "sgl_ext-stored")
        self._past: Counter[str] = Counter()
        """Costs of following contexts that are closed now: blocks and seconds."""
        self._metrics: StoredMetrics | None = None

    def ask(self, req: Req, asked: FollowsStored) -> Follower:
        """Adds SGLang's ``req`` as a follower, and starts to open its context.

        Returns:
            The follower. A request that is queued again after a retraction keeps its own.

        Raises:
            ExtError: contexts cannot be followed any more, or the requested share is too large.
        """
        if (known := self._followers.get(req.rid)) is not None:
            return known
        if self.stale:
            raise ExtError(self.stale)
        share = self._config.sparsity if asked.sparsity is None else asked.sparsity
        if share > self._config.largest:
            raise ExtError(
                f"sparsity {share:g} exceeds this server's clusters.largest, "
                f"{self._config.largest:g}; lower sparsity"
            )
        follower = Follower(asked.id, share, req, time.monotonic())
        self._followers[req.rid] = follower
        self._begin(follower)
        return follower

    def ask_recorded(self, req: Req, asked: IsRecorded) -> None:
        """Adds SGLang's ``req`` as a follower of the tokens that are recorded before its prompt.

        Raises:
            ExtError: contexts cannot be followed any more.
        """
        if self.stale:
            raise ExtError(self.stale)
        if req.rid not in self._followers:
            id_ = f"{asked.id}{_RECORD}{asked.start}"
            follower = Follower(id_, 1.0, req, time.monotonic(), recorded=asked)
            self._followers[req.rid] = follower
            self._begin(follower)

    def follower(self, rid: str) -> Follower | None:
        """Returns the follower with a request id; None if the request follows no context."""
        return self._followers.get(rid)

    def followers(self, rids: Sequence[str], rows: int) -> list[Follower | None]:
        """Returns the follower of each row of a forward, None for rows that follow no context.

        Args:
            rids: ids of the requests of the first rows; the others are rows of beams, which follow
                no context.
            rows: number of rows.

        Returns:
            An empty list if no row follows a context.
        """
        if not self._followers:
            return []
        found = [self._followers.get(rid) for rid in rids]
        return [*found, *[None] * (rows - len(found))] if any(found) else []

    @property
    def any(self) -> bool:
        """True if any request follows a context."""
        return bool(self._followers)

    def opened(self, rid: str) -> bool:
        """Returns whether a request may run: its context is open, or it follows none.

        When the context is open for the first time, the limits of new tokens are reduced to the
        rest of the model's context length.

        Raises:
            UnavailableError: the context was not opened in time.
            ExtError: the context cannot be opened, or is too long for the model with the prompt.
        """
        if (follower := self._followers.get(rid)) is None or follower.tokens:
            return True
        self._begin(follower)
        future = self._open.get(follower.id)
        if future is None or not future.done():
            if time.monotonic() - follower.since > self._config.wait:
                raise UnavailableError(
                    f"context {follower.id} was not opened within {self._config.wait:g} s; "
                    f"{len(self._open)} contexts are open or being opened (clusters.open): try "
                    "again later"
                )
            return False
        if (error := future.exception()) is not None:
            del self._open[follower.id]
            raise (
                error
                if isinstance(error, ExtError)
                else ExtError(
                    f"context {follower.id} cannot be opened: {reason_of(error)}; try again later"
                )
            )
        tokens, prompt = future.result().tokens, len(follower.req.origin_input_ids)
        if tokens + prompt >= self._longest:
            raise ExtError(
                f"context {follower.id} has {tokens} tokens and the prompt {prompt}, but the model "
                f"accepts fewer than {self._longest} in total; shorten the prompt"
            )
        follower.tokens = tokens
        params = follower.req.sampling_params
        room = self._longest - tokens - prompt - 1
        params.max_new_tokens = min(params.max_new_tokens, room)
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
        return True

    def waits(self, rid: str) -> bool:
        """Returns whether a request follows a context that is neither open nor known to fail."""
        follower = self._followers.get(rid)
        if follower is None or follower.tokens:
            return False
        future = self._open.get(follower.id)
        return future is None or not future.done()

    def context(self, follower: Follower) -> Attended:
        """Returns the open context of a request that runs."""
        return self._open[follower.id].result()

    def refuse(self, rid: str, error: ExtError) -> None:
        """Removes a waiting request from the followers, and records why it is to be aborted."""
        self.refused[rid] = error
        self._followers.pop(rid, None)

    def give_up(self, why: str) -> None:
        """Ends the requests of all followers; from now on no context can be followed."""
        self.stale = why
        for follower in self._followers.values():
            end_request(follower.req, why)

    def keep(self, rids: Collection[str]) -> None:
        """Removes all followers but those of ``rids``, because their requests have ended."""
        self._followers = {rid: one for rid, one in self._followers.items() if rid in rids}
        self.given_up &= self._followers.keys()

    def tidy(self) -> None:
        """Closes deleted or failed contexts that no request follows.

        Until then, the files of deleted contexts occupy space.
        """
        if self._open and (now := time.monotonic()) >= self._look:
            self._look = now + _LOOKED_EVERY_S
            self._threads.submit(self._find_gone, {*self._open})
        failed = {
            id_ for id_, one in self._open.items() if (found := _result(one)) and found.failed
        }
        if gone := self._gone | failed:
            for id_ in gone & self._unused():
                self._close(id_)

    def describe(self) -> dict[str, object]:
        """Returns the open contexts and the number of followers, for ``/server_info``."""
        return {
            "followed": len(self._followers),
            "open": {id_: one.describe() for id_, one in self._usable.items()},
        }

    def measure(self) -> None:
        """Updates the metrics if an update is due."""
        if self._metrics is None:
            self._metrics = StoredMetrics()
        if self._metrics.due:
            opened = self._usable
            totals = sum(map(_costs, opened.values()), self._past)
            self._metrics.update(totals, len(opened), len(self._followers))

    @property
    def _usable(self) -> dict[str, StoredAttention]:
        """Open stored contexts, by id."""
        return {
            id_: found
            for id_, future in self._open.items()
            if isinstance(found := _result(future), StoredAttention)
        }

    def _unused(self) -> set[str]:
        followed = {follower.id for follower in self._followers.values()}
        return {id_ for id_, one in self._open.items() if one.done() and id_ not in followed}

    def _begin(self, follower: Follower) -> None:
        """Starts to open a request's context unless it is open; marks it as used.

        If the limit of open contexts is reached, closes the least recently used one that no request
        follows. Does nothing if there is none. Records do not count.
        """
        id_ = follower.id
        if follower.recorded is not None:
            if id_ not in self._open:
                self._open[id_] = self._threads.submit(self._opened_record, follower.recorded)
            return
        if id_ in self._open:
            self._open[id_] = self._open.pop(id_)
            return
        stored = [one for one in self._open if _RECORD not in one]
        if len(stored) >= self._config.open:
            unused = self._unused()
            if (oldest := next((one for one in stored if one in unused), None)) is None:
                return
            self._close(oldest)
        self._open[id_] = self._threads.submit(self._opened, id_)

    def _close(self, id_: str) -> None:
        self._gone.discard(id_)
        if (opened := self._usable.get(id_)) is not None:
            self._past += _costs(opened)
        self._threads.submit(_close, self._open.pop(id_))

    def _find_gone(self, opened: set[str]) -> None:
        """Finds deleted contexts. It runs in a thread, because it reads a directory."""
        self._gone = opened - {*names(self._folders)}

    def _opened_record(self, asked: IsRecorded) -> RecordedAttention:
        """Opens the first tokens of a context that is recorded. It runs in a thread."""
        folder = record_folder(self._folders[0], asked.id)
        return RecordedAttention(folder, asked.start, self._geometry, self._config.deadline)

    def _opened(self, id_: str) -> StoredAttention:
        """Opens a context. It runs in a thread, because it reads files."""
        stored = Stored.open(id_, self._folders, self._geometry, self._longest)
        blocks = stored.about.blocks
        memory = StoredMemory(
            self._engine, self._devices, stored, hot=self._config.hot,
            most=blocks_of(self._config.largest, blocks.blocks, blocks.devices),
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


def _close(opened: Future[Attended]) -> None:
    if opened.exception() is None:
        try:
            opened.result().close()
        except ExtError as error:  # a device does not respond
            logger.error("a stored context was not closed, so its memory is not freed: %s", error)
