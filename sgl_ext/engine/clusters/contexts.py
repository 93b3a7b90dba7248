"""Requests of a scheduler that follow contexts, and the contexts that are open for them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sgl_ext.clusters.geometry import Geometry
from sgl_ext.config import Clusters
from sgl_ext.engine.clusters.attended import Attended
from sgl_ext.engine.clusters.follower import Follower, end_request
from sgl_ext.engine.clusters.joined import JoinedContexts
from sgl_ext.engine.clusters.metrics import StoredMetrics
from sgl_ext.engine.clusters.open_contexts import OpenContexts, record_id
from sgl_ext.engine.clusters.parameters import FollowsStored, IsRecorded
from sgl_ext.engine.core.metrics import Metrics
from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.errors import ExtError, reason_of
from sgl_ext.memory.rope import Rope
from sgl_ext.memory.transfer import TransferEngine

if TYPE_CHECKING:
    from sgl_ext.engine.clusters.device import DeviceForward
    from sgl_ext.engine.clusters.forward import StoredForward


class UnavailableError(ExtError):
    """Error for a context that was not opened in time."""

    status = 503


class StoredContexts:
    """Registry of the followers of contexts.

    Args:
        config: the ``clusters`` section.
        geometry: geometry of this process's model.
        longest: context length of the model, in tokens.
        engine: transfer engine that reads the contexts.
        rope: rotary embedding of the model, by which several contexts are followed together; an
            error if they cannot be.
    """

    def __init__(
        self,
        config: Clusters,
        geometry: Geometry,
        longest: int,
        engine: TransferEngine,
        rope: Rope | ExtError,
    ) -> None:
        self._config, self._longest, self._scale = config, longest, geometry.scale
        self._rope = rope
        self.refused: dict[str, ExtError] = {}
        """Errors of waiting requests that cannot follow their context, by request id. The scheduler
        is to abort these requests."""
        self.given_up: set[str] = set()
        """Ids of requests whose latest forward gave no valid output."""
        self.running: StoredForward | DeviceForward | None = None
        """Current forward if any of its rows follows a context, or else None."""
        self.stale = ""
        """Reason why no context can be followed any more; empty if contexts can be followed."""
        self._open = OpenContexts(config, geometry, longest, engine)
        self._followers: dict[str, Follower] = {}
        self._metrics: StoredMetrics | None = None
        self._failed = 0
        """Requests that were refused or ended because of their context."""
        # Found once per step, because hundreds of requests may wait.
        self._late: float | None = None
        """Arrival of the oldest request that is to be admitted first, infinite if there is none;
        None if it is not yet known in this step."""
        self._full = math.inf
        """Arrival of the oldest request whose contexts have found no place in this step."""

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
            self._failed += 1
            raise ExtError(self.stale)
        share = self._config.sparsity if asked.sparsity is None else asked.sparsity
        if share > self._config.largest:
            raise ExtError(
                f"sparsity {share:g} exceeds this server's clusters.largest, "
                f"{self._config.largest:g}; lower sparsity"
            )
        if len(asked.ids) > 1:
            self._require_joined(asked.ids)
        follower = Follower(asked.ids, share, req, time.monotonic())
        self._followers[req.rid] = follower
        self._begin(follower)
        return follower

    def ask_recorded(self, req: Req, asked: IsRecorded) -> None:
        """Adds SGLang's ``req`` as a follower of the tokens that are recorded before its prompt.

        Raises:
            ExtError: contexts cannot be followed any more.
        """
        if self.stale:
            self._failed += 1
            raise ExtError(self.stale)
        if req.rid not in self._followers:
            follower = Follower((record_id(asked),), 1.0, req, time.monotonic(), recorded=asked)
            self._followers[req.rid] = follower
            self._begin(follower)

    def succeeded(self, req: Req) -> None:
        """Forgets a request that had the id of ``req``, which is being queued, and has ended.

        A client may use the id again before :meth:`keep` is called: SGLang skips the planning of
        prefills in some steps, and while it is paused. A retracted request is the same object.
        """
        self.refused.pop(req.rid, None)  # a waiting request is not queued
        if (known := self._followers.get(req.rid)) is not None and known.req is not req:
            del self._followers[req.rid]
            self.given_up.discard(req.rid)

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
        if self._gives_way(follower):
            return False
        self._begin(follower)
        now = time.monotonic()
        follower.tried = follower.tried or now
        try:
            contexts = [self._open.find(id_) for id_ in follower.ids]
        except ExtError:
            raise
        except Exception as error:
            raise ExtError(
                f"context {follower.name} cannot be opened: {reason_of(error)}; try again later"
            ) from None
        found = [context for context in contexts if context is not None and not context.failed]
        if len(found) < len(contexts):
            if now - follower.tried > self._config.wait:
                raise UnavailableError(
                    f"context {follower.name} was not opened within {self._config.wait:g} s; "
                    f"{len(self._open)} contexts are open or being opened (clusters.open): try "
                    "again later"
                )
            return False
        tokens = sum(context.tokens for context in found)
        prompt = len(follower.req.origin_input_ids)
        if tokens + prompt >= self._longest:
            raise ExtError(
                f"context {follower.name} has {tokens} tokens and the prompt {prompt}, but the "
                f"model accepts fewer than {self._longest} in total; shorten the prompt"
            )
        follower.tokens = tokens
        params = follower.req.sampling_params
        room = self._longest - tokens - prompt - 1
        params.max_new_tokens = min(params.max_new_tokens, room)
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
        return True

    def waits(self, rid: str) -> bool:
        """Returns whether a request is held back: its context is neither open nor known to fail, or
        an older request is to be admitted first."""
        follower = self._followers.get(rid)
        if follower is None or follower.tokens:
            return False
        return any(map(self._open.waits, follower.ids)) or self._gives_way(follower)

    def context(self, follower: Follower) -> Attended:
        """Returns the open context of a request that runs, or those of several as one."""
        if len(follower.ids) > 1:
            assert isinstance(self._rope, Rope)  # noqa: S101
            opened = self._open.stored
            several = [opened[id_] for id_ in follower.ids]
            return JoinedContexts(several, self._rope, self._scale)
        context = self._open.find(follower.ids[0])
        assert context is not None  # noqa: S101
        return context

    def costs(self, follower: Follower) -> Counter[str]:
        """Returns the costs of the open contexts of a request, for all that follow them."""
        return self._open.costs_of(follower.ids)

    def refuse(self, rid: str, error: ExtError) -> None:
        """Removes a waiting request from the followers, and records why it is to be aborted."""
        self.refused[rid] = error
        self._failed += 1
        self._followers.pop(rid, None)

    def lost(self, rid: str) -> bool:
        """Returns whether the latest forward of a request gave no valid output, and forgets it."""
        lost = rid in self.given_up
        self.given_up.discard(rid)
        self._failed += lost
        return lost

    def give_up(self, why: str) -> None:
        """Ends the requests of all followers; from now on no context can be followed."""
        self.stale = why
        self._failed += len(self._followers)
        for follower in self._followers.values():
            end_request(follower.req, why)

    def keep(self, rids: Collection[str]) -> None:
        """Begins a step: removes all followers but those of ``rids``, because their requests have
        ended."""
        self._followers = {rid: one for rid, one in self._followers.items() if rid in rids}
        self.given_up &= self._followers.keys()
        self._late, self._full = None, math.inf

    def tidy(self) -> None:
        """Closes deleted or failed contexts that no request needs. Call :meth:`keep` before."""
        followers = self._followers.values()
        self._open.tidy(
            {id_ for each in followers for id_ in each.ids},
            {id_ for each in followers if each.tokens for id_ in each.ids},
        )

    def describe(self) -> dict[str, object]:
        """Returns the open contexts and the number of followers, for ``/server_info``."""
        return {
            "followed": len(self._followers),
            "open": {id_: one.describe() for id_, one in self._open.stored.items()},
        }

    def measure(self, metrics: Metrics) -> None:
        """Updates the metrics if an update is due."""
        if self._metrics is None:
            self._metrics = StoredMetrics(metrics)
        if self._metrics.due:
            opened = self._open.stored.values()
            lost = sum(each.memory.lost for each in opened)
            followed = len(self._followers)
            self._metrics.update(self._open.costs, len(opened), followed, lost, self._failed)

    def _begin(self, follower: Follower) -> None:
        """Starts to open the contexts of a request that are not open.

        They may take the places of contexts that later requests wait for: two requests that have
        opened some of their contexts each would wait for each other.
        """
        needed: Collection[str] = ()
        if not all(id_ in self._open for id_ in follower.ids):
            if follower.recorded is None and follower.since >= self._full:
                return  # an older request, which may take more places, has found none
            needed = {
                id_
                for other in self._followers.values()
                if other.tokens or other.since <= follower.since
                for id_ in other.ids
            }
        for id_ in follower.ids:
            self._open.begin(id_, follower.recorded, needed)
        if not all(id_ in self._open for id_ in follower.ids):
            self._full = min(self._full, follower.since)

    def _gives_way(self, follower: Follower) -> bool:
        """Returns whether an older request, whose context cannot be opened yet, is to be admitted
        first.

        A context is closed only when no request follows it, so that a steady stream of new requests
        for the open contexts would starve the older request. It takes precedence when it has waited
        for half of ``clusters.wait``.
        """
        if follower.recorded is not None:  # records take no places
            return False
        if self._late is None:
            late = time.monotonic() - self._config.wait / 2
            self._late = min(
                (
                    other.since
                    for other in self._followers.values()
                    if not other.tokens and other.tried and other.tried < late
                    and any(id_ not in self._open for id_ in other.ids)
                ),
                default=math.inf,
            )  # fmt: skip
        return self._late < follower.since

    def _require_joined(self, ids: Sequence[str]) -> None:
        """Raises ExtError if a request cannot use contexts together."""
        if len({*ids}) < len(ids):
            raise ExtError(f"context {'+'.join(ids)} has one of them twice; name each of them once")
        if len(ids) > self._config.open:
            raise ExtError(
                f"the request uses {len(ids)} stored contexts, but at most {self._config.open} "
                "can be open at a time (clusters.open); name fewer"
            )
        if isinstance(self._rope, ExtError):
            raise ExtError(f"a request cannot use several contexts: {self._rope}; name one")
