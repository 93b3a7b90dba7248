"""Check that the keys of the served model can be moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sgl_ext.engine.chunks.moves import Move, Moves, moves_of
from sgl_ext.engine.core import hooks
from sgl_ext.engine.kv import rope
from sgl_ext.errors import ExtError
from sgl_ext.memory.rope import Rope
from sgl_ext.memory.slab import Layout

_MOVES = ((0, 1), (3, 700), (1500, 20))
"""Source and target positions of the trial moves of a key."""
_ROUNDING = 0.05
"""Maximum error of a trial move, relative to the largest element. A moved key is rounded twice in
bfloat16; a wrong angle changes all of it."""


def verified_rope(model: torch.nn.Module, layout: Layout) -> Rope:
    """Returns the embedding by which the model's KV is moved, after trial moves on its device.

    Raises:
        ActivationError: the model's keys cannot be moved by one rotation, the kernel does not
            support the layout, or a trial move differs from the key that the model computes there.
    """
    with _refused():
        embedding = rope.embedding_of(model)
        found = rope.rope_of(embedding)
    device = embedding.cos_sin_cache.device
    shape = (1, 2, layout.layers, 2, layout.kv_heads, layout.head_dim)
    slab = torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=device)
    try:
        move = moves_of(layout, found, slab)
    except ValueError as error:
        raise hooks.ActivationError(
            f"chunks do not support this KV layout: {error}; remove the chunks section"
        ) from None
    longest = len(embedding.cos_sin_cache) - 1
    for start, end in ((min(start, longest), min(end, longest)) for start, end in _MOVES):
        off = _error_of(embedding, slab, move, start, end)
        if not off <= _ROUNDING:
            raise hooks.ActivationError(
                f"keys moved from position {start} to {end} differ by {off:.2g} from the keys "
                f"that the model computes there (rounding is below {_ROUNDING}), so this model "
                "cannot be served with chunks; remove the chunks section"
            )
    return found


def require_architecture(name: str) -> None:
    """Raises ActivationError for a model class whose layers may rotate keys differently."""
    with _refused():
        rope.require_architecture(name)


@contextmanager
def _refused() -> Iterator[None]:
    """Raises ActivationError where a block of code raises ExtError."""
    try:
        yield
    except ExtError as error:
        raise hooks.ActivationError(f"chunks: {error}; remove the chunks section") from None


def _error_of(embedding: Any, slab: torch.Tensor, move: Moves, start: int, end: int) -> float:
    """Returns the largest error of a token's KV that is moved from ``start`` to ``end``, relative
    to its largest element.

    Args:
        slab: memory of two tokens, ``[1, 2, layers, 2, kv_heads, head_dim]``.
        move: moves within ``slab``.
    """
    layers, _, kv_heads, head_dim = slab.shape[2:]
    chance = torch.Generator().manual_seed(start)
    key = torch.randn(1, kv_heads * head_dim, generator=chance).to(slab)

    def cached(position: int) -> torch.Tensor:
        """Returns the KV of one token in every layer; V is the key before its rotation."""
        positions = torch.tensor([position], device=slab.device)
        _, keys = embedding(positions, key.clone(), key.clone())
        return torch.stack([keys.view(-1), key.view(-1)]).repeat(layers, 1).view(slab.shape[2:])

    slab[0, 0], right, first = cached(start), cached(end), np.zeros(1, np.int64)
    slots = torch.zeros(1, dtype=torch.int64, device=slab.device)
    move([Move(slots, first[:0], first, first + 1, end - start)])
    return float((slab[0, 1] - right).abs().max() / right.abs().max())
