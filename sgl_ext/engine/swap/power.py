"""The ``swap`` power: preempted requests keep their KV and resume without prefill (FastSwitch)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgl_ext.config import Swap, SwapExperiment
from sgl_ext.config.source import ConfigError
from sgl_ext.config.swap import EXPERIMENT
from sgl_ext.engine.core.hooks import ActivationError, Original
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.core.sglang_types import (
    PrefillAdder,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
    ServerArgs,
    StepPlan,
    TokenizerManager,
)
from sgl_ext.engine.core.unserved import PIPELINE
from sgl_ext.engine.swap import api, out, priorities, resume, spans
from sgl_ext.engine.swap.ahead import SwapAhead
from sgl_ext.engine.workarounds import penalties
from sgl_ext.swap.manager import SwapManager
from sgl_ext.tiers.arena import stride_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.swap.metrics import SwapMetrics

logger = logging.getLogger(__name__)

_ORDERS = ("fcfs", "lof")
"""SGLang's orders of requests that it combines with priorities."""


class SwapPower(Power[Swap]):
    """Swapping of preempted requests, whose KV is kept in host memory.

    Attributes:
        manager: swapped-out requests.
        ahead: swap-ins that overlap with decode steps of other requests.
        priorities: priorities by a fairness policy; None if SGLang's own priorities decide.
        resuming: SGLang's requests that join the batch at the end of this step.
        preempted: SGLang's request whose KV is being released because it is preempted; None
            otherwise.
    """

    name = "swap"
    hooks = (*out.HOOKS, *priorities.HOOKS, *api.HOOKS)
    path = "/ext/swap"
    unserved = (
        *PIPELINE,
        ("tp_size", lambda size: size > 1, "tensor parallelism"),
        ("disaggregation_mode", lambda mode: mode != "null", "prefill-decode disaggregation"),
    )

    manager: SwapManager
    ahead: SwapAhead
    priorities: priorities.Priorities | None
    preempted: Req | None = None
    _cleared: Sequence[str] = ()
    """Requests whose KV was dropped with all cached KV; they are lost in the next step."""
    _expecting: PrefillAdder | None = None
    """Adder of the step in which memory was last reserved for swap-ins in progress."""
    _metrics: SwapMetrics | None = None

    def declare(self, server_args: ServerArgs) -> None:
        """Makes SGLang schedule by priority if a policy of this power decides priorities.

        Raises:
            ActivationError: SGLang's arguments ask for another order, or for what is not served.
        """
        super().declare(server_args)
        try:
            experiment = self.section.experiment
        except ConfigError as error:
            raise ActivationError(str(error)) from None
        if experiment != SwapExperiment():
            logger.warning("%s is set: this server is part of an experiment", EXPERIMENT)
        policy = self.section.order
        if policy == "sglang":
            return
        if (
            server_args.schedule_low_priority_values_first
            or server_args.disable_priority_preemption
        ):
            raise ActivationError(
                f"swap.policy {policy} sets priorities itself and does not support "
                "--schedule-low-priority-values-first or --disable-priority-preemption; remove "
                "these options, or set swap.policy to sglang"
            )
        if server_args.schedule_policy not in _ORDERS:
            raise ActivationError(
                f"swap.policy {policy} makes SGLang schedule by priority, which it does only with "
                f"--schedule-policy {' or '.join(_ORDERS)}, found {server_args.schedule_policy}; "
                "choose one of these, or set swap.policy to sglang"
            )
        if server_args.radix_eviction_policy == "priority":
            raise ActivationError(
                f"swap.policy {policy} replaces the priorities of requests by levels, by which "
                "--radix-eviction-policy priority would order the cache; choose another eviction "
                "policy, or set swap.policy to sglang"
            )
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(
            server_args,
            "sgl_ext",
            enable_priority_scheduling=True,
            priority_scheduling_preemption_threshold=0,
            retraction_policy="priority",
        )

    def serve(self, app: FastAPI, manager: TokenizerManager, info: Mapping[str, Any]) -> None:
        by_priority = manager.server_args.enable_priority_scheduling
        api.install(app, manager, api.useless(self.section.order, by_priority))

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        if ext.tiers is None or ext.slab is None:
            raise RuntimeError("swap is configured without tiers")
        self.ext, self.scheduler, stack = ext, scheduler, ext.tiers.stack
        capacity = self.section.capacity // stride_of(ext.slab.layout)
        self.manager = SwapManager(stack, capacity, self.section.experiment)
        self.manager.spills = not ext.independent
        stack.keepers.append(self.manager.give_up_one)
        self.ahead = SwapAhead(stack, ext.costs)
        self.priorities = priorities.priorities_of(self.section)
        self.resuming: list[Req] = []
        if ext.metrics is not None:
            from sgl_ext.engine.swap.metrics import SwapMetrics

            self._metrics = SwapMetrics(ext.metrics)

    def owns(self, req: Req) -> bool:
        return req.rid in self.manager

    def matching(self, req: Req, prefix: int) -> None:
        """Leaves a request to restoration if host memory has not all of its KV any more.

        Without restoration, lower tiers load the missing pages into host memory as a whole.
        """
        swapped = self.manager.get(req.rid)
        restores = self.ext.restore is not None and not self.ext.independent
        if swapped is None or not restores or req.rid in self.ahead:
            return
        page = self.manager.stack.layout.page
        if self.manager.readable(swapped, prefix // page) is False:
            self.lost(req.rid, req)

    def joining(self) -> int:
        return len(self.resuming) + len(self.ahead)

    def ready(self, adder: PrefillAdder, req: Req, continuing: bool) -> bool:
        """Reserves memory for requests whose KV is being loaded, at the first request of a step.

        Returns:
            True: no request is deferred.
        """
        if self._expecting is not adder:
            self._expecting = adder
            adder.memory_budget.total_offset += self.ahead.growth
        return True

    def resume(self, adder: PrefillAdder, req: Req) -> object | None:
        if (swapped := self.manager.get(req.rid)) is None:
            return None
        with self.manager.clock.on():
            return resume.try_resume(self, adder, req, swapped)

    def make_room(self, adder: PrefillAdder, req: Req) -> bool:
        """Preempts requests for one that memory is missing for, and returns whether it fits.

        SGLang itself preempts only if too many requests run.
        """
        from sglang.srt.runtime_context import get_schedule

        schedule = get_schedule()
        if not schedule.enable_priority_scheduling or schedule.disable_priority_preemption:
            return False
        with self.manager.clock.on():
            found = resume.look_up(self, adder.tree_cache, req)
            with adder._lock_node(found.node):
                lacking = resume.lacking(adder, req, found.tokens)
            # Below 0, there are tokens for it, and only no slots for its pages yet.
            return lacking >= 0 and out.displace(adder, req, lacking)

    def preempt(self, original: Original, adder: PrefillAdder, req: Req) -> bool | None:
        with self.manager.clock.on():
            found = resume.look_up(self, adder.tree_cache, req)
            apart = not self.owns(req) and penalties.apart(adder, req)
            if found.readable is None or apart:
                return False
            return out.displace(adder, req, resume.lacking(adder, req, found.tokens))

    def considered(self, adder: PrefillAdder, req: Req, admitted: bool) -> None:
        if admitted and req.retraction_count:
            begin = req.prefix_len
            end = len(req.full_untruncated_fill_ids) - 1  # the last token had no KV
            plan = self.ext.plans.get(req.rid)
            tokens = end - begin if plan is None else plan.computed(begin, end)
            self.manager.counts.recomputed_tokens += tokens

    def requeued(self, scheduler: Scheduler, req: Req, arrived: float) -> None:
        out.keep_place(scheduler, req, arrived)

    def poll(self) -> None:
        if self._metrics is not None and self._metrics.due:
            self._metrics.update(self.manager.describe())

    def pending(self) -> bool:
        return len(self.ahead) > 0

    def before_step(self, running: ScheduleBatch) -> None:
        manager, scheduler = self.manager, self.scheduler
        if self._cleared:
            for req in (*scheduler.waiting_queue, *self.ext.withheld()):
                if req.rid in self._cleared:
                    self.lost(req.rid, req)
            self._cleared = ()
        with manager.clock.on():
            news = manager.advance()
            for rid, pages in self.ahead.land(scheduler.tree_cache):
                news = True
                manager.counts.loaded_pages += pages
                if not pages and rid in manager:
                    its = (req for req in scheduler.waiting_queue if req.rid == rid)
                    self.lost(rid, next(its, None))
            if news:
                # SGLang may have found the batch full before. It would then admit no request until
                # a running one ends.
                running.batch_is_full = False
            if self.priorities is not None:
                chunked = () if scheduler.chunked_req is None else (scheduler.chunked_req,)
                # Requests that wait for their grammar may be queued and admitted in this step.
                grammars = scheduler.grammar_manager.grammar_queue
                waiting = (*scheduler.waiting_queue, *grammars, *self.ext.withheld())
                self.priorities.step(waiting, (*running.reqs, *chunked), scheduler.forward_ct)

    def after_step(self, plan: StepPlan) -> None:
        """Merges the requests that were resumed in this step into the batch that decodes."""
        scheduler, self._expecting = self.scheduler, None
        with self.manager.clock.on():
            if reqs := resume.fitting(self, scheduler):
                gone: set[Req] = set()
                for batch in resume.batches(self, scheduler, reqs):
                    gone.update(batch.reqs)
                    if plan.running_batch.is_empty():
                        plan.running_batch = batch
                    else:
                        plan.running_batch.merge_batch(batch)
                queue = scheduler.waiting_queue
                scheduler.waiting_queue = [req for req in queue if req not in gone]

    def lost(self, rid: str, req: Req | None) -> None:
        """Gives up the KV of a swapped request, which cannot be read, so that it is recomputed.

        Args:
            req: SGLang's request, which other powers are told of; None if it does not wait.
        """
        self.manager.counts.recomputed += 1
        self.manager.drop(rid)
        if req is not None:
            spans.away(req, resumed=False)
            self.ext.needed(req)

    def released(self, tree: RadixTree, req: Req, checkpointed: bool) -> None:
        out.ended(self.manager, tree, req)
        priorities.ended(self.priorities, req)

    def forget(self, rid: str) -> None:
        self.manager.drop(rid)
        self.ahead.cancel(rid)

    def reset(self) -> None:
        self.ahead.clear()
        # Other powers look up what is left in the tiers, which are emptied after this call.
        self._cleared = (*self._cleared, *self.manager.clear())
        if self.priorities is not None:
            self.priorities.clear()

    def describe(self) -> Mapping[str, object]:
        found: dict[str, object] = {**self.manager.describe()}
        if (experiment := self.manager.experiment) != SwapExperiment():
            found["experiment"] = experiment.model_dump()
        return found
