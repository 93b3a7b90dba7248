"""The stored contexts that a scheduler's requests follow."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from sgl_ext.clusters.reader import Device
from sgl_ext.clusters.recorded import Geometry
from sgl_ext.clusters.selection import blocks_of
from sgl_ext.clusters.stored import Stored, about
from sgl_ext.config import Clusters
from sgl_ext.engine.stored_attention import StoredAttention
from sgl_ext.engine.stored_parameters import FollowsStored
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.build import emulated

logger = logging.getLogger(__name__)


class Follower(NamedTuple):
    """A request that follows a context.

    Attributes:
        share: of the context's blocks, what each of its queries is given.
        tokens: of the context.
        req: SGLang's.
    """

    id: str
    share: float
    tokens: int
    req: Any


class StoredContexts:
    """Opens contexts beside the scheduler, and knows which request follows which.

    Args:
        geometry: of this process's model.
        longest: tokens that the model takes.
    """

    def __init__(self, config: Clusters, geometry: Geometry, longest: int) -> None:
        self._config, self._geometry, self.longest = config, geometry, longest
        self.refused: dict[str, str] = {}
        """Requests that wait for a context that cannot be opened, and why; to be aborted."""
        self.given_up: set[str] = set()
        """Requests whose latest forward has given nothing."""
        self._engine = TransferEngine()
        slow = emulated(self._engine, config.emulate)
        lanes = [self._engine.file_lane(directory) for directory in config.directories]
        self._devices = [
            Device(directory, lane, slow(lane) if slow else lane)
            for directory, lane in zip(config.directories, lanes, strict=True)
        ]
        # The latest used last.
        self._open: dict[str, Future[StoredAttention]] = {}
        self._followers: dict[str, Follower] = {}
        self._threads = ThreadPoolExecutor(1, "sgl_ext-stored")

    def ask(self, req: Any, asked: FollowsStored) -> Follower:
        """SGLang's ``req`` follows a context from now on, which begins to be opened.

        Raises:
            ExtError: there is no such context, or the request asks for more than may be.
        """
        tokens = about(asked.id, self._config.directories).tokens
        share = self._config.sparsity if asked.sparsity is None else asked.sparsity
        if share > self._config.largest:
            raise ExtError(
                f"sparsity {share:g} is more than this server's clusters.largest, "
                f"{self._config.largest:g}"
            )
        if tokens + len(req.origin_input_ids) >= self.longest:
            raise ExtError(
                f"context {asked.id} has {tokens} tokens and the prompt {len(req.origin_input_ids)}"
                f"; the model takes less than {self.longest} in all"
            )
        follower = self._followers[req.rid] = Follower(asked.id, share, tokens, req)
        self._begin(asked.id)
        return follower

    def follower(self, rid: str) -> Follower | None:
        """What a request follows, if it follows anything."""
        return self._followers.get(rid)

    @property
    def any(self) -> bool:
        """Whether any request follows a context."""
        return bool(self._followers)

    def ready(self, rid: str) -> bool:
        """Whether a request that follows a context can run.

        Raises:
            ExtError: its context cannot be opened.
        """
        if (follower := self._followers.get(rid)) is None:
            return True
        self._begin(follower.id)
        future = self._open.get(follower.id)
        if future is None or not future.done():
            return False
        try:
            future.result()
        except Exception as error:
            del self._open[follower.id]
            if isinstance(error, ExtError):
                raise
            logger.exception("context %s cannot be opened", follower.id)
            raise ExtError(f"context {follower.id} cannot be opened: {error}") from error
        return True

    def context(self, follower: Follower) -> StoredAttention:
        """What a request that runs follows."""
        return self._open[follower.id].result()

    def keep(self, rids: Collection[str]) -> None:
        """All other requests have ended."""
        self._followers = {rid: one for rid, one in self._followers.items() if rid in rids}
        self.given_up &= self._followers.keys()

    def describe(self) -> dict[str, Any]:
        """What is open, for ``/server_info``."""
        opened = {
            id_: future.result()
            for id_, future in self._open.items()
            if future.done() and future.exception() is None
        }
        return {
            "followed": len(self._followers),
            "open": {
                id_: {"fetched": one.fetched, "requests": one.requests, "in_memory": one.hits}
                for id_, one in opened.items()
            },
        }

    def _begin(self, id_: str) -> None:
        """Opens a context, if it is not open and there is room."""
        if id_ in self._open:
            self._open[id_] = self._open.pop(id_)
            return
        if len(self._open) >= self._config.open:
            followed = {follower.id for follower in self._followers.values()}
            unused = next((one for one in self._open if one not in followed), None)
            if unused is None or not self._open[unused].done():
                return
            self._threads.submit(_close, self._open.pop(unused))
        self._open[id_] = self._threads.submit(self._opened, id_)

    def _opened(self, id_: str) -> StoredAttention:
        stored = Stored.open(id_, self._config.directories, self._geometry)
        blocks = stored.about.blocks
        return StoredAttention(
            self._engine, self._devices, stored, hot=self._config.hot,
            most=blocks_of(self._config.largest, blocks.blocks, blocks.devices),
            deadline=self._config.deadline,
        )  # fmt: skip


def _close(opened: Future[StoredAttention]) -> None:
    if opened.exception() is None:
        opened.result().close()
