"""The ``restore`` power: computes and loads a prefix beyond the device at once (CacheFlow)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from sgl_ext.config import Restore
from sgl_ext.engine.core.attention_backends import require_running
from sgl_ext.engine.core.meta_info import tell, told
from sgl_ext.engine.core.power import Filler, Power
from sgl_ext.engine.core.requests import precedence
from sgl_ext.engine.core.sglang_types import (
    ModelConfig,
    PrefillAdder,
    Req,
    ScheduleBatch,
    Scheduler,
    ServerArgs,
    StepPlan,
)
from sgl_ext.engine.core.tracing import trace
from sgl_ext.engine.core.unserved import LORA
from sgl_ext.engine.restore import interruption, setup, stages
from sgl_ext.engine.restore.prompt import Prompt, prompt_of
from sgl_ext.engine.restore.totals import RestoreTotals
from sgl_ext.engine.step import cached_tokens
from sgl_ext.planning.plan import Load, LoadOrCompute, Source, Span
from sgl_ext.planning.request import Restored
from sgl_ext.planning.strategy import choose_strategy, layers_are_faster
from sgl_ext.planning.want import Run, Want
from sgl_ext.restore.host_prefixes import HostPrefixes
from sgl_ext.tiers.lower import result_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.step.forward import PlannedForward
    from sgl_ext.engine.step.rows import Row
    from sgl_ext.planning.planner import Planner
    from sgl_ext.tiers.arena import Key
    from sgl_ext.tiers.lower import LowerTier
    from sgl_ext.tiers.stack import TierStack

_HELD_S = 60.0
"""Time in seconds after which pinned pages of a request are released if SGLang has not looked the
request up again."""


class RestorePower(Power[Restore]):
    """Restoration of prefixes: first tokens are computed while the last ones are loaded.

    Attributes:
        planner: planner of the loads from lower tiers.
        prefixes: prefixes that host memory has, each restored within one forward.
        stack: the tiers.
        batch: SGLang's batch of the current or last forward.
        interrupted: id of the request whose KV is being released because it is interrupted; its
            restoration goes on later. None otherwise.
    """

    name = "restore"
    hooks = stages.HOOKS
    plans_rows = True
    unserved = (
        ("is_embedding", bool, "embeddings"),
        ("enable_return_hidden_states", bool, "hidden states in answers"),
        ("enable_dp_attention", bool, "data-parallel attention"),
        *LORA,
        ("tp_size", lambda size: size > 1, "tensor parallelism"),
    )

    planner: Planner
    prefixes: HostPrefixes
    stack: TierStack
    batch: ScheduleBatch
    interrupted: str | None = None
    _tier_of_parts: LowerTier | None = None
    """Tier that can load pages by layers; None if there is none."""
    _queued: Req | None = None
    """Interrupted request that is queued again at the end of this step; None if there is none."""
    _asking: Prompt | None = None
    """Prompt that SGLang looks up next; None if it is not to be restored."""
    _given_way: PrefillAdder | None = None
    """Adder of this step if a prompt gave way to others in it; None otherwise."""
    _alone: bool = False
    """Whether a prompt gave way in the last step, and no other one was admitted in it."""
    _totals: RestoreTotals
    _within: dict[str, tuple[Req, float]]
    """Requests whose prefix is restored within their last forward, and its start, by id."""

    def require_resolved(self, view: ServerArgs, model: ModelConfig) -> None:
        setup.require_parts(self.section, view.page_size, view.chunked_prefill_size)

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        from sglang.srt.runtime_context import get_schedule

        require_running(scheduler.tp_worker.model_runner, self.attention())
        setup.require_unaligned(scheduler.truncation_align_size)
        if ext.tiers is None:
            raise RuntimeError("restore is configured without tiers")
        self._ext, self._scheduler, self.stack = ext, scheduler, ext.tiers.stack
        self.planner = ext.tiers.planner
        self._most = get_schedule().chunked_prefill_size
        setup.prepare(self.section, self.stack.layout.page, self._most, ext.costs)
        model = scheduler.tp_worker.model_runner.model
        self._layered = hasattr(model, "forward_split_prefill")
        if self._layered:
            self._tier_of_parts = next((tier for tier in self.stack.lower if tier.parts), None)
        self.prefixes = HostPrefixes(self.stack.holds, self.stack.layout.page, time.monotonic)
        self.stack.keepers.append(lambda: self.prefixes.give_up_one(ext.plans))
        self._linker = ext.tiers.linker
        self._linker.restoring = self
        self._totals, self._within = RestoreTotals(ext.metrics), {}

    # --- before admission ------------------------------------------------------------------------

    def matching(self, req: Req, prefix: int) -> None:
        """Unpins the request's pages, which may no longer follow the pages on the device, and
        determines the prompt to restore."""
        self.prefixes.release(req.rid)
        self._asking = None
        if not self.owned(req):
            self._asking = prompt_of(req, prefix, self.planner.page)

    def lookup(self, rid: str, keys: Sequence[Key]) -> int | None:
        """Implements :class:`~sgl_ext.engine.tiers.linker.Restoring`."""
        prompt, self._asking = self._asking, None
        if prompt is None:
            return None
        keys = keys[: prompt.most]
        pages = self.stack.host.lookup(keys)
        if rid not in self.planner.wants and self._by_layers(rid, prompt, keys, pages):
            return pages
        run = Run(keys, prompt.first * self.planner.page, pages)
        self.planner.restore(Want(rid, (run,), prompt.tokens, prompt.precedence))
        if rid in self.planner.wants:
            return pages
        by = choose_strategy(
            self.section.host, self.planner.costs,
            first=prompt.first, pages=pages, page=self.planner.page,
            layers=self.stack.layout.layers, layered=self._layered, rid=rid,
        )  # fmt: skip
        if by is None:
            self._linker.prefixes.lacks(rid, len(keys) - pages)
            return pages
        self.prefixes.hold(rid, keys[:pages], prompt.first, by)
        return 0  # for SGLang these pages are computed

    def _by_layers(self, rid: str, prompt: Prompt, keys: Sequence[Key], pages: int) -> bool:
        """Holds the request's pages after the first ``pages`` if a tier loads them by layers.

        Under load, requests share the tier as the policy decides, by tokens.
        """
        tier, lower = self._tier_of_parts, self.stack.lower
        if tier is None or self.section.ssd == "tokens":
            return False
        if self.planner.pending() or self.prefixes.loading:
            return False
        found = result_of(tier.lookup(keys[pages:]), 0)
        first, page = prompt.first + pages, self.planner.page
        within_a_forward = prompt.tokens - first * page <= self._most
        if not found or not within_a_forward or (len(lower) > 1 and found < len(keys) - pages):
            return False
        if not tier.throughput.worthwhile(faster=True):
            return False  # the device hangs
        if self.section.ssd == "auto" and not layers_are_faster(
            self.planner.costs, tier.tier.name, first * page, (first + found) * page, rid
        ):
            return False
        self.stack.host.use(keys[:pages], times=1)  # making room must not evict these
        return self.prefixes.hold_below(rid, keys[pages : pages + found], first, tier)

    def poll(self) -> None:
        # SGLang does not look requests up while it has no room: a long queue would pin all pages.
        self.prefixes.expire(time.monotonic() - _HELD_S, self._ext.plans)

    # --- admission -------------------------------------------------------------------------------

    def ready(self, adder: PrefillAdder, req: Req, continuing: bool) -> bool:
        if continuing and req.rid in self.prefixes:
            return False  # SGLang chunks one prompt only, and would admit none after this one
        return self.planner.turn(req.rid, continuing)

    def plan(self, adder: PrefillAdder, req: Req) -> bool:
        rid, end, plans = req.rid, len(req.full_untruncated_fill_ids), self._ext.plans
        if rid in self.prefixes:
            plans[rid] = self.prefixes.plan(rid, end)
            return True
        if not self.planner.restores(rid):
            return True
        computes = self.planner.computes(rid)
        begin = req.prefix_len if computes else req.prefix_len + req.host_hit_length
        if not computes and self.planner.gives_way(rid, begin, self._others(req)):
            self._given_way = adder
            return False
        if (part := self.planner.part(rid, begin)) is None:
            return False
        if not self.planner.linked(rid):
            plans[rid] = self.planner.prefix_plan(rid, part, end)
        return True

    def _others(self, req: Req) -> int:
        """Returns the number of waiting prompts that can be computed while ``req`` loads.

        They load nothing, and are as urgent. 0 if the last step admitted none of them.
        """
        if self._alone or self._ext.independent:
            return 0
        urgency = precedence(req)
        return sum(
            one.rid not in self.planner.wants and precedence(one) <= urgency and not self.owned(one)
            for one in self._scheduler.waiting_queue
            if one is not req
        )

    def considered(self, adder: PrefillAdder, req: Req, admitted: bool) -> None:
        if admitted:
            self.continued(req)
        else:
            self.deferred(req)

    def deferred(self, req: Req) -> None:
        """Drops the plan; admission makes a new one, as the request may not be restored by then."""
        if self._restores(req.rid) and not self.planner.computes(req.rid):
            self._ext.plans.pop(req.rid, None)

    def continued(self, req: Req) -> None:
        if not self._restores(rid := req.rid):
            return
        self.planner.computing(rid, req.extend_end)
        within = rid in self.prefixes
        if not within:
            self._count_loaded(req)
        if req.extend_end < len(req.full_untruncated_fill_ids) or told(req, self.name):
            return
        if within:
            held = self.prefixes[rid]
            seconds = time.monotonic() - held.since
            held.told = {"power": self.name, "exact": True, "seconds": seconds}
            tell(req, held.told)  # the sources of the KV are known when the forward has ended
            self._within[rid] = req, time.perf_counter()
        elif (found := self.planner.report(rid)) is not None:
            tell(req, {"power": self.name, "exact": True, **found})
            trace(req, self.name, found["seconds"], computed=found["computed"], **found["loaded"])
            self._totals.count(found)

    def owned(self, req: Req) -> bool:
        """Returns whether another power provides or records the KV of a request."""
        return self._ext.owner(req) is not None

    def bound(self, req: Req) -> bool:
        """Returns whether a power needs all of a prompt's forwards, as one that records them."""
        return self._ext.owner(req) not in (None, self._ext.chunks)

    def _restores(self, rid: str) -> bool:
        return rid in self.prefixes or self.planner.restores(rid)

    def before_step(self, running: ScheduleBatch) -> None:
        self._queued = interruption.interrupt(self, self._scheduler, running)
        if self._queued is not None:
            running.batch_is_full = False

    def after_step(self, plan: StepPlan) -> None:
        self._alone = self._given_way is not None and not self._given_way.can_run_list
        self._given_way = None
        if (req := self._queued) is not None:
            # Not before planning: the result of its last part may still arrive, and is ignored
            # while the request is out of the queue.
            self._queued = None
            self._scheduler._add_request_to_queue(req, is_retracted=True)
            req.retraction_count -= 1  # an interruption is no retraction: the KV is kept

    # --- the forward -----------------------------------------------------------------------------

    def forwarding(self, batch: ScheduleBatch) -> None:
        self.batch = batch

    @property
    def fillers(self) -> Mapping[type[Source], Filler]:
        return {Load: self._fill, LoadOrCompute: _within_the_forward}

    def _fill(self, rid: str, spans: Sequence[Span], start: int, slots: NDArray[np.int64]) -> None:
        page = self.planner.page
        for span in spans:
            # Whole pages, also if memory for the forward ends within one.
            first, last = span.start // page, -(-span.end // page)
            places = self.planner.places(rid, first * page, last * page)
            positions = np.maximum(np.arange(first, last) * page, span.start)
            blocks = slots[positions - start] // page
            if len(places) != len(blocks) or (places < 0).any():  # else other KV would be copied
                raise RuntimeError(
                    f"{rid}: the plan of a forward from token {start} to {start + len(slots)} "
                    f"loads {span}, but host memory holds {places} for it; "
                    f"plan: {self._ext.plans[rid].spans}"
                )
            self.stack.holds.fill(places, blocks)

    def within(self, forward: PlannedForward, rows: list[Row]) -> AbstractContextManager[list[Row]]:
        from sgl_ext.engine.restore.fill import restoring

        return restoring(self, forward, rows)

    def prefilled(self, rid: str) -> None:
        if rid == self.interrupted:
            self._ext.plans.pop(rid, None)
            return
        if rid in self.prefixes:
            self._ended_within(rid)
        if self._restores(rid):
            self._ext.plans.pop(rid, None)
        self.prefixes.release(rid)
        self.planner.release(rid)
        for kind in ("load_or_compute", "tokens_or_layers", "compute_or_give_way"):
            self.planner.costs.decisions.ended(kind, rid, None)

    def _ended_within(self, rid: str) -> None:
        """Reports a restored prefix in host memory, if its last forward was admitted."""
        held = self.prefixes[rid]
        if held.told is None:
            return
        loaded = {held.source: self.prefixes.used(rid)}
        restored = Restored(loaded=loaded, computed=held.computed, seconds=held.told["seconds"])
        held.told |= restored
        if (within := self._within.pop(rid, None)) is not None:
            req, began = within
            seconds = restored["seconds"]
            trace(req, self.name, seconds, ended=began, computed=held.computed, **loaded)
        self._totals.count(restored)

    # --- other calls -----------------------------------------------------------------------------

    def forget(self, rid: str) -> None:
        self.prefilled(rid)

    def reset(self) -> None:
        """Gives up all restorations, so that their prompts are computed."""
        self._within.clear()
        for name in (*self.planner.clear(), *self.prefixes.clear()):
            if isinstance(name, str):
                self._ext.plans.pop(name, None)

    def weights_changed(self) -> None:
        self.reset()

    def describe(self) -> Mapping[str, object]:
        return {"interrupted": self.planner.interrupted, **self._totals.describe()}

    def close(self) -> None:
        self.reset()

    def _count_loaded(self, req: Req) -> None:
        """Counts the tokens of a request's next part that tiers have loaded, by tier."""
        begin, end = cached_tokens.first_time(req, req.prefix_len, req.extend_end)
        if begin < end:
            for span in self._ext.plans[req.rid].between(begin, end):
                if isinstance(span.source, Load):
                    loaded = self.planner.tiers(req.rid, span.start, span.end)
                    for tier, tokens in loaded.items():
                        cached_tokens.count(req, tier, tokens)
        cached_tokens.reach(req, req.extend_end)


def _within_the_forward(*_: object) -> None:
    """Leaves spans to :meth:`RestorePower.within`."""
