"""Attention of one row of a batch on the CPU, at a cost of new tokens times context.

torch's CPU kernel supports only a causal mask that starts at the first key. For new tokens behind a
cached prefix, stock SGLang therefore pads the query to the whole sequence. Here the query is not
padded, and a lower-right causal mask is passed. That mask depends only on the distance from the
sequence's end, so that one band serves every row, block and layer as a view of its corner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 512
"""Maximum new tokens per kernel call. Bounds the masked-out work and the mask, both BLOCK wide."""


@dataclass
class CausalBand:
    """Additive masks ``[<= BLOCK, context]`` for the last tokens of a sequence, grown on demand."""

    _bands: dict[tuple[torch.dtype, int | None], torch.Tensor] = field(default_factory=dict)

    def mask(self, rows: int, context: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """Returns the mask ``[rows, context]``: row ``r`` sees keys up to ``context - rows + r``.

        With ``window`` it sees no key more than ``window`` tokens before itself, as SGLang counts a
        sliding window.
        """
        band = self._bands.get((dtype, window))
        if band is None or band.shape[1] < context:
            band = self._bands[dtype, window] = self._build(context, dtype, window)
        return band[BLOCK - rows :, band.shape[1] - context :]

    @staticmethod
    def _build(context: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        # The width is a power of two, so that a growing conversation rebuilds the band a
        # logarithmic number of times.
        width = max(BLOCK, 1 << (context - 1).bit_length())
        row = torch.arange(BLOCK).unsqueeze(1) + (width - BLOCK)
        key = torch.arange(width)
        hidden = key > row
        if window is not None:
            hidden |= key < row - window
        return torch.zeros(BLOCK, width, dtype=dtype).masked_fill_(hidden, float("-inf"))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    band: CausalBand,
    *,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Returns the causal attention of the last ``new`` tokens of a sequence over all of it.

    Args:
        query: ``[new, heads, head_dim]``.
        keys: ``[context, kv_heads, head_dim]``, in sequence order, including the new tokens.
        values: ``[context, kv_heads, value_dim]``.
        scale: factor of the logits; None is ``head_dim ** -0.5``.
        window: number of preceding tokens whose keys are not masked; None masks no preceding key.

    Returns:
        ``[new, heads, value_dim]``.
    """
    new, heads, _ = query.shape
    context, kv_heads, _ = keys.shape
    if new == context and (window is None or context <= window):
        return _grouped(query, keys, values, scale=scale, is_causal=True)
    if new == 1:
        first = 0 if window is None else max(0, context - 1 - window)
        # The queries of a KV head's group become rows of one matrix; one token needs no mask.
        folded = query.view(1, kv_heads, heads // kv_heads, -1)
        out = scaled_dot_product_attention(
            folded,
            keys[first:].transpose(0, 1).unsqueeze(0),
            values[first:].transpose(0, 1).unsqueeze(0),
            scale=scale,
        )
        return out.view(1, heads, -1)
    out = query.new_empty(new, heads, values.shape[-1])
    for start in range(0, new, BLOCK):
        end = min(start + BLOCK, new)
        last = context - new + end
        first = 0 if window is None else max(0, context - new + start - window)
        mask = band.mask(end - start, last - first, query.dtype, window)
        out[start:end] = _grouped(
            query[start:end], keys[first:last], values[first:last], scale=scale, attn_mask=mask
        )
    return out


def _grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Returns torch's attention with KV heads as batch: a group shares its keys without a copy."""
    new, heads, _ = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = scaled_dot_product_attention(
        query.view(new, kv_heads, group, -1).permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
        values.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=attn_mask,
        scale=scale,
        is_causal=is_causal,
    )
    return out.permute(2, 0, 1, 3).reshape(new, heads, -1)
