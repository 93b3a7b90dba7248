"""CacheBlend within a forward: the first layers select the tokens that the others recompute.

The first layers compute all tokens of the requests that have candidates. Source: CacheBlend
(EuroSys 2025), §4.3, with a single selection, after layer 1, as in the comparison of EPIC §4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.chunks.methods import BLEND_LAYERS
from sgl_ext.engine.kv.indices import Download, upload
from sgl_ext.engine.step.layerwise import Layers, first_rows, layer_by_layer
from sgl_ext.engine.step.rows import Row, of_positions

if TYPE_CHECKING:
    from sgl_ext.engine.step.forward import PlannedForward


class Candidates(NamedTuple):
    """Linked tokens of a request, some of which are selected and recomputed."""

    positions: NDArray[np.int64]
    """Positions of the tokens in the prompt, ascending, int64 ``[tokens]``."""
    wanted: int
    """Number of tokens to select."""


@contextmanager
def blending(
    planned: PlannedForward,
    parts: Sequence[Row],
    candidates: Mapping[int, Candidates],
) -> Iterator[list[Row]]:
    """Replaces the model's next forward by one that continues with selected tokens only.

    Args:
        planned: forward whose linked KV is in place.
        parts: rows that are computed without blending.
        candidates: candidates of each request, by the request's index in the batch.

    Yields:
        Rows that the forward must begin with.
    """
    runner, batch = planned.runner, planned.batch
    prefixes, lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    begin = first_rows(planned, candidates, parts)
    pool = runner.token_to_kv_pool.get_value_buffer(BLEND_LAYERS - 1)
    starts = np.cumsum([0, *lengths])
    slots = {}
    for at, each in candidates.items():
        tokens = torch.from_numpy(starts[at] + each.positions - prefixes[at])
        slots[at] = batch.out_cache_loc[upload(tokens, batch.out_cache_loc.device)]
    linked = {at: pool[each].clone() for at, each in slots.items()}

    def run(first: Layers) -> object:
        first.run(0, BLEND_LAYERS)
        rest = [part for part in parts if part.request not in candidates]
        chosen = {}
        for at, each in candidates.items():
            changed = (pool[slots[at]].float() - linked[at].float()).square().sum((1, 2))
            chosen[at] = Download(changed.topk(each.wanted).indices)
        for at, each in candidates.items():
            selected = each.positions[chosen[at].numpy()]
            rest += _joined(at, [part for part in parts if part.request == at], selected)
        rest.sort()
        with planned.cutting_over(begin, rest, first.batch) as second:
            return Layers(runner.model, second).run(
                BLEND_LAYERS, runner.model.config.num_hidden_layers
            )

    with layer_by_layer(planned, run):
        yield begin


def _joined(request: int, parts: Sequence[Row], chosen: NDArray[np.int64]) -> Iterator[Row]:
    """Yields the rows that compute the tokens of ``parts`` and the tokens at ``chosen``.

    A part that is not kept is omitted if its token is among them.
    """
    computed = [np.arange(part.start, part.end) for part in parts if part.kept]
    positions = np.sort(np.concatenate([chosen, *computed]))
    yield from of_positions(request, positions)
    for part in parts:
        if not part.kept and part.start != positions[-1]:
            yield part
