"""Chunks that are linked into requests: search, plan, and copies of their KV."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.chunks.composition import LEAD, Composition, Selection
from sgl_ext.chunks.methods import BLEND_LAYERS
from sgl_ext.engine.chunks.blend import Candidates
from sgl_ext.engine.chunks.moves import Move, Moves, moves_of
from sgl_ext.engine.chunks.parameters import composition_of
from sgl_ext.engine.chunks.report import Linked, report
from sgl_ext.engine.chunks.rope import verified_rope
from sgl_ext.engine.chunks.search import ChunkSearch, Found, Wanted
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import KVPool, Req, Scheduler
from sgl_ext.engine.kv.indices import on_host
from sgl_ext.memory.slab import Slab
from sgl_ext.memory.streams import Streams, streams_of
from sgl_ext.planning import choices
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.plan import Link, PrefillPlan, Span

_LEADS = 4
"""Maximum number of earlier turns of a conversation that are searched for a lead."""


@dataclass
class LinkedRequest:
    """Request whose prompt has chunks, from the attempt to admit it to the end of its prefill."""

    composition: Composition
    plan: PrefillPlan
    found: dict[int, Found]
    """KV of the chunks behind the prefix that the request already has, by chunk number.
    :data:`LEAD` stands for the KV of another prompt with the same prefix."""


class ChunkLinks:
    """Linked requests of one scheduler. Only the scheduler's thread calls it.

    Args:
        search: finds the KV of chunks.
        pool: SGLang's KV pool, a view of the slab.
        slab: memory that holds the KV.
        move: copies KV to other positions.
        streams: streams of the device that has the slab.
        plans: plans by request id; receives the plan of each request that is acquired.
        costs: cost model; None if several ranks have to agree, which always link.
    """

    def __init__(
        self,
        search: ChunkSearch,
        pool: KVPool,
        slab: Slab,
        move: Moves,
        streams: Streams,
        plans: dict[str, PrefillPlan],
        costs: Costs | None,
    ) -> None:
        self._search = search
        self._costs = costs
        self._plans = plans
        self._slab = slab
        self._pool = pool
        self._move = move
        self._streams = streams
        self._requests: dict[str, LinkedRequest] = {}
        self._asked: dict[str, list[str]] = {}
        """Names of the searches for the chunks of waiting requests, by request id."""
        self._had_turn: set[str] = set()
        """Ids of the waiting requests that were considered for admission."""

    def ask(self, req: Req) -> None:
        """Starts to load the chunks of SGLang's ``req`` from lower tiers, if there are any."""
        if not self._search.waits or composition_of(req) is None:
            return
        self._asked[req.rid] = _names(req)
        if (lead := self._lead(req, 0)) is not None:
            self._search.ask(_name(req, LEAD), lead)
        for number, wanted in _chunks(req, 0):
            self._search.ask(_name(req, number), wanted)

    def ready(self, req: Req) -> bool:
        """Returns whether the request need not wait for its chunks any longer.

        Call it when the request is considered for admission.
        """
        if (names := self._asked.get(req.rid)) is None:
            return True
        if req.rid not in self._had_turn:
            self._had_turn.add(req.rid)
            self.ask(req)  # the lease of loaded pages may have expired while the request waited
        # All chunks are queried, even if the first is not ready: each query is a collective
        # operation, and all ranks must make the same ones.
        waiting = [name for name in names if not self._search.ready(name)]
        return not waiting

    def forget(self, rid: str) -> None:
        """Stops the searches of a request that no longer waits."""
        self._had_turn.discard(rid)
        for name in self._asked.pop(rid, ()):
            self._search.forget(name)

    def acquire(self, req: Req, *, computing: bool = False) -> Linked | None:
        """Finds and keeps the chunks behind the prefix that ``req`` has, and makes its plan.

        Tokens of chunks whose KV is not available are computed.

        Args:
            computing: computes all chunks and keeps none.

        Returns:
            The report of the plan; None if the prompt has no chunks.
        """
        self.release(req.rid)
        if (composition := composition_of(req)) is None:
            return None
        found: dict[int, Found] = {}
        have = req.prefix_len
        if not computing:
            if (wanted := self._lead(req, have)) is not None:
                found[LEAD] = self._search.find(_name(req, LEAD), wanted)
                have = max(have, found[LEAD].tokens)
            for number, wanted in _chunks(req, have):
                found[number] = self._search.find(_name(req, number), wanted)
            tokens = sum(each.tokens for each in found.values())
            costs = self._costs
            if costs is not None and not choices.links(costs, tokens, req.prefix_len, req.rid):
                for each in found.values():
                    self._search.let_go(each)
                return self.acquire(req, computing=True)
        self.forget(req.rid)
        available = [
            found[number].tokens if number in found else 0
            for number in range(len(composition.chunks))
        ]
        plan = composition.plan(
            len(req.origin_input_ids),
            available,
            found[LEAD].tokens if LEAD in found else 0,
            blend_share=BLEND_LAYERS / self._slab.layout.layers,
        )
        self._requests[req.rid] = LinkedRequest(composition, plan, found)
        self._plans[req.rid] = plan
        return report(composition, plan, req.prefix_len)

    def fill(self, rid: str, start: int, end: int, slots: NDArray[np.int64]) -> None:
        """Copies the linked KV of tokens ``start .. end - 1`` to the ``slots`` of these tokens.

        The KV is in place for the calling thread's next work on the device.
        """
        if (request := self._requests.get(rid)) is None:
            return
        spans: dict[Link, list[Span]] = {}
        for span in request.plan.between(start, end):
            if isinstance(span.source, Link):
                spans.setdefault(span.source, []).append(span)
        moves = []
        for link, parts in spans.items():
            if (chunk := request.found.get(link.chunk)) is None:
                raise RuntimeError(
                    f"{rid}: {link} has tokens from {start} on, but its KV was not looked up"
                )
            positions = np.concatenate([np.arange(one.start, one.end) for one in parts])
            delta = link.at - chunk.origin
            targets = slots[positions - start]
            moves.append(Move(chunk.slots, chunk.places, positions - link.at, targets, delta))
        if moves:
            began = time.monotonic()
            self._move(moves)
            if self._costs is not None and self._slab.device is None:  # it has ended
                tokens = sum(len(one.targets) for one in moves)
                choices.linked(self._costs, tokens, rid, time.monotonic() - began)

    def blended(self, rid: str, start: int, end: int) -> Candidates | None:
        """Returns the linked tokens in ``start .. end - 1`` among which CacheBlend selects.

        Returns None if it would select none.
        """
        if (request := self._requests.get(rid)) is None:
            return None
        positions, share = [], 0
        for span in request.plan.between(start, end):
            if isinstance(span.source, Link) and span.source.work:
                positions.append(np.arange(span.start, span.end))
                blend = request.composition.chunks[span.source.chunk].blend
                share += blend * (span.end - span.start)
        return Candidates(np.concatenate(positions), share // 100) if share >= 100 else None

    def select(self, req: Req, selection: Selection) -> list[int] | None:
        """Returns the offsets of the chunk's tokens whose values differ most, ascending.

        The values are those of the two preparations that ``selection`` names. Returns None if KV of
        either is no longer on the device.
        """
        start = len(selection.preparation)
        tokens = req.origin_input_ids[start : start + selection.length]
        ways = []
        for before in (selection.preparation, selection.other):
            wanted = Wanted(selection.namespace, req.cache_salt, before, tokens)
            found = self._search.find(req.rid, wanted)
            self._search.let_go(found)  # nothing is evicted before this method returns
            if len(found.slots) < len(tokens):
                return None
            ways.append(found.slots)
        one, other = ways
        self._streams.synchronize()  # a forward in flight may write KV that the tree has already
        changed = torch.zeros(len(tokens), device=one.device)
        for layer in range(self._slab.layout.layers):
            values = self._pool.get_value_buffer(layer)
            here, there = values[one].float(), values[other].float()
            changed += (here - there).square().sum((1, 2)) / there.square().sum((1, 2))
        most = min(selection.count, len(tokens))
        chosen: list[int] = on_host(changed.topk(most).indices.sort().values).tolist()
        return chosen

    def release(self, rid: str) -> None:
        """Releases the chunks of a request whose prefill has ended or will not take place."""
        if (request := self._requests.pop(rid, None)) is not None:
            self._plans.pop(rid, None)
            for found in request.found.values():
                self._search.let_go(found)

    def _lead(self, req: Req, prefix: int) -> Wanted | None:
        """Returns the beginning of the prompt of which another prompt has most KV on the device.

        The other prompt has no chunks, or only the first ones, as an earlier turn of the
        conversation has. Returns None if no such beginning ends behind ``prefix`` and before the
        tokens whose logprobs are requested.
        """
        composition = composition_of(req)
        if composition is None:
            return None
        most = len(req.origin_input_ids)
        if req.return_logprob and req.logprob_start_len >= 0:
            most = req.logprob_start_len  # as in SGLang: logits are needed from there on
        page, chunks = self._slab.layout.page, composition.chunks
        ends = [
            (count, after.at)
            for count, (chunk, after) in enumerate(pairwise(chunks), 1)
            if after.at - (chunk.at + chunk.length) >= page  # a shorter gap saves too little
        ]
        ends = [(0, chunks[0].at), *ends[-_LEADS:]]
        user = (req.extra_key or "").removeprefix(composition.extra_key)
        return self._search.longest(
            Wanted(
                composition.until(count).extra_key + user if count else user[1:] or None,
                req.cache_salt,
                (),
                req.origin_input_ids[:end],
            )
            for count, end in ends
            if prefix < end <= most
        )


def _name(req: Req, number: int) -> str:
    """Returns the name of the search for a chunk of the request."""
    return f"{req.rid}#{number}"


def _chunks(req: Req, have: int) -> Iterator[tuple[int, Wanted]]:
    """Yields number and text of each chunk that ends behind the first ``have`` tokens.

    Chunks of which all tokens are recomputed are omitted.
    """
    if (composition := composition_of(req)) is None:
        return
    for number, chunk in enumerate(composition.chunks):
        end = chunk.at + chunk.length
        if end > have and len(chunk.recompute) < chunk.length:
            before = composition.preparations[chunk.preparation]
            tokens = req.origin_input_ids[chunk.at : end]
            yield number, Wanted(composition.namespace, req.cache_salt, before, tokens)


def _names(req: Req) -> list[str]:
    if (composition := composition_of(req)) is None:
        return []
    return [_name(req, number) for number in range(LEAD, len(composition.chunks))]


def open_links(scheduler: Scheduler, ext: ExtRuntime) -> ChunkLinks:
    """Creates the links of a scheduler whose model and KV pool exist.

    Raises:
        ActivationError: the keys of the model cannot be moved, or its KV is not in the slab.
    """
    from sglang.srt.runtime_context import get_parallel

    slab, runner = ext.require_slab("chunks"), scheduler.tp_worker.model_runner
    stack = None if ext.tiers is None else ext.tiers.stack
    rope, holds = verified_rope(runner.model, slab.layout), None if stack is None else stack.holds
    return ChunkLinks(
        ChunkSearch(scheduler.tree_cache, stack),
        runner.token_to_kv_pool,
        slab,
        moves_of(slab.layout, rope, slab.tensor(), holds),
        streams_of(slab.device, None),
        ext.plans,
        ext.costs if get_parallel().tp_size == 1 else None,
    )
