"""Chunks that are linked into requests: search, plan, and copies of their KV."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.chunks.composition import LEAD
from sgl_ext.chunks.methods import BLEND_LAYERS
from sgl_ext.config.chunks import Chunks
from sgl_ext.engine.chunks.blend import Candidates
from sgl_ext.engine.chunks.linked_request import LinkedRequest
from sgl_ext.engine.chunks.moves import Move, Moves, moves_of
from sgl_ext.engine.chunks.parameters import composition_of
from sgl_ext.engine.chunks.report import COUNTED, Linked, report
from sgl_ext.engine.chunks.rope import verified_rope
from sgl_ext.engine.chunks.search import ChunkSearch, Found, Wanted
from sgl_ext.engine.chunks.wanted import chunks_of, leads, start_of
from sgl_ext.engine.core.requests import precedence
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import Req, Scheduler
from sgl_ext.memory.slab import Slab
from sgl_ext.planning import choices
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.plan import Compute, Link, PrefillPlan, Span
from sgl_ext.planning.planner import Landed
from sgl_ext.planning.want import Name, Want

_EARLIER = "_sgl_ext_linked_before"
"""Attribute of SGLang's ``Req``: see :attr:`LinkedRequest.earlier`."""


class Copied(NamedTuple):
    """Copy of linked KV to its slots."""

    seconds: float
    """Duration; on a device, that of the launch."""
    ended: float
    """End, on the clock of :func:`time.perf_counter`."""
    tokens: int
    method: str
    """Names of the prompt's link methods."""


