"""Links chunks into requests: what their prompts are made of, and copies of the chunks' KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.chunks.composition import LEAD, Composition, Selection
from sgl_ext.chunks.methods import BLEND_LAYERS
from sgl_ext.chunks.rotation import FROM, FROM_PITCH, TO, TO_PITCH, TOKENS, RotatingCopy
from sgl_ext.engine.chunks.blend import Candidates
from sgl_ext.engine.chunks.parameters import composition_of
from sgl_ext.engine.chunks.report import Linked, report
from sgl_ext.engine.chunks.rope import rotation_of
from sgl_ext.engine.chunks.search import ChunkSearch, Found, Wanted
from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import Req, Scheduler
from sgl_ext.memory.slab import Slab
from sgl_ext.plan import Link, PrefillPlan, Span

_LEADS = 4
"""Earlier turns of a conversation that are looked for, at most."""


@dataclass
class LinkedRequest:
    """A request whose prompt holds chunks, from its admission until its prefill has ended."""

    composition: Composition
    plan: PrefillPlan
    found: dict[int, Found]
    """By the number of the chunk; those behind the prefix that the request has already."""


class ChunkLinks:
    """The linked requests of one scheduler; its thread calls.

    Args:
        pool: SGLang's view of the slab.
        slab: where KV lies.
        plans: takes the plan of each request that is acquired.
    """

    def __init__(
        self,
        search: ChunkSearch,
        pool: Any,
        slab: Slab,
        copy: RotatingCopy,
        plans: dict[str, PrefillPlan],
    ) -> None:
        self._search = search
        self._plans = plans
        self._slab = slab
        self._pool = pool
        self._copy = copy
        self._requests: dict[str, LinkedRequest] = {}
        self._asked: dict[str, list[str]] = {}
        """Of requests that wait: what their chunks are called while they are on their way."""
        self._had_turn: set[str] = set()
        """Those of them that could have been admitted."""

    def ask(self, req: Req) -> None:
        """SGLang's ``req`` has arrived: its chunks begin to come from where they are."""
        if not self._search.waits or composition_of(req) is None:
            return
        self._asked[req.rid] = _names(req)
        if (lead := self._lead(req, 0)) is not None:
            self._search.ask(_name(req, LEAD), lead)
        for number, wanted in _chunks(req, 0):
            self._search.ask(_name(req, number), wanted)

    def ready(self, req: Req) -> bool:
        """Whether what comes of the request's chunks is here; it is its turn."""
        if (names := self._asked.get(req.rid)) is None:
            return True
        if req.rid not in self._had_turn:
            self._had_turn.add(req.rid)
            self.ask(req)  # what has come is kept for a while only, and it may have waited longer
        # Ranks, which answer together, are asked the same: of all chunks, whatever the first says.
        waiting = [name for name in names if not self._search.ready(name)]
        return not waiting

    def forget(self, rid: str) -> None:
        """The request does not wait any more: nothing needs to come for it."""
        self._had_turn.discard(rid)
        for name in self._asked.pop(rid, ()):
            self._search.forget(name)

    def acquire(self, req: Req, *, computing: bool = False) -> Linked | None:
        """Finds and keeps the chunks behind the prefix that ``req`` has; makes its plan.

        A chunk that is not there, or not all of it, is computed.

        Args:
            computing: all of them are, and none is kept.
        """
        self.release(req.rid)
        if (composition := composition_of(req)) is None:
            return None
        found: dict[int, Found] = {}
        have = req.prefix_len
        if not computing:
            if (wanted := self._lead(req, have)) is not None:
                found[LEAD] = self._search.find(_name(req, LEAD), wanted)
                have = max(have, len(found[LEAD].addresses))
            for number, wanted in _chunks(req, have):
                found[number] = self._search.find(_name(req, number), wanted)
        self.forget(req.rid)
        available = [
            len(found[number].addresses) if number in found else 0
            for number in range(len(composition.chunks))
        ]
        plan = composition.plan(
            len(req.origin_input_ids),
            available,
            len(found[LEAD].addresses) if LEAD in found else 0,
            blend_share=BLEND_LAYERS / self._slab.layout.layers,
        )
        self._requests[req.rid] = LinkedRequest(composition, plan, found)
        self._plans[req.rid] = plan
        return report(composition, plan, req.prefix_len)

    def fill(self, rid: str, start: int, end: int, slots: NDArray[np.int64]) -> None:
        """Copies what the plan links of tokens ``start .. end - 1`` to ``slots`` of theirs."""
        if (request := self._requests.get(rid)) is None:
            return
        spans: dict[Link, list[Span]] = {}
        for span in request.plan.between(start, end):
            if isinstance(span.source, Link):
                spans.setdefault(span.source, []).append(span)
        for link, parts in spans.items():
            if (chunk := request.found.get(link.chunk)) is None:
                raise RuntimeError(f"{rid}: {link} was taken to lie before token {start}")
            sources = np.concatenate(
                [chunk.addresses[one.start - link.at : one.end - link.at] for one in parts]
            )
            targets = np.concatenate([slots[one.start - start : one.end - start] for one in parts])
            self._copy(self._runs(sources, targets), link.at - chunk.origin)

    def blended(self, rid: str, start: int, end: int) -> Candidates | None:
        """What is linked in ``start .. end - 1`` but may be computed (CacheBlend), if anything."""
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
        """The chunk's tokens, ascending, whose values differ most; None if the KV is gone."""
        start = len(selection.preparation)
        tokens = req.origin_input_ids[start : start + selection.length]
        ways = []
        for before in (selection.preparation, selection.other):
            wanted = Wanted(selection.namespace, req.cache_salt, before, tokens)
            found = self._search.find(req.rid, wanted)
            self._search.let_go(found)  # nothing is evicted before this has returned
            if len(found.slots) < len(tokens):
                return None
            ways.append(torch.from_numpy(found.slots))
        one, other = ways
        changed = torch.zeros(len(tokens))
        for layer in range(self._slab.layout.layers):
            values = self._pool.get_value_buffer(layer)
            here, there = values[one].float(), values[other].float()
            changed += (here - there).square().sum((1, 2)) / there.square().sum((1, 2))
        most = min(selection.count, len(tokens))
        chosen: list[int] = changed.topk(most).indices.sort().values.tolist()
        return chosen

    def release(self, rid: str) -> None:
        """The request's prefill has ended, or it does not come to it: its chunks may go."""
        if (request := self._requests.pop(rid, None)) is not None:
            self._plans.pop(rid, None)
            for found in request.found.values():
                self._search.let_go(found)

    def _lead(self, req: Req, prefix: int) -> Wanted | None:
        """What of the prompt, from its first token on, the device has the most of in another one:
        in a prompt without chunks, or in one without the last of these, such as the turn before
        they were added. None if no such prompt has more than ``prefix``."""
        composition = composition_of(req)
        if composition is None:
            return None
        most = len(req.origin_input_ids)
        if req.return_logprob and req.logprob_start_len >= 0:
            most = req.logprob_start_len  # as SGLang does; from there on there must be logits
        page, chunks = self._slab.layout.page, composition.chunks
        ends = [
            (count, after.at)
            for count, (chunk, after) in enumerate(pairwise(chunks), 1)
            if after.at - (chunk.at + chunk.length) >= page  # else there is little to be gained
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

    def _runs(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Both in the order of the prompt: addresses, and slots."""
        size = self._slab.layout.token_bytes
        breaks = (np.diff(sources) != size) | (np.diff(targets) != 1)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        runs = np.empty((len(first), 5), np.int64)
        runs[:, FROM] = sources[first]
        runs[:, TO] = self._slab.address + targets[first] * size
        runs[:, TOKENS] = np.diff(first, append=len(sources))
        runs[:, [FROM_PITCH, TO_PITCH]] = size
        return runs


def _name(req: Req, number: int) -> str:
    """What a chunk of the request is called while it is on its way."""
    return f"{req.rid}#{number}"


def _chunks(req: Req, have: int) -> Iterator[tuple[int, Wanted]]:
    """Those of the request that its first ``have`` tokens do not hold, by number."""
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
    """The links of a scheduler that has its model and pool.

    Raises:
        ActivationError: its model's keys cannot be moved, or its KV does not lie in the slab.
    """
    if ext.slab is None:
        raise hooks.ActivationError(
            f"chunks need the block-major layout, and {ext.layer_major_because}"
        )
    copy = rotation_of(scheduler.tp_worker.model_runner.model, ext.slab.layout)
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    search = ChunkSearch(
        scheduler.tree_cache, ext.slab, None if ext.tiers is None else ext.tiers.stack
    )
    return ChunkLinks(search, pool, ext.slab, copy, ext.plans)
