"""Forward batches whose rows are the computed spans of requests.

Rows that alias one request's row of slots see each other as in a sequential run if the prefill
backend writes a layer's new K and V to the pool before it attends. Not every backend does
(FlashInfer's ragged prefill attends first). A start with a backend that is not known to do so is
refused (:mod:`~sgl_ext.engine.core.attention_backends`). A row attends to all KV before it,
computed or copied. Tokens that are not computed have no row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.engine.core import attention_backends, hooks
from sgl_ext.engine.core.sglang_types import ForwardBatch, ModelRunner
from sgl_ext.engine.kv.indices import upload
from sgl_ext.planning.plan import Compute, PrefillPlan, Span

_PADDING_SLOT = 0
"""Padding slot of SGLang's pools; KV that is written there is never read."""

_PER_ROW = ("kv_indptr", "qo_indptr", "kv_last_page_len")
"""Attributes of the Triton and FlashInfer backends and of FlashInfer's updater of its prefill:
integer tensors, or lists of such tensors, with an element for each row of a batch, and one more."""


class Row(NamedTuple):
    """Tokens ``start .. end - 1`` of a request of a batch, computed in one pass."""

    request: int
    start: int
    end: int
    kept: bool = True
    """True if the KV is kept; a row that only fills a request's place keeps nothing."""


def rows_of(
    plans: Sequence[PrefillPlan | None], prefixes: Sequence[int], ends: Sequence[int]
) -> list[Row]:
    """Returns the rows of a forward over ``prefixes[i] .. ends[i] - 1`` of each request, in order.

    A request without a plan is computed in one row. SGLang takes a token's logits from the last row
    of each request. If a part ends with KV from elsewhere, its last token is therefore computed
    once more, and the result is not used.
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
    """Returns the indices of the tokens of ``rows`` in ``batch``, int64 ``[tokens]``."""
    prefixes, lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    ends = accumulate(lengths)
    first = [
        end - length - prefix for end, length, prefix in zip(ends, lengths, prefixes, strict=True)
    ]
    return torch.cat(
        [torch.arange(first[row.request] + row.start, first[row.request] + row.end) for row in rows]
    )


def split(batch: ForwardBatch, rows: Sequence[Row]) -> ForwardBatch:
    """Returns SGLang's ``ForwardBatch`` of ``rows``; unchanged fields are shared with ``batch``."""
    device = batch.input_ids.device

    def like(values: Sequence[int], known: torch.Tensor) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=known.dtype), device)

    tokens = upload(tokens_of(batch, rows), device)
    places = torch.tensor([row.request for row in rows])
    requests = upload(places, device)
    kept = torch.repeat_interleave(
        torch.tensor([row.kept for row in rows]),
        torch.tensor([row.end - row.start for row in rows]),
    )

    part = copy.copy(batch)
    part.batch_size = len(rows)
    part.input_ids = batch.input_ids[tokens]
    part.positions = batch.positions[tokens]
    part.out_cache_loc = torch.where(
        upload(kept, device), batch.out_cache_loc[tokens], _PADDING_SLOT
    )
    part.req_pool_indices = batch.req_pool_indices[requests]
    part.req_pool_indices_cpu = _at(batch.req_pool_indices_cpu, places)
    part.extend_prefix_lens_cpu = [row.start for row in rows]
    part.extend_seq_lens_cpu = [row.end - row.start for row in rows]
    part.extend_num_tokens = len(tokens)
    part.extend_prefix_lens = like(part.extend_prefix_lens_cpu, batch.extend_prefix_lens)
    part.extend_seq_lens = like(part.extend_seq_lens_cpu, batch.extend_seq_lens)
    part.extend_start_loc = (part.extend_seq_lens.cumsum(0) - part.extend_seq_lens).to(
        batch.extend_start_loc.dtype
    )
    ends = [row.end for row in rows]
    part.seq_lens = like(ends, batch.seq_lens)
    part.seq_lens_cpu = torch.tensor(ends, dtype=batch.seq_lens.dtype)
    part.seq_lens_sum = sum(ends)
    part.orig_seq_lens = _at(batch.orig_seq_lens, requests)
    if batch.replace_positions is not None:
        # These positions belong to requests without a plan, whose tokens are all in a row.
        place = torch.full((len(batch.input_ids),), -1, device=device)
        place[tokens] = torch.arange(len(tokens), device=device)
        part.replace_positions = place[batch.replace_positions]
    part.rids = [batch.rids[row.request] for row in rows]
    part.lora_ids = batch.lora_ids and [batch.lora_ids[row.request] for row in rows]
    if batch.num_token_non_padded is not None:
        part.num_token_non_padded = like([len(tokens)], batch.num_token_non_padded).view_as(
            batch.num_token_non_padded
        )
        part.num_token_non_padded_cpu = len(tokens)
    return part


