"""Copies of tokens within the slab to another position: keys are rotated, values are unchanged.

A token may also be rotated in place, where its source is its target.

This is the GPU counterpart of the native rotating copy, with the same arithmetic: products and sums
of the cached keys are computed in fp32 and each rounded separately (no fused multiply-add), then
rounded once to the slab's dtype. Every byte is read once and written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .rows import Rows, check_slots

TILE_BYTES = 8192
"""Bytes that one program copies: four 16-byte accesses per thread, all in flight at once."""

WARPS = 4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Moves:
    """Copies of tokens, validated or guaranteed, whose indices are on the slab's device.

    Any number of calls may use them, also within a CUDA graph.
    """

    sources: Rows
    """Source slots, ``[n]``."""
    targets: Rows
    """Target slots, ``[n]``, distinct; none is the source of another token."""
    segments: torch.Tensor
    """Row of each token in the tables of angles, int32 ``[n]``."""
    tables: int
    """Minimum number of rows of the tables of angles, as far as it was checked."""


def check_moves(
    slab: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    segments: torch.Tensor | None = None,
) -> Moves:
    """Validates copies of tokens within the slab, or within others with as many slots.

    Args:
        slab: ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        sources: source slots (``block * page + offset in the page``), int64 ``[n]``. Reading them
            from the slab's device synchronizes with it.
        targets: target slots, like ``sources``.
        segments: row of each token in the tables of angles, int32 ``[n]``; None for row 0.

    Raises:
        TypeError: the slots are not int64, or the segments are not int32.
        ValueError: the tensors are not one-dimensional or differ in length.
        IndexError: a slot does not exist in the slab, a target occurs twice or is also the source
            of another token, or a segment is negative.
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
    if (both := torch.isin(targets, sources[sources != targets])).any():
        raise IndexError(
            f"asked to move a token to slot {int(targets[both][0])} and that slot's to another; "
            "which is first would be left to chance"
        )
    if (segments < 0).any():
        raise IndexError(f"asked for segment {int(segments.min())}, expected 0 or more")
    tables = int(segments.max()) + 1 if len(segments) else 0
    if slab.device.type == "cuda":
        segments = segments.pin_memory()  # a copy from pageable memory would block
    segments = segments.to(slab.device, non_blocking=True, copy=True)
    return Moves(*checked, segments, tables)


def guaranteed_moves(
    slab: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, segments: torch.Tensor
) -> Moves:
    """Returns copies of tokens that the caller guarantees to be valid; does not read the indices.

    Args:
        slab: as for :func:`check_moves`, like the other arguments, which are on its device.
    """
    limit = slab.shape[0] * slab.shape[1]
    rows = Rows(sources, "slot", limit, distinct=False), Rows(targets, "slot", limit, distinct=True)
    return Moves(*rows, segments, tables=0)


def rotate_tokens(
    slab: torch.Tensor,
    moves: Moves,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Copies tokens in all layers and rotates their keys; asynchronous on the current stream.

    An angle of 0 copies finite keys unchanged, except for the sign of a zero.

    Args:
        slab: contiguous ``[blocks, page, layers, 2, kv_heads, head_dim]`` of one of :data:`DTYPES`.
        moves: result of :func:`check_moves` or :func:`guaranteed_moves` for this slab or one with
            as many slots.
        cosines: cosines of the angles by which the pairs are rotated, contiguous fp32
            ``[segments, rotary_dim / 2]`` on the slab's device. For long distances, compute the
            angles in float64.
        sines: sines of these angles, like ``cosines``.
        interleaved: whether the elements of a pair are adjacent (GPT-J) instead of
            ``rotary_dim / 2`` apart (NeoX).

    Raises:
        ValueError: a shape, dtype, device or layout is not as above; nothing was copied.
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
    # Triton launches on the current device, which may differ from the device of the slab.
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
    """Does the same as :func:`rotate_tokens` in plain torch, on any device; validates nothing."""
    tokens = slab.flatten(0, 1)
    moved = tokens[moves.sources.numbers]
    rotated = moved[:, :, 0, :, : 2 * cosines.shape[1]]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    a, b = first.float(), second.float()
    c, s = (table[moves.segments.long()][:, None, None] for table in (cosines, sines))
    turned = a * c - b * s, b * c + a * s  # before the writes: for fp32, `a` aliases `first`
    first.copy_(turned[0])
    second.copy_(turned[1])
    tokens[moves.targets.numbers] = moved


# bfloat16 is converted through its bits: Triton's interpreter would truncate, and the NaN of a GPU
# differs from that of the native copy.
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
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # rounds to nearest even
        bits = tl.where(x != x, 0x7FC0, bits)
        narrow = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


# A program copies the keys and values of `tile` heads of one token, across layers. Only the offsets
# of tokens need int64. Sizes are constants, so that the compiler knows which addresses are aligned.
# All loads precede all stores: both access the slab, so the compiler could not reorder them. One
# thread loads and stores an element, so that a token can be its own target.
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
