"""Counts tokens that came from tiers in an answer's ``cached_tokens`` and their details.

SGLang counts the prefix that a part of a prompt begins with. What is restored lies behind it: its
tokens are part of what SGLang takes for computed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.meta_info import told
from sgl_ext.engine.core.sglang_types import Req

_RESTORED = "_sgl_ext_restored"
"""Attribute of SGLang's ``Req``: tokens that were restored, by tier."""
_REACHED = "_sgl_ext_reached"
"""Attribute of SGLang's ``Req``: the end of the parts of its prompt that were prefilled so far."""


def first_time(req: Req, start: int, end: int) -> tuple[int, int]:
    """Returns the range of those of tokens ``start .. end - 1`` that belong to the prompt and are
    prefilled for the first time, so that a retracted request counts none twice. It may be empty:
    begin beyond its end."""
    return max(start, getattr(req, _REACHED, 0)), min(end, len(req.origin_input_ids))


def reach(req: Req, end: int) -> None:
    """Notes that the request's prompt has been prefilled up to token ``end``."""
    setattr(req, _REACHED, max(end, getattr(req, _REACHED, 0)))


def count(req: Req, tier: str, tokens: int) -> None:
    """Counts tokens of the request's prompt that were restored from a tier."""
    if tokens <= 0:
        return
    if (restored := getattr(req, _RESTORED, None)) is None:
        setattr(req, _RESTORED, restored := Counter())
    restored[tier] += tokens
    req.cached_tokens += tokens


def _name_tiers(details: dict[str, Any] | None, _streamer: Any, req: Req) -> dict[str, Any] | None:
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
