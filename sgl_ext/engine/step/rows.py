"""A forward whose rows are the computed spans of its requests.

Rows that alias one request's line of slots see each other as in a sequential run where the prefill
backend writes a layer's new K and V to the pool before it attends. Not every backend does
(FlashInfer's ragged prefill attends first): a start with one that is not known to is refused
(:mod:`~sgl_ext.engine.core.attention_backends`). A row attends to all that lies before it, whoever
put it there; what is not computed simply has no row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from sgl_ext.engine.core.sglang_types import ForwardBatch
from sgl_ext.plan import Compute, PrefillPlan, Span

_PADDING_SLOT = 0
"""Of SGLang's pools; what is written there is never read."""


class Row(NamedTuple):
    """Tokens ``start .. end - 1`` of a batch's request, computed in one go."""

    request: int
    start: int
    end: int
    kept: bool = True
    """Whether their KV is kept; a row that only fills a request's place keeps nothing."""


def rows_of(
    plans: Sequence[PrefillPlan | None], prefixes: Sequence[int], ends: Sequence[int]
) -> list[Row]:
    """The rows of a forward over ``prefixes[i] .. ends[i] - 1`` of each request, in order.

    A request without a plan is computed in one row. SGLang takes a token's logits from each
    request's last row, so one whose part ends in KV from elsewhere has its last token computed
    once more, for nobody.
    """
    rows = []
    for request, (plan, prefix, end) in enumerate(zip(plans, prefixes, ends, strict=True)):
        spans = [Span(prefix, end, Compute())] if plan is None else [*plan.between(prefix, end)]
        for span in spans:
            if isinstance(span.source, Compute):
                rows.append(Row(request, span.start, span.end))
        if not isinstance(spans[-1].source, Compute):
            rows.append(Row(request, end - 1, end, kept=False))
    return rows


def tokens_of(batch: ForwardBatch, rows: Sequence[Row]) -> torch.Tensor:
    """Where the tokens of ``rows`` are among those of ``batch``."""
    prefixes, lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    ends = accumulate(lengths)
    first = [
        end - length - prefix for end, length, prefix in zip(ends, lengths, prefixes, strict=True)
    ]
    return torch.cat(
        [torch.arange(first[row.request] + row.start, first[row.request] + row.end) for row in rows]
    )


def split(batch: ForwardBatch, rows: Sequence[Row]) -> Any:
    """SGLang's ``ForwardBatch`` of ``rows``; shares with ``batch`` what is the same."""
    tokens = tokens_of(batch, rows).to(batch.input_ids.device)
    requests = torch.tensor([row.request for row in rows], device=batch.input_ids.device)
    kept = torch.repeat_interleave(
        torch.tensor([row.kept for row in rows]),
        torch.tensor([row.end - row.start for row in rows]),
    ).to(batch.out_cache_loc.device)

    part = copy.copy(batch)
    part.batch_size = len(rows)
    part.input_ids = batch.input_ids[tokens]
    part.positions = batch.positions[tokens]
    part.out_cache_loc = torch.where(kept, batch.out_cache_loc[tokens], _PADDING_SLOT)
    part.req_pool_indices = batch.req_pool_indices[requests]
    part.req_pool_indices_cpu = _at(batch.req_pool_indices_cpu, requests.cpu())
    part.extend_prefix_lens_cpu = [row.start for row in rows]
    part.extend_seq_lens_cpu = [row.end - row.start for row in rows]
    part.extend_num_tokens = len(tokens)
    part.extend_prefix_lens = batch.extend_prefix_lens.new_tensor(part.extend_prefix_lens_cpu)
    part.extend_seq_lens = batch.extend_seq_lens.new_tensor(part.extend_seq_lens_cpu)
    part.extend_start_loc = (part.extend_seq_lens.cumsum(0) - part.extend_seq_lens).to(
        batch.extend_start_loc.dtype
    )
    ends = [row.end for row in rows]
    part.seq_lens = batch.seq_lens.new_tensor(ends)
    part.seq_lens_cpu = torch.tensor(ends, dtype=batch.seq_lens.dtype)
    part.seq_lens_sum = sum(ends)
    part.orig_seq_lens = _at(batch.orig_seq_lens, requests)
    if batch.replace_positions is not None:
        # Of requests without a plan, all of whose tokens are in a row.
        place = torch.full((len(batch.input_ids),), -1, device=tokens.device)
        place[tokens] = torch.arange(len(tokens), device=tokens.device)
        part.replace_positions = place[batch.replace_positions]
    part.rids = [batch.rids[row.request] for row in rows]
    part.lora_ids = batch.lora_ids and [batch.lora_ids[row.request] for row in rows]
    if batch.num_token_non_padded is not None:
        part.num_token_non_padded = batch.num_token_non_padded.new_tensor(len(tokens))
        part.num_token_non_padded_cpu = len(tokens)
    return part


