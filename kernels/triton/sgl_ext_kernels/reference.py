"""Reference implementations of the operations of ``slab`` in plain torch, to test the kernels.

They work on any device, take index tensors instead of ``Rows``, and validate nothing.
"""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def gather_groups(slab: torch.Tensor, runs: Pair, out: torch.Tensor) -> None:
    """Copies block groups to ``out``; see ``slab.gather_groups``."""
    at = 0
    for start, blocks in zip(runs[0].tolist(), runs[1].tolist(), strict=True):
        _bytes(out)[at : at + blocks] = _bytes(slab)[start : start + blocks].view(
            blocks, *_bytes(out).shape[1:]
        )
        at += blocks


def scatter_groups(staging: torch.Tensor, slab: torch.Tensor, runs: Pair) -> None:
    """Copies ``staging`` to block groups; see ``slab.scatter_groups``."""
    at = 0
    for start, blocks in zip(runs[0].tolist(), runs[1].tolist(), strict=True):
        part = _bytes(staging)[at : at + blocks]
        _bytes(slab)[start : start + blocks] = part.view(blocks, *_bytes(slab).shape[1:])
        at += blocks


def gather_layer(slab: torch.Tensor, blocks: torch.Tensor, layer: int, out: torch.Tensor) -> None:
    """Copies one layer of blocks to ``out``; see ``slab.gather_layer``."""
    _bytes(out).copy_(_bytes(slab)[blocks.to(slab.device), :, layer].view(_bytes(out).shape))


def scatter_layer(
    staging: torch.Tensor, slab: torch.Tensor, blocks: torch.Tensor, layer: int
) -> None:
    """Copies ``staging`` to one layer of blocks; see ``slab.scatter_layer``."""
    _, page, _, *row = _bytes(slab).shape
    part = _bytes(staging).view(len(blocks), page, *row)
    _bytes(slab)[blocks.to(slab.device), :, layer] = part


def gather_tokens(slab: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copies tokens to ``out``; see ``slab.gather_tokens``."""
    tokens = _bytes(slab).flatten(0, 1)
    _bytes(out).copy_(tokens[slots.to(slab.device)].view(_bytes(out).shape))


def scatter_tokens(staging: torch.Tensor, slab: torch.Tensor, slots: torch.Tensor) -> None:
    """Copies ``staging`` to tokens; see ``slab.scatter_tokens``."""
    tokens = _bytes(slab).flatten(0, 1)
    tokens[slots.to(slab.device)] = _bytes(staging).view(len(slots), *tokens.shape[1:])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # torch cannot index every dtype (fp8 on some devices), but it can index bytes.
    return tensor.view(torch.uint8)
