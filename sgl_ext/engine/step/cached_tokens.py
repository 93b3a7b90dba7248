"""Counts tokens that came from tiers in an answer's ``cached_tokens`` and their details.

SGLang counts the prefix that a part of a prompt begins with. What is restored lies behind it: its
tokens are part of what SGLang takes for computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.meta_info import told
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.plan import Load, PrefillPlan
from sgl_ext.restore.restorer import Restorer

if TYPE_CHECKING:
    from sgl_ext.engine.restore.turn import Coming

_RESTORED = "_sgl_ext_restored"
"""Attribute of SGLang's ``Req``: tokens that were restored, by tier."""
_REACHED = "_sgl_ext_reached"
"""Attribute of SGLang's ``Req``: the end of the parts of its prompt that were prefilled so far."""


def count_loaded(plan: PrefillPlan, restorer: Restorer, req: Any) -> None:
    """Counts what the next part of a request takes from what tiers have loaded."""
    begin, end = _first_time(req, req.prefix_len, req.extend_end)
    if begin < end:
        for span in plan.between(begin, end):
            if isinstance(span.source, Load):
                for tier, tokens in restorer.tiers(req.rid, span.start, span.end).items():
                    _count(req, tier, tokens)
    _reach(req, req.extend_end)


def computed_within(ext: ExtRuntime, coming: Mapping[str, Sequence[Coming]]) -> dict[str, int]:
    """Tokens that forwards have computed so far of what host memory has of these requests."""
    return {rid: 0 if ext.prefixes is None else ext.prefixes[rid].computed for rid in coming}


def count_within(
    ext: ExtRuntime, coming: Mapping[str, Sequence[Coming]], before: Mapping[str, int]
) -> None:
    """Counts what a forward has taken from host memory.

    Args:
        before: what :func:`computed_within` returned before the forward.
    """
    if ext.prefixes is None or ext.tiers is None:
        return
    page = ext.tiers.layout.page
    for rid, each in coming.items():
        held = ext.prefixes[rid]
        tokens = sum(len(one.pages) for one in each) * page - (held.computed - before[rid])
        end = each[-1].start + len(each[-1].pages) * page
        begin, end = _first_time(held.request, each[0].start, end)
        _count(held.request, "host", min(tokens, end - begin))
        _reach(held.request, end)


def _first_time(req: Any, start: int, end: int) -> tuple[int, int]:
    """The tokens of ``start .. end - 1`` that belong to the prompt and are prefilled for the first
    time, so that a retracted request counts none twice; there may be none."""
    return max(start, getattr(req, _REACHED, 0)), min(end, len(req.origin_input_ids))


def _reach(req: Any, end: int) -> None:
    setattr(req, _REACHED, max(end, getattr(req, _REACHED, 0)))


def _count(req: Any, tier: str, tokens: int) -> None:
    if tokens <= 0:
        return
    if (restored := getattr(req, _RESTORED, None)) is None:
        setattr(req, _RESTORED, restored := Counter())
    restored[tier] += tokens
    req.cached_tokens += tokens


def _name_tiers(details: dict[str, Any] | None, _streamer: Any, req: Any) -> dict[str, Any] | None:
    """``cached_tokens_details`` says which tier had the tokens; SGLang knows ``host`` only."""
    restored: Counter[str] = getattr(req, _RESTORED, None) or Counter()
    if details is None:
        return None
    known = req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage
    if not any(known):  # SGLang takes all cached tokens for those of the device
        details = {**details, "device": req.cached_tokens - restored.total()}
    if entries := told(req, "tiers"):
        # SGLang tells of the first prefill only; what a retracted request loads later is not in it.
        first = {name: source["tokens"] for name, source in entries[0]["sources"].items()}
        if sum(first.values()) == details["host"]:
            details = {**details, "host": 0, **first}
    return {**details, **{tier: details.get(tier, 0) + more for tier, more in restored.items()}}


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.output_streamer."
        "SchedulerOutputStreamer.get_cached_tokens_details",
        "after",
        _name_tiers,
        "SGLang reports every hit of an external cache as host memory",
    ),
)
