"""Where restoration meets SGLang's scheduler: whose turn it is, and how far each forward goes.

Called by the hooks of :mod:`~sgl_ext.engine.step.admission`,
:mod:`~sgl_ext.engine.step.forward` and :mod:`~sgl_ext.engine.tiers.power`, which own the seams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.meta_info import tell, told
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.step import cached_tokens
from sgl_ext.plan import Load, LoadOrCompute
from sgl_ext.restore.host_prefixes import Held, Strategy
from sgl_ext.restore.request import Restored
from sgl_ext.restore.restorer import Restorer
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.stack import TierStack

_PARKED = "_sgl_ext_parked"
"""Attribute of a ``PrefillAdder``: the prompt that it goes on with waits for its KV."""


class Coming(NamedTuple):
    """Pages of a request in host memory, and the blocks of the device that they are for."""

    start: int
    """Token of the prompt that they begin with."""
    pages: Pages
    blocks: Pages


class Prompt(NamedTuple):
    """Whose prefix may be restored."""

    first: int
    """Number of its first page that the device does not have."""
    most: int
    """Pages from there on that need not be computed; some of SGLang's look-ups are for more."""
    behind: int
    """Tokens."""
    precedence: int
    """The smaller, the sooner: SGLang's priority, where it schedules by that."""


def looked_up(req: Any) -> None:
    """The request's prompt is looked up anew: what host memory kept for it may not follow any more
    on what the device has."""
    if (ext := runtime.current) is not None and ext.prefixes is not None:
        ext.prefixes.release(req.rid)


def prompt_of(req: Any, prefix: int) -> Prompt | None:
    """The request's prompt, of which the device has ``prefix`` tokens; None if it is not to be
    restored."""
    ext = runtime.current
    if ext is None or ext.restorer is None:
        return None
    if req.session is not None or req.multimodal_inputs is not None:
        return None
    if ext.swap is not None and req.rid in ext.swap:
        return None
    if ext.links is not None:
        from sgl_ext.engine.chunks.parameters import composition_of

        if composition_of(req) is not None:
            return None
    page, tokens = ext.restorer.page, len(req.full_untruncated_fill_ids)
    first, most = prefix // page, req._compute_max_prefix_len(tokens) // page
    return Prompt(first, most - first, tokens, _precedence(req)) if most > first else None


def _precedence(req: Any) -> int:
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    if not schedule.enable_priority_scheduling or req.priority is None:
        return 0
    priority: int = req.priority
    return priority if schedule.schedule_low_priority_values_first else -priority


def strategy(stack: TierStack, prompt: Prompt, pages: int) -> Strategy | None:
    """How host memory's ``pages`` of a prompt are restored; None if they are only loaded.

    Restoring pays if at least one layer would be computed before all are loaded (Equation 1).
    """
    ext, restorer = runtime.current, _restorer()
    if not pages or ext is None or restorer is None or ext.config.restore is None:
        return None
    if (how := ext.config.restore.host) != "auto":
        return None if how == "never" else Strategy(how)
    if not stack.loaded.seconds:
        return None  # the first one says how long it takes
    loading = pages * stack.loaded.seconds / stack.loaded.pages
    begin, end = prompt.first * restorer.page, (prompt.first + pages) * restorer.page
    computing = restorer.costs.compute.seconds(begin, end)
    if stack.layout.layers * loading < loading + computing:
        return None
    return Strategy.TOKENS if end - begin >= restorer.costs.crossover else Strategy.LAYERS


def held_back(adder: Any, req: Any, continuing: bool) -> bool:
    """Whether it is not the request's turn."""
    ext, restorer = runtime.current, _restorer()
    if ext is None or ext.prefixes is None or restorer is None:
        return False
    if continuing and req.rid in ext.prefixes:
        return True  # SGLang goes on with one prompt only, and would look no further behind it
    # SGLang would count a part that waits among those of a batch of others.
    return getattr(adder, _PARKED, False) or not restorer.turn(req.rid, continuing)


def planned(adder: Any, req: Any) -> bool:
    """Makes the request's next plan, if it is being restored; False if it has to wait."""
    ext = runtime.current
    if ext is None or ext.restorer is None or ext.prefixes is None:
        return True
    end = len(req.full_untruncated_fill_ids)
    if req.rid in ext.prefixes:
        ext.plans[req.rid] = ext.prefixes.plan(req.rid, end)
        return True
    if not ext.restorer.restores(req.rid):
        return True
    computes = ext.restorer.computes(req.rid)
    begin = req.prefix_len if computes else req.prefix_len + req.host_hit_length
    plan = ext.restorer.plan(req.rid, begin, end)
    if plan is None:
        if computes:
            setattr(adder, _PARKED, True)
        return False
    ext.plans[req.rid] = plan
    return True


