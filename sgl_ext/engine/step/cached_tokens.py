"""Counts of tokens from tiers in ``cached_tokens`` of an answer and in its details.

SGLang counts the prefix with which a part of a prompt begins. Restored tokens lie behind this
prefix, so SGLang counts them as computed.
"""

from __future__ import annotations

from collections import Counter

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.meta_info import told
from sgl_ext.engine.core.sglang_types import Req

_RESTORED = "_sgl_ext_restored"
"""Attribute of SGLang's ``Req`` that holds the number of restored tokens by tier."""
_REACHED = "_sgl_ext_reached"
"""Attribute of SGLang's ``Req`` that holds the end of the prompt's prefilled parts, in tokens."""


def first_time(req: Req, start: int, end: int) -> tuple[int, int]:
    """Returns the range of those tokens ``start .. end - 1`` that are prefilled for the first time.

    The range contains tokens of the prompt only, and a retracted request counts no token twice. It
    may be empty: its start may lie behind its end.
    """
    return max(start, getattr(req, _REACHED, 0)), min(end, len(req.origin_input_ids))


def reach(req: Req, end: int) -> None:
    """Records that the request's prompt has been prefilled up to token ``end``."""
    setattr(req, _REACHED, max(end, getattr(req, _REACHED, 0)))


def count(req: Req, tier: str, tokens: int) -> None:
    """Counts tokens of the request's prompt that were restored from a tier."""
    if tokens <= 0:
        return
    if (restored := getattr(req, _RESTORED, None)) is None:
        setattr(req, _RESTORED, restored := Counter())
    restored[tier] += tokens
    req.cached_tokens += tokens


def _name_tiers(
    details: dict[str, int] | None, _streamer: object, req: Req
) -> dict[str, int] | None:
    """Names the tiers of the tokens in ``cached_tokens_details``; SGLang knows ``host`` only."""
    restored: Counter[str] = getattr(req, _RESTORED, None) or Counter()
    if details is None:
        return None
    known = req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage
    if not any(known):  # SGLang counts all cached tokens as device tokens
        details = {**details, "device": req.cached_tokens - restored.total()}
    if entries := told(req, "tiers"):
        # SGLang reports the first prefill only, without tokens that a retracted request loads
        # later.
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