@contextmanager
def any_number(runner: ModelRunner, tokens: int) -> Iterator[None]:
    """Lets forwards have more rows than SGLang's buffers, which have one row per running request.

    The batch is not copied to the runner's buffers, and the backend gets longer tensors for the
    time of the forward. Captured graphs keep the addresses of the others.

    Args:
        tokens: maximum rows of a forward.
    """
    from sglang.srt.environ import envs

    copies = envs.SGLANG_EAGER_INPUT_NO_COPY
    short = [
        each
        for each in _per_row(attention_backends.running(runner).prefill)
        if len(each[2]) <= tokens
    ]
    before = copies.get()
    copies.set(True)
    for holder, key, each in short:
        # The first element of a pointer is 0; pages of one token have 1 token in the last page.
        holder[key] = torch.nn.functional.pad(each, (0, tokens + 1 - len(each)), value=1)
    try:
        yield
    finally:
        for holder, key, each in short:
            holder[key] = each
        copies.set(before)


def _per_row(backend: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yields where a prefill backend keeps each tensor of :data:`_PER_ROW`, and the tensor."""
    for owner in (backend, getattr(backend, "indices_updater_prefill", None)):
        for name in _PER_ROW:
            value = getattr(owner, name, None)
            if isinstance(value, list):
                yield from ((value, at, each) for at, each in enumerate(value))
            elif isinstance(value, torch.Tensor):
                yield vars(owner), name, value


def of_positions(request: int, positions: NDArray[np.int64]) -> Iterator[Row]:
    """Yields the rows that compute tokens of a request.

    Args:
        positions: positions of the tokens, ascending, int64 ``[tokens]``; at least one.
    """
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        yield Row(request, int(run[0]), int(run[-1]) + 1)


def handed_over(
    batch: ForwardBatch, before: Sequence[Row], rows: Sequence[Row], first: ForwardBatch
) -> ForwardBatch:
    """Returns SGLang's ``ForwardBatch`` of ``rows``, with the output of some layers.

    Args:
        batch: batch from which both were split.
        before: rows of these layers, ``rows`` among them.
        first: the ``ForwardBatch`` of ``before``, after these layers.
    """
    from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
    from sglang.srt.layers.layer_boundary.residual.batch import to_pp
    from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

    place = torch.empty(sum(batch.extend_seq_lens_cpu), dtype=torch.int64)
    place[tokens_of(batch, before)] = torch.arange(len(first.input_ids))
    kept = upload(place[tokens_of(batch, rows)], first.input_ids.device)
    second = split(batch, rows)
    # As between two stages of a pipeline: the next layer adds the residual to the output.
    passed = to_pp(first.hidden_states, first).tensors
    passed = {name: tensor[kept] for name, tensor in passed.items()}
    second.hidden_states, second.residual_stream = ResidualStream.from_handoff(
        passed["hidden_states"], passed.get("residual"), PLAIN_ADD
    )
    return second


class Split(NamedTuple):
    """Properties of the requests of a forward that the batch of their rows does not contain."""

    wholes: list[tuple[int, int]]
    """New tokens and context length of the request of each row."""
    lengths: list[int]
    """Number of computed tokens of each request."""
    first_logprobs: list[int]
    """Number of these tokens before the first logprob of the prompt, for each request."""

    def put_in(self, metadata: Any, return_logprob: bool) -> None:
        """Makes SGLang's ``LogitsMetadata`` of the split batch refer to requests instead of rows.

        With the logits of every row's last token, the matrix product would have another shape, and
        its results would differ in the last bits.
        """
        metadata.extend_seq_lens_cpu = self.lengths
        known = metadata.extend_seq_lens
        metadata.extend_seq_lens = upload(
            torch.tensor(self.lengths, dtype=known.dtype), known.device
        )
        metadata.extend_logprob_start_lens_cpu = self.first_logprobs
        if return_logprob:
            pairs = zip(self.lengths, self.first_logprobs, strict=True)
            metadata.extend_logprob_pruned_lens_cpu = [length - first for length, first in pairs]
            metadata.extend_return_logprob = any(metadata.extend_logprob_pruned_lens_cpu)


def split_of(batch: ForwardBatch, rows: Sequence[Row]) -> Split:
    """Returns the :class:`Split` of ``batch``, which is to be split into ``rows``."""
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
    """Returns the number of tokens of the row before the first logprob, at position ``start``."""
    length = row.end - row.start
    return min(max(start - row.start, 0), length) if row.kept else length


def _at(values: torch.Tensor | None, requests: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[requests]


_LOAD_BATCH = "sglang.srt.model_executor.runner.eager_runner.EagerRunner.load_batch"
_COPIES = "SGLANG_EAGER_INPUT_NO_COPY"
SEAMS = (hooks.Seam(f"{_COPIES} in {_LOAD_BATCH}", hooks.uses(_LOAD_BATCH, "envs", _COPIES)),)
"""Option of SGLang that :func:`any_number` sets for a forward."""
