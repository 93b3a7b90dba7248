"""Selection of the tokens to recompute by the attention of the text behind the chunks.

A first forward computes that text over the linked KV. The linked tokens that its last tokens attend
to most are recomputed, together with the text, by the forward that follows. Tokens that distract
from the answer are thereby computed in view of the other chunks. An observation window at the end
of the prompt and averages over neighbours are those of SnapKV (Li et al., NeurIPS 2024), which
selects KV to keep by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sgl_ext.engine.chunks.blend import Candidates
from sgl_ext.engine.core.attention_backends import attention_layers
from sgl_ext.engine.kv.indices import Download, upload
from sgl_ext.engine.step import rows
from sgl_ext.engine.step.rows import Row

if TYPE_CHECKING:
    from sgl_ext.engine.step.forward import PlannedForward

_ASKING = 8
"""Last tokens of a prompt whose attention selects."""
_WINDOW = 9
"""Tokens over which attention is averaged, so that whole phrases are selected; an odd number."""


def with_selected(
    planned: PlannedForward, parts: Sequence[Row], queried: Mapping[int, tuple[Candidates, int]]
) -> list[Row]:
    """Runs a first forward, and returns ``parts`` and the rows of the selected tokens, in order.

    Args:
        planned: forward whose linked KV is in place.
        parts: rows that are computed in any case.
        queried: candidates, and the number of tokens of the prompt, of each request, by the
            request's index in the batch.
    """
    first = [part for part in parts if part.request in queried]
    asking, begin = dict[int, _Attention](), 0
    for row in first:
        # A request that was preempted goes on with its answer in a row behind the prompt.
        if row.start < (end := queried[row.request][1]) <= row.end:
            asking[row.request] = _Attention(planned, row.request, row, end, begin)
        begin += row.end - row.start
    batch = rows.split(planned.batch, first)
    batch.return_logprob = False
    with _observed(planned, [*asking.values()]):
        planned.run(batch)
    chosen = {at: Download(each.most(queried[at][0])) for at, each in asking.items()}
    found = list(parts)
    for at, numbers in chosen.items():
        positions = queried[at][0].positions[numbers.numpy()]
        positions.sort()
        found += rows.of_positions(at, positions)
    return sorted(found)


class _Attention:
    """Attention of the last tokens of a prompt, summed over the layers.

    Args:
        at: place of the request in the batch.
        row: row that has the last token of the prompt.
        end: number of tokens of the prompt.
        begin: place of the row's first token in the batch of the rows.
    """

    def __init__(self, planned: PlannedForward, at: int, row: Row, end: int, begin: int) -> None:
        table = planned.runner.req_to_token_pool.req_to_token
        self._slots = table[planned.row(at), :end].long()
        count = min(end - row.start, _ASKING)
        last = begin + end - row.start
        self._last = slice(last - count, last)
        positions = torch.arange(end, device=self._slots.device)
        self._later = positions[None] > positions[end - count :, None]
        self._sum = torch.zeros(end, device=self._slots.device)

    def add(self, layer: Any, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Adds the largest attention of any head and of any of the last tokens, in one layer.

        Args:
            layer: SGLang's ``RadixAttention`` of the layer.
            queries: queries of the batch of the rows, ``[tokens, heads * head_dim]``.
            keys: keys of the layer in the KV pool, ``[slots, KV heads, head_dim]``.
        """
        of_prompt = keys[self._slots].float()
        count, groups, width = len(self._later), of_prompt.shape[1], of_prompt.shape[2]
        asking = queries[self._last].reshape(count, groups, -1, width).float()
        scores = torch.einsum("ngrd,tgd->grnt", asking, of_prompt) * layer.scaling
        scores.masked_fill_(self._later, float("-inf"))
        self._sum += scores.softmax(-1).amax((0, 1, 2))

    def most(self, candidates: Candidates) -> torch.Tensor:
        """Returns the numbers of the candidates with the most attention in their window."""
        smooth = torch.nn.functional.avg_pool1d(
            self._sum[None], _WINDOW, 1, _WINDOW // 2, count_include_pad=False
        )[0]
        device = smooth.device
        of_candidates = smooth[upload(torch.from_numpy(candidates.positions), device)]
        return of_candidates.topk(candidates.wanted).indices


@contextmanager
def _observed(planned: PlannedForward, asking: Sequence[_Attention]) -> Iterator[None]:
    """Has every layer's attention observed after it has stored its keys."""
    runner = planned.runner
    pool = runner.token_to_kv_pool

    def observe(layer: Any, arguments: tuple[torch.Tensor, ...], _output: object) -> None:
        keys = pool.get_key_buffer(layer.layer_id)
        for each in asking:
            each.add(layer, arguments[0], keys)

    hooked = [each.register_forward_hook(observe) for each in attention_layers(runner.model)]
    try:
        yield
    finally:
        for each in hooked:
            each.remove()