class ChunkLinks:
    """Linked requests of one scheduler. Only the scheduler's thread calls it.

    Args:
        search: finds the KV of chunks.
        slab: memory that holds the KV.
        move: copies KV to other positions.
        plans: plans by request id; receives the plan of each request that is acquired.
        divides: whether a part of the chunks in lower tiers is computed while the others load;
            else they are loaded before the request is admitted.
        budget: tokens that a forward computes at most; None if there is no limit.
        costs: cost model that decides between linking and computing; None to link always, as
            several ranks do, which have to agree.
    """

    def __init__(
        self,
        search: ChunkSearch,
        slab: Slab,
        move: Moves,
        plans: dict[str, PrefillPlan],
        costs: Costs | None,
        *,
        divides: bool,
        budget: int | None,
    ) -> None:
        self._divides = divides
        self._budget = budget
        self.search = search
        self._costs = costs
        self._plans = plans
        self._slab = slab
        self._move = move
        self._requests: dict[str, LinkedRequest] = {}
        self._asked: set[str] = set()
        """Ids of the requests for whose chunks lower tiers were asked."""
        self.copied: dict[str, Copied] = {}
        """Copies of linked KV since the last forward, by request id."""
        self._had_turn: set[str] = set()
        """Ids of the waiting requests that were considered for admission."""

    def ask(self, req: Req) -> None:
        """Starts to load the chunks of SGLang's ``req`` from lower tiers, if there are any."""
        if not self.search.waits or (composition := composition_of(req)) is None:
            return
        lead = self._lead(req, 0)
        # A lead ends where a chunk begins, so that the texts follow one another.
        texts = [*chunks_of(req, 0 if lead is None else len(lead.tokens))]
        if lead is not None:
            texts.insert(0, (LEAD, lead))
        runs = [
            self.search.run(wanted, start_of(composition, number), number)
            for number, wanted in texts
        ]
        self._asked.add(req.rid)
        if found := tuple(run for run in runs if run is not None):
            name = req.rid if self._divides else _name(req.rid)
            want = Want(name, found, len(req.origin_input_ids), precedence(req), linked=True)
            self.search.load(want, whole=not self._divides)

    def ready(self, req: Req) -> bool:
        """Returns whether the request need not wait for its chunks any longer.

        Call it when the request is considered for admission.
        """
        if req.rid not in self._asked:
            return True
        if req.rid not in self._had_turn:
            self._had_turn.add(req.rid)
            self.ask(req)  # the lease of loaded pages may have expired while the request waited
        return self._divides or self.search.ready(_name(req.rid))

    def forget(self, rid: str) -> None:
        """Forgets that a request waits; what it waited for is not loaded as a whole any more."""
        self._had_turn.discard(rid)
        if rid in self._asked:
            self._asked.remove(rid)
            if not self._divides:  # else the power that restores prefixes ends the want
                self.search.forget(_name(rid))

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
        found, spared = {} if computing else self._find(req), list[range]()
        here = [
            range(at + each.start, at + each.stop)
            for number, one in found.items()
            for at in [start_of(composition, number)]
            for each in one.available
        ]
        costs = self._costs
        if found and costs is not None:
            computing = not choices.links(costs, sum(map(len, here)), req.prefix_len, req.rid)
        if found and computing:
            for one in found.values():
                self.search.let_go(one)
            found, spared = {}, here
        if computing and self._divides:
            self.search.forget(req.rid)
        elif computing:
            self.forget(req.rid)
        tokens = len(req.origin_input_ids)
        plan = PrefillPlan([Span(0, tokens, Compute())])
        if (earlier := getattr(req, _EARLIER, None)) is None:
            setattr(req, _EARLIER, earlier := [])
        self._requests[req.rid] = LinkedRequest(
            composition, tokens, found, plan, req.prefix_len, spared, earlier=earlier
        )
        self.plan(req.rid)
        return self.report(req)

    def _find(self, req: Req) -> dict[int, Found]:
        """Finds and keeps the lead and the chunks behind the prefix that ``req`` has."""
        found, have = dict[int, Found](), req.prefix_len
        if (wanted := self._lead(req, have)) is not None:
            found[LEAD] = self.search.find(wanted)
            have = max(have, found[LEAD].leading)
        for number, wanted in chunks_of(req, have):
            found[number] = self.search.find(wanted)
        return found

    def admitted(self, req: Req) -> None:
        """Counts the uses of the chunks of an acquired request that was admitted."""
        if not self._divides:
            self.forget(req.rid)  # not before: SGLang may have refused the request until now
        if (request := self._requests.get(req.rid)) is not None:
            request.prefix = req.prefix_len  # including what SGLang has loaded since
            for found in request.found.values():
                self.search.used(found)

    def plan(self, rid: str) -> None:
        """Makes the plan of an acquired request's next forward, with all KV that is here by now."""
        if (request := self._requests.get(rid)) is None:
            return
        part, loaded = self.search.planned(rid)
        for found in request.found.values():
            found.places[found.held :] = -1  # the planner may have given up what it had loaded
        for landed in loaded:
            text = landed.run.text
            if text in request.found:
                self._place(request.found[text], landed, start_of(request.composition, text))
        available = [
            request.found[number].available if number in request.found else []
            for number in range(len(request.composition.chunks))
        ]
        lead = request.found[LEAD].available if LEAD in request.found else []
        share = BLEND_LAYERS / self._slab.layout.layers
        request.spared = self.search.spared(rid) or request.spared
        request.plan = self._plans[rid] = request.composition.plan(
            request.tokens, available, lead, blend_share=share, stop=part.stop,
            budget=self._budget,
        )  # fmt: skip

    def _place(self, found: Found, landed: Landed, at: int) -> None:
        """Records where the loaded pages of a text lie in host memory.

        Args:
            at: position in the prompt of the text's first token.
        """
        page = self._slab.layout.page
        within = np.arange(page)
        offsets = ((landed.run.start - at + landed.numbers * page)[:, None] + within).ravel()
        places = (landed.places[:, None] * page + within).ravel()
        offsets -= len(found.slots)
        there = (offsets >= 0) & (offsets < len(found.places))
        found.places[offsets[there]] = places[there]

    def report(self, req: Req) -> Linked | None:
        """Returns the report of an acquired request's plan; None if the prompt has no chunks."""
        if (request := self._requests.get(req.rid)) is None:
            return None
        found = report(
            request.composition, request.plan, request.prefix, request.spared, part=req.prefix_len
        )
        for one in request.earlier:
            until = min(one.reached, request.prefix)  # what was lost of it is linked again
            more = report(one.composition, one.plan, one.prefix, one.spared, until=until)
            for name in COUNTED:
                found[name] += more[name]
            found["prefix"] += more["prefix"]
        return found

    def reached(self, req: Req) -> None:
        """Records how far the next forward of an acquired request comes."""
        if (request := self._requests.get(req.rid)) is not None:
            request.reached = req.extend_end

    def fill(self, rid: str, spans: Sequence[Span], start: int, slots: NDArray[np.int64]) -> None:
        """Copies linked KV to the slots of its tokens; see
        :data:`~sgl_ext.engine.core.power.Filler`.

        Raises:
            RuntimeError: the KV of a span was not looked up.
        """
        request = self._requests[rid]
        links: dict[Link, list[Span]] = {}
        for span in spans:
            if isinstance(span.source, Link):
                links.setdefault(span.source, []).append(span)
        moves = []
        for link, parts in links.items():
            if (chunk := request.found.get(link.chunk)) is None:
                raise RuntimeError(
                    f"{rid}: {link} has tokens from {start} on, but its KV was not looked up"
                )
            positions = np.concatenate([np.arange(one.start, one.end) for one in parts])
            delta = link.at - chunk.origin
            targets = slots[positions - start]
            moves.append(Move(chunk.slots, chunk.places, positions - link.at, targets, delta))
        began = time.perf_counter()
        self._move(moves)
        ended, tokens = time.perf_counter(), sum(len(one.targets) for one in moves)
        self.copied[rid] = Copied(ended - began, ended, tokens, request.composition.method)
        if self._costs is not None and self._slab.device is None:  # it has ended
            choices.linked(self._costs, tokens, rid, ended - began)

    def blended(self, rid: str, start: int, end: int) -> Candidates | None:
        """Returns what :meth:`LinkedRequest.blended` does; None for a request without chunks."""
        request = self._requests.get(rid)
        return None if request is None else request.blended(start, end)

    def queried(self, rid: str, start: int, end: int) -> tuple[Candidates, int] | None:
        """Returns what :meth:`LinkedRequest.queried` does; None for a request without chunks."""
        request = self._requests.get(rid)
        return None if request is None else request.queried(start, end)

    def locked(self, rid: str) -> list[torch.Tensor]:
        """Returns the slots of the radix tree that are locked for an acquired request."""
        request = self._requests.get(rid)
        return [] if request is None else [found.locked for found in request.found.values()]

    def release(self, rid: str) -> None:
        """Releases the chunks of a request whose prefill has ended or will not take place."""
        if (request := self._requests.pop(rid, None)) is not None:
            self._plans.pop(rid, None)
            for found in request.found.values():
                self.search.let_go(found)
            request.found = {}
            if 0 < request.reached < request.tokens:
                request.earlier.append(request)

    def _lead(self, req: Req, prefix: int) -> Wanted | None:
        return self.search.longest(leads(req, prefix, self._slab.layout.page))


