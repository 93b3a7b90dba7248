"""Gather and scatter of block groups, layers of blocks, and tokens of the KV slab.

All are asynchronous on the current stream and allocate at most the list of numbers on the device.
``slab`` is contiguous ``[blocks, page, layers, 2, kv_heads, head_dim]`` of any dtype. Staging is
contiguous, on the slab's device, apart from it in memory, and of the shape given, or uint8
``[items, bytes of an item]``. Every operation raises before a byte moves:

- TypeError: numbers that are not int64.
- ValueError: a shape, dtype, device or layout other than these; ``Rows`` of something else.
- IndexError: blocks, slots or a layer that the slab does not have; one twice in a scatter.
"""

from __future__ import annotations

import math

import torch

from .copy_rows import copy_rows
from .rows import Rows, check_blocks, check_runs, check_slots


def gather_groups(
    slab: torch.Tensor, runs: tuple[torch.Tensor, torch.Tensor] | Rows, out: torch.Tensor
) -> None:
    """Copies block groups, all layers, to consecutive places of ``out``.

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        runs: ``Runs`` (first block and blocks of each group, int64 ``[runs]``), or checked blocks.
        out: ``[blocks of all runs, page, layers, 2, kv_heads, head_dim]``.
    """
    _groups(slab, runs, out, to_packed=True)


def scatter_groups(
    staging: torch.Tensor, slab: torch.Tensor, runs: tuple[torch.Tensor, torch.Tensor] | Rows
) -> None:
    """Copies ``staging`` to block groups: the inverse of ``gather_groups``.

    Runs must not overlap.
    """
    _groups(slab, runs, staging, to_packed=False)


def gather_layer(
    slab: torch.Tensor, blocks: torch.Tensor | Rows, layer: int, out: torch.Tensor
) -> None:
    """Copies one layer of blocks to ``out``, for layer-wise streaming (SwiftCache §3.2).

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        blocks: int64 ``[n]``, or checked blocks.
        layer: 0 to ``layers - 1``.
        out: ``[n, page, 2, kv_heads, head_dim]``.
    """
    _layer(slab, blocks, layer, out, to_packed=True)


def scatter_layer(
    staging: torch.Tensor, slab: torch.Tensor, blocks: torch.Tensor | Rows, layer: int
) -> None:
    """Copies ``staging`` to one layer of blocks: the inverse of ``gather_layer``.

    Blocks must be distinct.
    """
    _layer(slab, blocks, layer, staging, to_packed=False)


def gather_tokens(slab: torch.Tensor, slots: torch.Tensor | Rows, out: torch.Tensor) -> None:
    """Copies tokens, all layers, to ``out``, for tokens that do not fill pages.

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        slots: int64 ``[n]``, ``block * page + place in the page``; or checked slots.
        out: ``[n, layers, 2, kv_heads, head_dim]``.
    """
    _tokens(slab, slots, out, to_packed=True)


def scatter_tokens(staging: torch.Tensor, slab: torch.Tensor, slots: torch.Tensor | Rows) -> None:
    """Copies ``staging`` to tokens: the inverse of ``gather_tokens``. Slots must be distinct."""
    _tokens(slab, slots, staging, to_packed=False)


def _groups(
    slab: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor] | Rows,
    packed: torch.Tensor,
    *,
    to_packed: bool,
) -> None:
    _check_slab(slab)
    if not isinstance(runs, Rows):
        runs = check_runs(slab, runs, distinct=not to_packed)
    numbers = _numbers(runs, "block", slab.shape[0], slab, distinct=not to_packed)
    size = _check_packed(packed, slab, len(numbers), slab.shape[1:])
    copy_rows(packed, slab, numbers, lines=1, width=size, pitch=size, to_packed=to_packed)


def _layer(
    slab: torch.Tensor,
    blocks: torch.Tensor | Rows,
    layer: int,
    packed: torch.Tensor,
    *,
    to_packed: bool,
) -> None:
    _check_slab(slab)
    count, page, layers, *row = slab.shape
    if not 0 <= layer < layers:
        raise IndexError(f"asked for layer {layer}, the slab has layers 0 to {layers - 1}")
    if not isinstance(blocks, Rows):
        blocks = check_blocks(slab, blocks, distinct=not to_packed)
    numbers = _numbers(blocks, "block", count, slab, distinct=not to_packed)
    width = _check_packed(packed, slab, len(numbers), (page, *row)) // max(page, 1)
    copy_rows(
        packed,
        slab,
        numbers,
        lines=page,
        width=width,
        pitch=layers * width,
        offset=layer * width,
        to_packed=to_packed,
    )


def _tokens(
    slab: torch.Tensor, slots: torch.Tensor | Rows, packed: torch.Tensor, *, to_packed: bool
) -> None:
    _check_slab(slab)
    if not isinstance(slots, Rows):
        slots = check_slots(slab, slots, distinct=not to_packed)
    limit = slab.shape[0] * slab.shape[1]
    numbers = _numbers(slots, "slot", limit, slab, distinct=not to_packed)
    size = _check_packed(packed, slab, len(numbers), slab.shape[2:])
    copy_rows(packed, slab, numbers, lines=1, width=size, pitch=size, to_packed=to_packed)


def _check_slab(slab: torch.Tensor) -> None:
    if slab.dim() != 6 or slab.shape[3] != 2:
        raise ValueError(
            f"slab: found shape {list(slab.shape)}, expected "
            "[blocks, page, layers, 2, kv_heads, head_dim]"
        )
    if 0 in slab.shape[1:]:
        raise ValueError(f"slab: found shape {list(slab.shape)}, whose blocks hold nothing")
    if not slab.is_contiguous():
        raise ValueError(
            f"slab: found shape {list(slab.shape)} with strides {list(slab.stride())}, expected a "
            "contiguous tensor"
        )


def _numbers(
    rows: Rows, unit: str, limit: int, slab: torch.Tensor, *, distinct: bool
) -> torch.Tensor:
    if (rows.unit, rows.limit, rows.numbers.device) != (unit, limit, slab.device):
        raise ValueError(
            f"asked for {unit}s of a slab of {limit} on {slab.device}, found rows checked as "
            f"{rows.unit}s of {rows.limit} on {rows.numbers.device}"
        )
    if distinct and not rows.distinct:
        raise ValueError(f"asked to scatter to {unit}s not checked for being distinct")
    return rows.numbers


def _check_packed(
    packed: torch.Tensor, slab: torch.Tensor, items: int, item: tuple[int, ...]
) -> int:
    """Checks a staging tensor of ``items`` of shape ``item``; returns the bytes of an item."""
    size = math.prod(item) * slab.element_size()
    expected = [(slab.dtype, [items, *item]), (torch.uint8, [items, size])]
    if (packed.dtype, list(packed.shape)) not in expected:
        raise ValueError(
            f"staging: found {packed.dtype} {list(packed.shape)}, expected "
            + " or ".join(f"{dtype} {shape}" for dtype, shape in expected)
        )
    if not packed.is_contiguous():
        raise ValueError(
            f"staging: found shape {list(packed.shape)} with strides {list(packed.stride())}, "
            "expected a contiguous tensor"
        )
    if packed.device != slab.device:
        raise ValueError(f"staging: found on {packed.device}, expected on {slab.device}")
    begin, end = packed.data_ptr(), packed.data_ptr() + packed.numel() * packed.element_size()
    slab_end = slab.data_ptr() + slab.numel() * slab.element_size()
    if begin < slab_end and slab.data_ptr() < end:
        raise ValueError("staging: found inside the slab's own memory, expected memory apart")
    return size
