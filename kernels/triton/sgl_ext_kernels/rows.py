"""Indices of the slab's blocks or tokens, which are validated before an operation copies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Runs(NamedTuple):
    """Block groups: group ``i`` has the blocks ``start[i]`` to ``start[i] + blocks[i] - 1``."""

    start: torch.Tensor
    """First block of each group, int64 ``[runs]``."""
    blocks: torch.Tensor
    """Number of blocks of each group, at least 1, int64 ``[runs]``."""


@dataclass(frozen=True)
class Rows:
    """Validated indices of blocks or slots on the slab's device.

    An operation that is given plain indices validates them on the host and copies them to the
    device in each call. With ``Rows`` it does neither and can therefore run in a loop over layers
    and in a CUDA graph. The indices are copied on the stream that is current during the validation.
    """

    numbers: torch.Tensor
    """Indices, int64 ``[n]`` on the slab's device."""
    unit: str
    """Unit of the indices: ``block`` or ``slot``."""
    limit: int
    """Number of blocks or slots of the slab that the indices were validated against."""
    distinct: bool
    """Flag of indices that were checked to be distinct, which scattering requires."""


def check_blocks(slab: torch.Tensor, blocks: torch.Tensor, *, distinct: bool = False) -> Rows:
    """Validates block indices for any number of operations on slabs of this many blocks.

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        blocks: int64 ``[n]``. Reading them from the slab's device synchronizes with it.
        distinct: whether to check that the blocks are distinct, which scattering requires.

    Raises:
        TypeError: the blocks are not int64.
        ValueError: the blocks are not one-dimensional.
        IndexError: a block does not exist in the slab, or occurs twice although ``distinct``.
    """
    return _check("block", slab.shape[0], slab.device, _host("blocks", blocks), distinct)


def check_slots(slab: torch.Tensor, slots: torch.Tensor, *, distinct: bool = False) -> Rows:
    """Validates token slots (``block * page + offset in the page``); see ``check_blocks``."""
    limit = slab.shape[0] * slab.shape[1]
    return _check("slot", limit, slab.device, _host("slots", slots), distinct)


def check_runs(
    slab: torch.Tensor, runs: tuple[torch.Tensor, torch.Tensor], *, distinct: bool = False
) -> Rows:
    """Validates ``Runs`` and lists their blocks in order; see ``check_blocks``."""
    start, blocks = (
        _host(f"runs.{name}", part) for name, part in zip(Runs._fields, runs, strict=True)
    )
    if start.shape != blocks.shape:
        raise ValueError(
            f"runs: asked for {len(start)} starts and {len(blocks)} lengths, expected one of each "
            "per run"
        )
    limit = slab.shape[0]
    outside = (start < 0) | (blocks < 1) | (blocks > limit) | (start > limit - blocks)
    if outside.any():
        run = int(outside.nonzero()[0])
        raise IndexError(
            f"run {run} asked for {int(blocks[run])} blocks from block {int(start[run])}, the slab "
            f"has blocks 0 to {limit - 1}; a run has 1 block or more"
        )
    before = blocks.cumsum(0) - blocks
    listed = (start - before).repeat_interleave(blocks) + torch.arange(int(blocks.sum()))
    return _check("block", limit, slab.device, listed, distinct)


def _host(name: str, numbers: torch.Tensor) -> torch.Tensor:
    if numbers.dtype != torch.int64:
        raise TypeError(f"{name}: found {numbers.dtype}, expected torch.int64")
    if numbers.dim() != 1:
        raise ValueError(f"{name}: found shape {list(numbers.shape)}, expected [n]")
    return numbers.cpu()


def _check(
    unit: str, limit: int, device: torch.device, numbers: torch.Tensor, distinct: bool
) -> Rows:
    outside = (numbers < 0) | (numbers >= limit)
    if outside.any():
        raise IndexError(
            f"asked for {unit} {int(numbers[outside][0])}, the slab has {unit}s 0 to {limit - 1}"
        )
    if distinct:
        ordered = numbers.sort().values
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise IndexError(
                f"asked to scatter to {unit} {int(ordered[1:][twice][0])} twice; which bytes win "
                "would be left to chance"
            )
    numbers = numbers.contiguous()
    if device.type == "cuda":
        # A copy from pageable memory would wait for the stream.
        numbers = numbers.pin_memory()
    # Copied even on the CPU: the caller may change its tensor after the validation.
    return Rows(numbers.to(device, non_blocking=True, copy=True), unit, limit, distinct)
