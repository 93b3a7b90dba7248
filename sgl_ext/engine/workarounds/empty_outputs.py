"""Outputs without tokens, of requests that were retracted while a forward of theirs ran.

SGLang sends such an output to the client, and takes it for the first token of the answer.
"""

from __future__ import annotations

from typing import Any

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original


def _accept(original: Original, outputs: Any, *, req: Any) -> None:
    nothing = req.is_retracted and len(req.output_ids) == req.send_token_offset
    if runtime.current is None or not nothing or req.finished():
        original(outputs, req=req)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.output_streamer."
        "_GenerationStreamAccumulator.accept",
        "around",
        _accept,
        "SGLang skips the result of a request that was retracted meanwhile, but not its output",
    ),
)
