"""Reports of the powers on a request, in ``meta_info.ext`` of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import Req

_EXT = "ext"


def tell(req: Req, entry: Mapping[str, Any]) -> None:
    """Adds ``entry``, which names its ``power``, to the report in the request's answer."""
    req.customized_info = req.customized_info or {}
    req.customized_info.setdefault(_EXT, []).append(entry)


def told(req: Req, power: str) -> list[Mapping[str, Any]]:
    """Returns the entries that ``power`` has added to the request's report so far."""
    return [entry for entry in (req.customized_info or {}).get(_EXT, ()) if entry["power"] == power]


def _once(original: Original, streamer: object, key: str) -> object:
    """Has SGLang return ``ext`` once per response instead of once per token."""
    return key == _EXT or original(streamer, key)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.output_streamer."
        "SchedulerOutputStreamer.is_request_level_customized_info_key",
        "around",
        _once,
        "SGLang treats what a request adds to its meta_info as one value per token, unless a "
        "subclass of the streamer, which the scheduler chooses itself, overrides this",
    ),
)