def considered(req: Any, admitted: bool) -> None:
    """SGLang has tried to compute the next part of the request."""
    ext = runtime.current
    if ext is None or ext.restorer is None or ext.prefixes is None:
        return
    within, restorer = req.rid in ext.prefixes, ext.restorer
    if not within and not restorer.restores(req.rid):
        return
    if not admitted:
        if not restorer.computes(req.rid):
            ext.plans.pop(req.rid, None)
        return
    restorer.computing(req.rid, req.extend_end)
    if within:
        ext.prefixes[req.rid].request = req
    else:
        cached_tokens.count_loaded(ext.plans[req.rid], restorer, req)
    if req.extend_end < len(req.full_untruncated_fill_ids) or told(req, "restore"):
        return
    if within:
        held = ext.prefixes[req.rid]
        seconds = time.monotonic() - held.since
        held.told = {"power": "restore", "exact": True, "seconds": seconds}
        tell(req, held.told)  # what has come from where is known when the forward has ended
    elif (found := restorer.report(req.rid)) is not None:
        tell(req, {"power": "restore", "exact": True, **found})
        _count(ext, found)


def _ended_within(ext: ExtRuntime, held: Held) -> None:
    """The last of the forwards that restore a prefix from host memory has ended."""
    if held.told is None or ext.tiers is None:
        return
    page = ext.tiers.layout.page
    loaded = {"host": len(held.pages) * page - held.computed}
    ext.tiers.hits["host"] += loaded["host"] // page
    restored = Restored(loaded=loaded, computed=held.computed, seconds=held.told["seconds"])
    held.told |= restored
    _count(ext, restored)


def fill(ext: ExtRuntime, rid: str, start: int, end: int, slots: NDArray[np.int64]) -> None:
    """Copies what was loaded of tokens ``start .. end - 1`` to ``slots`` of theirs."""
    if ext.restorer is None or ext.tiers is None or not ext.restorer.restores(rid):
        return
    page = ext.restorer.page
    for span in ext.plans[rid].between(start, end):
        if isinstance(span.source, Load):
            places = ext.restorer.places(rid, span.start, span.end)
            blocks = slots[span.start - start : span.end - start : page] // page
            ext.tiers.fill(places, np.ascontiguousarray(blocks))


def coming(
    ext: ExtRuntime, rid: str, start: int, end: int, slots: NDArray[np.int64]
) -> list[Coming]:
    """What of tokens ``start .. end - 1`` is loaded layer by layer, into ``slots`` of theirs."""
    if ext.prefixes is None or ext.tiers is None or rid not in ext.prefixes:
        return []
    held, page = ext.prefixes[rid], ext.tiers.layout.page
    found = []
    for span in ext.plans[rid].between(start, end):
        if isinstance(span.source, LoadOrCompute):
            first, last = span.start // page - held.first, span.end // page - held.first
            blocks = slots[span.start - start : span.end - start : page] // page
            found.append(Coming(span.start, held.pages[first:last], np.ascontiguousarray(blocks)))
    return found


def fill_all(ext: ExtRuntime, held: Mapping[int, Sequence[Coming]]) -> None:
    """Copies all of it, and returns when that is done."""
    for each in held.values():
        for one in each:
            if ext.tiers is not None:
                ext.tiers.fill(one.pages, one.blocks)


def release(ext: ExtRuntime, rid: str) -> None:
    """The request's prefill has ended, or it does not come to it."""
    if ext.restorer is None or ext.prefixes is None:
        return
    if rid == ext.interrupted:
        ext.plans.pop(rid, None)
        return
    if rid in ext.prefixes:
        _ended_within(ext, ext.prefixes[rid])
    if rid in ext.prefixes or ext.restorer.restores(rid):
        ext.plans.pop(rid, None)
    ext.prefixes.release(rid)
    ext.restorer.release(rid)


def computes_from(batch: Any, tokens: int) -> int | None:
    """Where the forward of SGLang's ``ScheduleBatch`` begins, if all that it does is to compute
    ``tokens`` consecutive ones of one prompt; None if not."""
    ext = runtime.current
    if ext is None or ext.restorer is None or len(batch.reqs) != 1:
        return None
    if tokens != batch.extend_num_tokens or (ext.prefixes and batch.reqs[0].rid in ext.prefixes):
        return None
    if batch.hicache_consumer_index >= 0:
        return None  # it waits for host memory as well
    begin: int = batch.prefix_lens[0]
    return begin


def computed(begin: int, tokens: int, seconds: float) -> None:
    """A forward over so many tokens, from ``begin`` on, took so long."""
    if (restorer := _restorer()) is not None:
        restorer.costs.computed(begin, begin + tokens, seconds)


def pending() -> bool:
    """Whether a request waits for a tier."""
    restorer = _restorer()
    return restorer is not None and restorer.pending()


def give_up() -> None:
    """What was being restored is computed."""
    ext = runtime.current
    if ext is not None and ext.restorer is not None and ext.prefixes is not None:
        for rid in (*ext.restorer.clear(), *ext.prefixes.clear()):
            ext.plans.pop(rid, None)


def _count(ext: ExtRuntime, restored: Restored) -> None:
    from sglang.srt.runtime_context import get_observability

    if get_observability().enable_metrics:
        if ext.restore_metrics is None:
            from sgl_ext.engine.restore.metrics import RestoreMetrics

            ext.restore_metrics = RestoreMetrics()
        ext.restore_metrics.count(restored)


def _restorer() -> Restorer | None:
    return None if runtime.current is None else runtime.current.restorer
