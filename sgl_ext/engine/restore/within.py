"""A forward over prefixes that host memory has: each by the strategy that was chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.restore import by_layers as layer_restore
from sgl_ext.engine.restore import by_tokens as token_restore
from sgl_ext.engine.restore.turn import Coming
from sgl_ext.engine.step.rows import Row
from sgl_ext.restore.host_prefixes import Strategy


@contextmanager
def restoring(
    ext: ExtRuntime,
    runner: Any,
    batch: Any,
    parts: list[Row],
    coming: Mapping[int, Sequence[Coming]],
    forward: Callable[[Any], object],
) -> Iterator[list[Row]]:
    """Computes first tokens at once, and has the model's next forward compute lower layers.

    Args:
        runner: SGLang's ``ModelRunner``.
        batch: SGLang's ``ForwardBatch``.
        parts: the rows that are computed whatever is loaded.
        coming: by the request's place in the batch.
        forward: SGLang's own, of a ``ForwardBatch``.

    Yields:
        The rows that the forward has to begin with.
    """
    if ext.tiers is None or ext.restorer is None or ext.prefixes is None:
        raise RuntimeError("what is loaded comes from tiers, and there are none")
    layered = hasattr(runner.model, "forward_split_prefill")
    ways: dict[Strategy, dict[int, Sequence[Coming]]] = {each: {} for each in Strategy}
    for at, each in coming.items():
        by = ext.prefixes[batch.rids[at]].by if layered else Strategy.TOKENS
        ways[by][at] = each
    if by_tokens := ways[Strategy.TOKENS]:
        costs, loaded, page = ext.restorer.costs, ext.tiers.loaded, ext.tiers.layout.page
        share = 0.5
        if loaded.pages:
            loading = loaded.seconds / loaded.pages / page
            share = loading / (loading + costs.compute.seconds(0, costs.chunk) / costs.chunk)
        computed = token_restore.restore(ext.tiers, batch, by_tokens, costs.chunk, share, forward)
        for at, tokens in computed.items():
            ext.prefixes.computed(batch.rids[at], tokens)
    if by_layers := ways[Strategy.LAYERS]:
        with layer_restore.restoring(
            ext, ext.tiers, ext.prefixes, runner, batch, parts, by_layers
        ) as begin:
            yield begin
    else:
        yield parts