def _name(rid: str) -> Name:
    """Returns the name of the want of a request's chunks, if they are loaded as a whole."""
    return "chunks", rid


def open_links(scheduler: Scheduler, ext: ExtRuntime, section: Chunks) -> ChunkLinks:
    """Creates the links of a scheduler whose model and KV pool exist.

    Raises:
        ActivationError: the keys of the model cannot be moved, or its KV is not in the slab.
    """
    from sglang.srt.runtime_context import get_parallel, get_schedule

    slab, runner = ext.require_slab("chunks"), scheduler.tp_worker.model_runner
    stack = None if ext.tiers is None else ext.tiers.stack
    planner = None if ext.tiers is None else ext.tiers.planner
    rope, holds = verified_rope(runner.model, slab.layout), None if stack is None else stack.holds
    budget = get_schedule().chunked_prefill_size
    decides = section.link == "auto" and get_parallel().tp_size == 1
    return ChunkLinks(
        ChunkSearch(scheduler.tree_cache, stack, planner),
        slab,
        moves_of(slab.layout, rope, slab.tensor(), holds),
        ext.plans,
        ext.costs if decides else None,
        divides=ext.restore is not None and not ext.independent,
        # The part that has all chunks may begin within the page before them.
        budget=None if budget is None or budget < 0 else max(budget - slab.layout.page, 0),
    )
