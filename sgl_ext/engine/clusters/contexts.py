"""The stored contexts that a scheduler's requests follow."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sgl_ext.clusters.files import names, own_folders
from sgl_ext.clusters.reader import Device
from sgl_ext.clusters.recorded import Geometry
from sgl_ext.clusters.selection import blocks_of
from sgl_ext.clusters.stored import Stored
from sgl_ext.config import Clusters
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.memory import StoredMemory
from sgl_ext.engine.clusters.metrics import BLOCKS, StoredMetrics
from sgl_ext.engine.clusters.parameters import FollowsStored
from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.errors import ExtError, reason_of
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.build import emulated

if TYPE_CHECKING:
    from sgl_ext.engine.clusters.forward import StoredForward

logger = logging.getLogger(__name__)

_LOOKED_EVERY_S = 1.0


class UnavailableError(ExtError):
    """A context could not be opened in time."""

    status = 503


@dataclass
class Follower:
    """A request that follows a context.

    Attributes:
        share: of the context's blocks, what each of its queries is given.
        req: SGLang's.
        since: when it came, by the monotonic clock.
        tokens: of the context; 0 until that is open.
    """

    id: str
    share: float
    req: Req
    since: float
    tokens: int = 0


class StoredContexts:
    """Opens contexts beside the scheduler, and knows which request follows which.

    Args:
        geometry: of this process's model.
        longest: tokens that the model takes.
    """

    def __init__(self, config: Clusters, geometry: Geometry, longest: int) -> None:
        self._config, self._geometry, self._longest = config, geometry, longest
        self.refused: dict[str, ExtError] = {}
        """Requests that wait for a context that cannot be opened, and why; to be ended."""
        self.given_up: set[str] = set()
        """Requests whose latest forward has given nothing."""
        self.running: StoredForward | None = None
        """The forward that runs, if any of its rows follows a context."""
        self.stale = ""
        """Why no context is followed any more."""
        self._engine = TransferEngine()
        slow = emulated(self._engine, config.emulate)
        self._folders = own_folders(config.directories)
        lanes = [self._engine.file_lane(folder) for folder in self._folders]
        self._devices = [
            Device(number, folder, lane, slow(lane) if slow else lane)
            for number, (folder, lane) in enumerate(zip(self._folders, lanes, strict=True))
        ]
        # The latest used last.
        self._open: dict[str, Future[StoredAttention]] = {}
        self._gone: set[str] = set()
        """Open ones that have been deleted, when it was last looked."""
        self._look = 0.0
        """When it is looked again."""
        self._followers: dict[str, Follower] = {}
        self._threads = ThreadPoolExecutor(2, "sgl_ext-stored")
        self._past: Counter[str] = Counter()
        """What following contexts has cost that are closed."""
        self._metrics: StoredMetrics | None = None

    def ask(self, req: Req, asked: FollowsStored) -> Follower:
        """SGLang's ``req`` follows a context from now on, which begins to be opened.

        One that comes again, after a retraction, goes on as it was.

        Raises:
            ExtError: the request asks for more than may be.
        """
        if (known := self._followers.get(req.rid)) is not None:
            return known
        if self.stale:
            raise ExtError(self.stale)
        share = self._config.sparsity if asked.sparsity is None else asked.sparsity
        if share > self._config.largest:
            raise ExtError(
                f"sparsity {share:g} is more than this server's clusters.largest, "
                f"{self._config.largest:g}"
            )
        follower = Follower(asked.id, share, req, time.monotonic())
        self._followers[req.rid] = follower
        self._begin(asked.id)
        return follower

    def follower(self, rid: str) -> Follower | None:
        """What a request follows, if it follows anything."""
        return self._followers.get(rid)

    @property
    def any(self) -> bool:
        """Whether any request follows a context."""
        return bool(self._followers)

    def opened(self, rid: str) -> bool:
        """Whether a request can run that follows a context, if it follows one.

        Raises:
            ExtError: its context cannot be opened, or has no room for its prompt.
        """
        if (follower := self._followers.get(rid)) is None or follower.tokens:
            return True
        self._begin(follower.id)
        future = self._open.get(follower.id)
        if future is None or not future.done():
            if time.monotonic() - follower.since > self._config.wait:
                raise UnavailableError(
                    f"context {follower.id} was not open in {self._config.wait:g} s; "
                    f"{len(self._open)} are open or being opened (clusters.open): try again later"
                )
            return False
        if (error := future.exception()) is not None:
            del self._open[follower.id]
            raise (
                error
                if isinstance(error, ExtError)
                else ExtError(f"context {follower.id} cannot be opened: {reason_of(error)}")
            )
        tokens, prompt = future.result().tokens, len(follower.req.origin_input_ids)
        if tokens + prompt >= self._longest:
            raise ExtError(
                f"context {follower.id} has {tokens} tokens and the prompt {prompt}; the model "
                f"takes less than {self._longest} in all"
            )
        follower.tokens = tokens
        params = follower.req.sampling_params
        room = self._longest - tokens - prompt - 1
        params.max_new_tokens = min(params.max_new_tokens, room)
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
        return True

    def context(self, follower: Follower) -> StoredAttention:
        """What a request that runs follows."""
        return self._open[follower.id].result()

    def refuse(self, rid: str, error: ExtError) -> None:
        """A request that waits does not follow its context."""
        self.refused[rid] = error
        self._followers.pop(rid, None)

    def give_up(self, why: str) -> None:
        """From now on nothing is followed."""
        self.stale = why
        for follower in self._followers.values():
            end_request(follower.req, why)

    def keep(self, rids: Collection[str]) -> None:
        """All other requests have ended."""
        self._followers = {rid: one for rid, one in self._followers.items() if rid in rids}
        self.given_up &= self._followers.keys()

    def tidy(self) -> None:
        """Closes contexts that were deleted or have failed, and that nobody follows: their files
        take room until then."""
        if self._open and (now := time.monotonic()) >= self._look:
            self._look = now + _LOOKED_EVERY_S
            self._threads.submit(self._find_gone, {*self._open})
        failed = {id_ for id_, one in self._usable.items() if one.failed}
        if gone := self._gone | failed:
            for id_ in gone & self._unused():
                self._close(id_)

    def describe(self) -> dict[str, Any]:
        """What is open, for ``/server_info``."""
        return {
            "followed": len(self._followers),
            "open": {id_: one.describe() for id_, one in self._usable.items()},
        }

    def measure(self) -> None:
        """Brings ``/metrics`` up to date."""
        if self._metrics is None:
            self._metrics = StoredMetrics()
        if self._metrics.due:
            opened = self._usable
            totals = sum(map(_costs, opened.values()), self._past)
            self._metrics.update(totals, len(opened), len(self._followers))

    @property
    def _usable(self) -> dict[str, StoredAttention]:
        """Those that are open."""
        return {
            id_: future.result()
            for id_, future in self._open.items()
            if future.done() and future.exception() is None
        }

    def _unused(self) -> set[str]:
        followed = {follower.id for follower in self._followers.values()}
        return {id_ for id_, one in self._open.items() if one.done() and id_ not in followed}

    def _begin(self, id_: str) -> None:
        """Opens a context, if it is not open and there is room."""
        if id_ in self._open:
            self._open[id_] = self._open.pop(id_)
            return
        if len(self._open) >= self._config.open:
            unused = self._unused()
            if (oldest := next((one for one in self._open if one in unused), None)) is None:
                return
            self._close(oldest)
        self._open[id_] = self._threads.submit(self._opened, id_)

    def _close(self, id_: str) -> None:
        self._gone.discard(id_)
        if (opened := self._usable.get(id_)) is not None:
            self._past += _costs(opened)
        self._threads.submit(_close, self._open.pop(id_))

    def _find_gone(self, opened: set[str]) -> None:
        """In a thread, as all that reads files."""
        self._gone = opened - {*names(self._folders)}

    def _opened(self, id_: str) -> StoredAttention:
        """In a thread, too."""
        stored = Stored.open(id_, self._folders, self._geometry, self._longest)
        blocks = stored.about.blocks
        memory = StoredMemory(
            self._engine, self._devices, stored, hot=self._config.hot,
            most=blocks_of(self._config.largest, blocks.blocks, blocks.devices),
            deadline=self._config.deadline,
        )  # fmt: skip
        return StoredAttention(stored, memory)


def end_request(req: Req, message: str) -> None:
    """A request that runs ends with an error, and leaves no KV behind."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.skip_radix_cache_insert = True
    req.to_finish = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable")


def _costs(opened: StoredAttention) -> Counter[str]:
    """Blocks and seconds, as :class:`~sgl_ext.engine.clusters.metrics.StoredMetrics` names them."""
    found = opened.describe()
    return Counter({name: found[name] for name in BLOCKS}) + Counter(found["seconds"])


def _close(opened: Future[StoredAttention]) -> None:
    if opened.exception() is None:
        try:
            opened.result().memory.close()
        except ExtError as error:  # a device does not answer
            logger.error("a context was not closed, and its memory is not used again: %s", error)
