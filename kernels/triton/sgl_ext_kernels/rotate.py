"""Copies of tokens within the slab to another position: keys are rotated, values stay.

The GPU's twin of the native rotating copy, with its arithmetic: products and sums in fp32 from the
keys as they are cached, each rounded by itself, then rounded once to the slab's dtype. Every byte
is read once and written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .rows import Rows, check_slots

TILE_BYTES = 8192
"""Bytes that one program moves: four 16-byte accesses of each thread, all in flight at once."""

WARPS = 4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Moves:
    """Checked copies of tokens, on the slab's device; fit for any number of calls, and a graph."""

    sources: Rows
    """Slots ``[n]``."""
    targets: Rows
    """Slots ``[n]``, distinct, none of them a source."""
    segments: torch.Tensor
    """int32 ``[n]``: each token's row of the tables of angles."""
    tables: int
    """Rows that the tables have at least."""


def check_moves(
    slab: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    segments: torch.Tensor | None = None,
) -> Moves:
    """Checks copies of tokens within slabs of this many blocks.

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        sources: int64 ``[n]``, slots (``block * page + place in the page``), as ``targets``. On the
            slab's device they are read back, which waits for it.
        segments: int32 ``[n]``, the rows of the tables of angles; without, row 0 for all.

    Raises:
        TypeError: slots that are not int64, segments that are not int32.
        ValueError: not one-dimensional, or not equally many.
        IndexError: a slot that the slab does not have, a target twice or that is also a source, a
            negative segment.
    """
    if segments is None:
        segments = torch.zeros(sources.shape, dtype=torch.int32)
    if segments.dtype != torch.int32:
        raise TypeError(f"segments: found {segments.dtype}, expected torch.int32")
    if not sources.shape == targets.shape == segments.shape:
        raise ValueError(
            f"asked to move {list(sources.shape)} sources to {list(targets.shape)} targets in "
            f"{list(segments.shape)} segments, expected [n] of each"
        )
    sources, targets, segments = sources.cpu(), targets.cpu(), segments.cpu()
    checked = check_slots(slab, sources), check_slots(slab, targets, distinct=True)
    if (both := torch.isin(targets, sources)).any():
        raise IndexError(
            f"asked to move a token to slot {int(targets[both][0])} and that slot's to another; "
            "which is first would be left to chance"
        )
    if (segments < 0).any():
        raise IndexError(f"asked for segment {int(segments.min())}, expected 0 or more")
    tables = int(segments.max()) + 1 if len(segments) else 0
    if slab.device.type == "cuda":
        segments = segments.pin_memory()  # from pageable memory the copy would wait
    segments = segments.to(slab.device, non_blocking=True, copy=True)
    return Moves(*checked, segments, tables)