def handed_over(batch: ForwardBatch, before: Sequence[Row], rows: Sequence[Row], first: Any) -> Any:
    """SGLang's ``ForwardBatch`` of ``rows``, with what some layers have made of their tokens.

    Args:
        batch: what both were split from.
        before: the rows that these layers were given, ``rows`` among them.
        first: the ``ForwardBatch`` of ``before``, after these layers.
    """
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    place = torch.empty(sum(batch.extend_seq_lens_cpu), dtype=torch.int64)
    place[tokens_of(batch, before)] = torch.arange(len(first.input_ids))
    kept = place[tokens_of(batch, rows)].to(first.input_ids.device)
    second = split(batch, rows)
    handoff = residual_batch.export_replay_handoff(first.hidden_states, first)
    residual = None if handoff.residual is None else handoff.residual[kept]
    handoff = handoff._replace(value=handoff.value[kept], residual=residual)
    second.hidden_states = residual_batch.import_replay_handoff(handoff, second)
    return second


class Split(NamedTuple):
    """What a batch of rows does not tell of the requests that it was split from."""

    wholes: list[tuple[int, int]]
    """Of each row: new tokens and context of its request."""
    lengths: list[int]
    """Of each request: tokens that are computed."""
    first_logprobs: list[int]
    """Of each request: how many of these come before the first logprob of the prompt."""

    def put_in(self, metadata: Any, return_logprob: bool) -> None:
        """Has SGLang's ``LogitsMetadata`` of the split batch name requests instead of rows.

        With the logits of every row's last token the matrix product would have another shape, and
        its results other last bits.
        """
        metadata.extend_seq_lens_cpu = self.lengths
        metadata.extend_seq_lens = metadata.extend_seq_lens.new_tensor(self.lengths)
        metadata.extend_logprob_start_lens_cpu = self.first_logprobs
        if return_logprob:
            pairs = zip(self.lengths, self.first_logprobs, strict=True)
            metadata.extend_logprob_pruned_lens_cpu = [length - first for length, first in pairs]
            metadata.extend_return_logprob = any(metadata.extend_logprob_pruned_lens_cpu)


def split_of(batch: ForwardBatch, rows: Sequence[Row]) -> Split:
    """Of ``batch``, which is to be split into ``rows``."""
    count = len(batch.extend_seq_lens_cpu)
    lengths, firsts = [0] * count, [0] * count
    starts = batch.extend_logprob_start_lens_cpu or batch.extend_seq_lens_cpu
    for row in rows:
        lengths[row.request] += row.end - row.start
        position = batch.extend_prefix_lens_cpu[row.request] + starts[row.request]
        firsts[row.request] += _first_logprob(row, position)
    prefixes, new = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    wholes = [(new[row.request], prefixes[row.request] + new[row.request]) for row in rows]
    return Split(wholes, lengths, firsts)


def _first_logprob(row: Row, start: int) -> int:
    """Tokens of the row without a logprob, if the request's begin at position ``start``."""
    length = row.end - row.start
    return min(max(start - row.start, 0), length) if row.kept else length


def _at(values: torch.Tensor | None, requests: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[requests]
