"""Gather and scatter of block groups, layers of blocks, and tokens of the KV slab.

The copies are asynchronous on the current stream. On the device, an operation allocates at most the
list of indices. ``slab`` is contiguous ``[blocks, page, layers, 2, kv_heads, head_dim]`` of any
dtype. The staging tensor is contiguous, on the slab's device, in memory that does not overlap the
slab, and of the given shape or uint8 ``[items, bytes per item]``. Every operation validates its
arguments before it copies a byte and raises:

- TypeError: indices are not int64.
- ValueError: a shape, dtype, device or layout is not as above; ``Rows`` do not fit the operation.
- IndexError: a block, slot or layer does not exist in the slab, or occurs twice in a scatter.
"""

from __future__ import annotations

import math

import torch

from .copy_rows import copy_rows
from .rows import Rows, check_blocks, check_runs, check_slots


def gather_groups(
    slab: torch.Tensor, runs: tuple[torch.Tensor, torch.Tensor] | Rows, out: torch.Tensor
) -> None:
    """Copies all layers of block groups to consecutive blocks of ``out``.

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        runs: ``Runs`` (first block and number of blocks of each group, int64 ``[runs]``), or
            validated blocks.
        out: ``[blocks of all runs, page, layers, 2, kv_heads, head_dim]``.
    """
    _groups(slab, runs, out, to_packed=True)


def scatter_groups(
    staging: torch.Tensor, slab: torch.Tensor, runs: tuple[torch.Tensor, torch.Tensor] | Rows
) -> None:
    """Copies ``staging`` to block groups; the inverse of ``gather_groups``.

    The runs must not overlap.
    """
    _groups(slab, runs, staging, to_packed=False)


def gather_layer(
    slab: torch.Tensor, blocks: torch.Tensor | Rows, layer: int, out: torch.Tensor
) -> None:
    """Copies one layer of blocks to ``out``, for layer-wise streaming (SwiftCache §3.2).

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        blocks: int64 ``[n]``, or validated blocks.
        layer: 0 to ``layers - 1``.
        out: ``[n, page, 2, kv_heads, head_dim]``.
    """
    _layer(slab, blocks, layer, out, to_packed=True)


def scatter_layer(
    staging: torch.Tensor, slab: torch.Tensor, blocks: torch.Tensor | Rows, layer: int
) -> None:
    """Copies ``staging`` to one layer of blocks; the inverse of ``gather_layer``.

    The blocks must be distinct.
    """
    _layer(slab, blocks, layer, staging, to_packed=False)


def gather_tokens(slab: torch.Tensor, slots: torch.Tensor | Rows, out: torch.Tensor) -> None:
    """Copies all layers of tokens to ``out``, for tokens that do not fill whole pages.

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        slots: int64 ``[n]``, ``block * page + offset in the page``; or validated slots.
        out: ``[n, layers, 2, kv_heads, head_dim]``.
    """
    _tokens(slab, slots, out, to_packed=True)


def scatter_tokens(staging: torch.Tensor, slab: torch.Tensor, slots: torch.Tensor | Rows) -> None:
    """Copies ``staging`` to tokens; the inverse of ``gather_tokens``.

    The slots must be distinct.
    """
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
    """Validates a staging tensor of ``items`` of shape ``item``; returns the bytes per item."""
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
