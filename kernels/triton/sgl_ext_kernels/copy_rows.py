"""Kernel that copies rows of a strided tensor to or from a packed tensor, for all operations."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

TILE_BYTES = 16384
"""Bytes that one program copies: four 16-byte accesses per thread, all in flight at once."""

WARPS = 8

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


# Offsets are int64 because slabs may exceed 2**31 words. Sizes are compile-time constants: a server
# has one geometry, divisions by a constant become multiplications, and the compiler knows which
# addresses are aligned and merges two words into one 16-byte access.
@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    packed,
    strided,
    rows,
    size: tl.constexpr,
    width: tl.constexpr,
    pitch: tl.constexpr,
    stride: tl.constexpr,
    tile: tl.constexpr,
    to_packed: tl.constexpr,
):
    tiles: tl.constexpr = (size + tile - 1) // tile
    program = tl.program_id(0).to(tl.int64)
    item = program // tiles
    word = (program % tiles) * tile + tl.arange(0, tile)
    in_item = word < size
    at_packed = packed + item * size + word
    at_strided = strided + tl.load(rows + item) * stride + (word // width) * pitch + word % width
    if to_packed:
        tl.store(at_packed, tl.load(at_strided, mask=in_item), mask=in_item)
    else:
        tl.store(at_strided, tl.load(at_packed, mask=in_item), mask=in_item)


def copy_rows(
    packed: torch.Tensor,
    strided: torch.Tensor,
    rows: torch.Tensor,
    *,
    lines: int,
    width: int,
    pitch: int,
    offset: int = 0,
    to_packed: bool,
) -> None:
    """Copies ``rows`` of ``strided`` to consecutive rows of ``packed``, or in the other direction.

    Line ``j`` of row ``r`` starts at byte ``r * lines * pitch + offset + j * pitch`` of
    ``strided``. The caller has checked that every row is inside ``strided``.

    Args:
        packed: contiguous, ``len(rows) * lines * width`` bytes.
        strided: contiguous, on the same device.
        rows: int64 ``[n]`` on the same device; distinct unless ``to_packed``.
        lines: number of lines per row.
        width: bytes per line.
        pitch: bytes from one line to the next; a multiple of ``width``.
        offset: bytes from the start of a row to its first line; a multiple of ``width``.
        to_packed: direction of the copy: from ``strided`` to ``packed`` if true.
    """
    if packed.numel() == 0:
        return
    if strided.device.type == "cpu" and isinstance(_copy_rows, triton.runtime.JITFunction):
        raise RuntimeError(
            "Triton kernel asked for on a CPU tensor: Triton compiles for GPUs alone; use "
            "sgl_ext_kernels.reference, or set TRITON_INTERPRET=1 before this package is imported"
        )
    if lines == 1 or width == pitch:
        lines, width, pitch = 1, lines * width, lines * pitch
    word = math.gcd(8, width, offset, *(_alignment(tensor) for tensor in (packed, strided)))
    size = lines * width // word
    tile = min(TILE_BYTES // word, triton.next_power_of_2(size))
    # Triton launches on the current device, which may differ from the device of the tensors.
    with torch.cuda.device_of(strided):  # type: ignore[no-untyped-call]
        _copy_rows[(rows.numel() * triton.cdiv(size, tile),)](
            _words(packed, word),
            _words(strided, word)[offset // word :],
            rows,
            size=size,
            width=width // word,
            pitch=pitch // word,
            stride=lines * pitch // word,
            tile=tile,
            to_packed=to_packed,
            num_warps=WARPS,
        )


def _alignment(tensor: torch.Tensor) -> int:
    # A storage offset is in elements of the dtype, and the storage itself may be unaligned.
    return math.gcd(tensor.data_ptr(), tensor.storage_offset() * tensor.element_size())


def _words(tensor: torch.Tensor, word: int) -> torch.Tensor:
    return tensor.view(-1).view(_WORDS[word])
