"""Several stored contexts that a request follows, one behind the other.

The KV of each context was computed as that of a text of its own, at positions from 0. A later
context keeps it: instead of its keys, the queries are rotated by the number of tokens before it.
Its first token is left out.
The attention to each context and that to the request's own tokens are computed separately, and are
merged by the log-sum-exps of their logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from sgl_ext._native import _attention
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.own import Own, OwnTokensError
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.engine.kv.rope import embedding_of, rope_of
from sgl_ext.errors import ExtError
from sgl_ext.memory.rope import Rope

_TRIALS = ((5, 3), (2000, 1500))
"""Positions of trial queries, and tokens before the context that they attend to."""
_ROUNDING = 0.05
"""Maximum error of a trial query, relative to the largest element. A rotated query is rounded twice
in bfloat16; a wrong angle changes all of it."""


class JoinedContexts:
    """Contexts that the requests of one forward follow together.

    Args:
        contexts: the contexts, in the order of their positions.
        rope: rotary embedding of the model.
        scale: scale of the logits.
    """

    def __init__(self, contexts: Sequence[StoredAttention], rope: Rope, scale: float) -> None:
        self._contexts, self._rope, self._scale = contexts, rope, scale
        self._before = [0, *itertools.accumulate(each.tokens for each in contexts[:-1])]
        """Number of tokens before each context."""
        self._reached = contexts[0]
        """Context that was attended to last."""
        self._lines: tuple[torch.Tensor, _attention.Batch] | None = None
        """Slots of the requests' own tokens, and the batch of the rows' attention to these."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all contexts."""
        return sum(each.tokens for each in self._contexts)

    @property
    def failed(self) -> str:
        """See :class:`~sgl_ext.engine.clusters.attended.Attended`. An assignment concerns the
        context that was attended to last."""
        return self._reached.failed

    @failed.setter
    def failed(self, why: str) -> None:
        self._reached.failed = why

    def attend(
        self,
        native: NativeAttention,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: Own,
        share: float,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`Attended.attend <sgl_ext.engine.clusters.attended.Attended.attend>`.

        Each row is given the same share of the blocks of each context.
        """
        parts, weights = [], []

        def room() -> torch.Tensor:
            weights.append(torch.empty(query.shape[:2], dtype=torch.float32))
            return weights[-1]

        if len(own.slots):
            batch = self._batch_of(own)
            parts.append(native.attend(batch, query, keys, values, scale=self._scale, sums=room()))
            own = Own.elsewhere(len(query))._replace(sums=weights[0].numpy())
            if not torch.isfinite(parts[0]).all():
                raise OwnTokensError(
                    f"the attention of layer {layer} to the request's own tokens is not finite"
                )
        nothing = keys[:0], values[:0]
        for context, turned in self._each(query):
            parts.append(context.attend(native, layer, turned, *nothing, own, share, room()))
        sizes = torch.stack(weights)
        if sums is not None:
            torch.logsumexp(sizes, 0, out=sums)
        shares = sizes.softmax(0).unsqueeze(-1)
        return (shares * torch.stack(parts).float()).sum(0).to(query.dtype)

    def prefetch(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        own: Own,
        share: float,
        times: float,
    ) -> None:
        """See :meth:`Attended.prefetch <sgl_ext.engine.clusters.attended.Attended.prefetch>`.

        Own tokens with slots do not count in the selection.
        """
        own = Own.elsewhere(len(query))._replace(sums=own.sums)
        for context, turned in self._each(query):
            context.prefetch(layer, turned, keys[:0], own, share, times)

    def close(self) -> None:
        """Does nothing: whoever has opened the contexts closes them."""

    def _each(self, query: torch.Tensor) -> Iterator[tuple[StoredAttention, torch.Tensor]]:
        """Yields each context, and the queries that its keys see behind it."""
        for context, before in zip(self._contexts, self._before, strict=True):
            self._reached = context
            if before:
                yield context.behind(), turned(query, -before, self._rope)
            else:
                yield context, query

    def _batch_of(self, own: Own) -> _attention.Batch:
        """Returns the batch of rows that attend to their own tokens."""
        if self._lines is None:
            lines, lengths, new = own.lines()
            table = torch.from_numpy(lines)
            self._lines = table, batch_of(table, range(len(lines)), lengths, new)
        return self._lines[1]


def turned(states: torch.Tensor, by: int, rope: Rope) -> torch.Tensor:
    """Returns queries or keys ``[rows, heads, head_dim]`` at positions that differ by ``by``.

    Computed in float32 and rounded once.
    """
    cosines, sines = (torch.from_numpy(each)[0] for each in rope.waves([by]))
    size = rope.rotary_dim
    pairs = states[..., :size].float()
    if rope.interleaved:
        first, second = pairs[..., ::2], pairs[..., 1::2]
    else:
        first, second = pairs.chunk(2, -1)
    found = first * cosines - second * sines, second * cosines + first * sines
    both = torch.stack(found, -1).flatten(-2) if rope.interleaved else torch.cat(found, -1)
    return torch.cat([both.to(states.dtype), states[..., size:]], -1)


def verified_rope(model: torch.nn.Module) -> Rope | ExtError:
    """Returns the rotary embedding of a model, after trial rotations of queries.

    Returns:
        An error if queries of the model cannot be rotated to another position.
    """
    try:
        embedding = embedding_of(model)
        rope = rope_of(embedding)
    except ExtError as error:
        return error
    table = embedding.cos_sin_cache
    chance = torch.Generator().manual_seed(0)
    query = torch.randn(1, embedding.head_size, generator=chance).to(table.device)
    for trial, behind in _TRIALS:
        end = min(trial, len(table) - 1)
        start = max(end - behind, 0)
        there, expected = (
            embedding(torch.tensor([at], device=table.device), query.clone(), query.clone())[0]
            for at in (end, start)
        )
        found = turned(there.float().cpu().view(1, 1, -1), start - end, rope).view(1, -1)
        off = float((found - expected.float().cpu()).abs().max() / expected.abs().max())
        if not off <= _ROUNDING:
            return ExtError(
                f"queries rotated from position {end} to {start} differ by {off:.2g} from those "
                f"that the model computes there (rounding is below {_ROUNDING})"
            )
    return rope