def rotate_tokens(
    slab: torch.Tensor,
    moves: Moves,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Copies tokens, all layers, and rotates their keys; asynchronous on the current stream.

    An angle of 0 copies finite keys as they are, but for the sign of a zero.

    Args:
        slab: contiguous ``[blocks, page, layers, 2, kv_heads, head_dim]`` of one of :data:`DTYPES`.
        moves: from :func:`check_moves` with this slab or one of as many slots.
        cosines: fp32 ``[segments, rotary_dim / 2]`` on the slab's device, contiguous; as ``sines``
            of the angles by which each pair is rotated, computed in float64 for a long way.
        interleaved: the elements of a pair are neighbours (GPT-J), not ``rotary_dim / 2`` apart
            (NeoX).

    Raises:
        ValueError: a shape, dtype, device or layout other than these; nothing was copied.
    """
    _check(slab, moves, cosines, sines)
    if moves.segments.numel() == 0:
        return
    if slab.device.type == "cpu" and isinstance(_rotate_heads, triton.runtime.JITFunction):
        raise RuntimeError(
            "Triton kernel asked for on a CPU tensor: Triton compiles for GPUs alone; use "
            "sgl_ext_kernels.rotate.reference, or set TRITON_INTERPRET=1 before this package is "
            "imported"
        )
    _, _, layers, _, kv_heads, head_dim = slab.shape
    pairs, heads = cosines.shape[1], layers * kv_heads
    fitting = max(1, TILE_BYTES // (2 * head_dim * slab.element_size()))
    tile = min(2 ** (fitting.bit_length() - 1), triton.next_power_of_2(heads))
    # Triton launches on the current device, which need not be the slab's.
    with torch.cuda.device_of(slab):  # type: ignore[no-untyped-call]
        _rotate_heads[(moves.segments.numel() * triton.cdiv(heads, tile),)](
            slab,
            moves.sources.numbers,
            moves.targets.numbers,
            moves.segments,
            cosines,
            sines,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            pairs=pairs,
            interleaved=interleaved,
            tile=tile,
            head_tile=triton.next_power_of_2(head_dim),
            pair_tile=triton.next_power_of_2(pairs),
            rest_tile=triton.next_power_of_2(max(head_dim - 2 * pairs, 1)),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def reference(
    slab: torch.Tensor,
    moves: Moves,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """:func:`rotate_tokens` in plain torch, on any device; checks nothing."""
    tokens = slab.flatten(0, 1)
    moved = tokens[moves.sources.numbers]
    rotated = moved[:, :, 0, :, : 2 * cosines.shape[1]]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    a, b = first.float(), second.float()
    c, s = (table[moves.segments.long()][:, None, None] for table in (cosines, sines))
    turned = a * c - b * s, b * c + a * s  # in fp32 `a` is `first` itself
    first.copy_(turned[0])
    second.copy_(turned[1])
    tokens[moves.targets.numbers] = moved


# By its bits: Triton's interpreter would truncate, and GPUs have another NaN than the native copy.
@triton.jit
def _widen(x):  # type: ignore[no-untyped-def]
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def _narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest even
        bits = tl.where(x != x, 0x7FC0, bits)
        narrow = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


# A program moves `tile` heads of one token, of any of its layers: keys and values. Only offsets
# of tokens need int64; sizes are constants, so that the compiler sees which addresses are aligned.
# All loads come before all stores, which could not be exchanged: they are of one slab.
@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    slab,
    sources,
    targets,
    segments,
    cosines,
    sines,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    pairs: tl.constexpr,
    interleaved: tl.constexpr,
    tile: tl.constexpr,
    head_tile: tl.constexpr,
    pair_tile: tl.constexpr,
    rest_tile: tl.constexpr,
):
    tiles: tl.constexpr = (heads + tile - 1) // tile
    dtype: tl.constexpr = slab.dtype.element_ty
    token = tl.program_id(0) // tiles
    head = (tl.program_id(0) % tiles) * tile + tl.arange(0, tile)[:, None]
    is_head = head < heads
    begin = (head // kv_heads * (2 * kv_heads) + head % kv_heads) * head_dim
    source = slab + tl.load(sources + token) * (2 * heads * head_dim) + begin
    target = slab + tl.load(targets + token) * (2 * heads * head_dim) + begin

    value = kv_heads * head_dim + tl.arange(0, head_tile)[None, :]
    is_value = is_head & (tl.arange(0, head_tile)[None, :] < head_dim)
    values = tl.load(source + value, mask=is_value)
    rest = 2 * pairs + tl.arange(0, rest_tile)[None, :]
    is_rest = is_head & (rest < head_dim)
    if 2 * pairs < head_dim:
        rests = tl.load(source + rest, mask=is_rest)
    pair = tl.arange(0, pair_tile)[None, :]
    is_pair = is_head & (pair < pairs)
    if interleaved:
        both = tl.arange(0, 2 * pair_tile)[None, :]
        is_both = is_head & (both < 2 * pairs)
        keys = tl.load(source + both, mask=is_both)
        first, second = tl.split(tl.reshape(keys, (tile, pair_tile, 2)))
    else:
        first = tl.load(source + pair, mask=is_pair)
        second = tl.load(source + pairs + pair, mask=is_pair)
    angle = tl.load(segments + token) * pairs + pair
    c = tl.load(cosines + angle, mask=pair < pairs)
    s = tl.load(sines + angle, mask=pair < pairs)

    a, b = _widen(first), _widen(second)
    first, second = _narrow(a * c - b * s, dtype), _narrow(b * c + a * s, dtype)
    if interleaved:
        keys = tl.reshape(tl.join(first, second), (tile, 2 * pair_tile))
        tl.store(target + both, keys, mask=is_both)
    else:
        tl.store(target + pair, first, mask=is_pair)
        tl.store(target + pairs + pair, second, mask=is_pair)
    if 2 * pairs < head_dim:
        tl.store(target + rest, rests, mask=is_rest)
    tl.store(target + value, values, mask=is_value)


def _check(slab: torch.Tensor, moves: Moves, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    if slab.dim() != 6 or slab.shape[3] != 2 or 0 in slab.shape[1:] or not slab.is_contiguous():
        raise ValueError(
            f"slab: found shape {list(slab.shape)} with strides {list(slab.stride())}, expected a "
            "contiguous [blocks, page, layers, 2, kv_heads, head_dim]"
        )
    if slab.dtype not in DTYPES:
        raise ValueError(f"slab: found {slab.dtype}, whose keys cannot be rotated; see DTYPES")
    slots = slab.shape[0] * slab.shape[1]
    if (moves.sources.limit, moves.segments.device) != (slots, slab.device):
        raise ValueError(
            f"asked to move tokens of a slab of {slots} slots on {slab.device}, found moves "
            f"checked for {moves.sources.limit} on {moves.segments.device}"
        )
    for name, table in (("cosines", cosines), ("sines", sines)):
        good = table.dtype == torch.float32 and table.dim() == 2 and table.is_contiguous()
        if not good or table.shape != cosines.shape or table.device != slab.device:
            raise ValueError(
                f"{name}: found {table.dtype} {list(table.shape)} on {table.device}, expected "
                f"both contiguous torch.float32 [segments, rotary_dim / 2] on {slab.device}"
            )
    if len(cosines) < moves.tables or not 2 <= 2 * cosines.shape[1] <= slab.shape[5]:
        raise ValueError(
            f"tables of angles: found {list(cosines.shape)}, expected at least {moves.tables} "
            f"segments of 1 to {slab.shape[5] // 2} pairs"
        )
