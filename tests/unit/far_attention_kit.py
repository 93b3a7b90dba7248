"""Program that runs SGLang's Triton attention on tokens at the end of a large sparse slab.

The environment has ``TRITON_INTERPRET=1``. The argument is the path of the file for the slab.
"""

from __future__ import annotations

import sys

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 16, 8, 128
TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM
SLOTS = (2**31 // TOKEN + 32) // 16 * 16
SCALE = HEAD_DIM**-0.5


def main() -> None:
    # A sparse file: only the pages that are touched exist.
    memory = torch.from_file(sys.argv[1], shared=True, size=SLOTS * TOKEN, dtype=torch.float16)
    slab = memory.view(SLOTS, LAYERS, 2, KV_HEADS, HEAD_DIM)
    for page in (1, 16):
        attend(slab[:, -1, 0], slab[:, -1, 1], page)


def attend(keys: torch.Tensor, values: torch.Tensor, page: int) -> None:
    """Compares the attention of two new tokens, and of a decoded one, with torch's.

    Args:
        keys, values: ``[SLOTS, KV_HEADS, HEAD_DIM]``, views of the slab's last layer.
    """
    places = torch.tensor([SLOTS - 1, 3, SLOTS - 2, SLOTS - 5])
    assert places.max() * keys.stride(0) > 2**31
    keys[places], values[places] = drawn(4, KV_HEADS), drawn(4, KV_HEADS)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    query, out = drawn(2, HEADS), torch.empty(2, HEADS, HEAD_DIM).half()
    new = drawn(2, KV_HEADS), drawn(2, KV_HEADS)
    extend_attention_fwd(
        query, *new, out, keys, values, torch.tensor([0, 2]), ends, places, None, True, None, 2,
        1.0, 1.0, SCALE, page_size=page,
    )  # fmt: skip
    pairs = zip((keys, values), new, strict=True)
    whole = [torch.cat((pool[places], late)) for pool, late in pairs]
    compare(out, query, *whole, torch.ones(2, 6).tril(4).bool())
    print("extend", page)
    query, out = query[:1], torch.empty(1, HEADS, HEAD_DIM).half()
    decode_attention_fwd(
        query, keys, values, out, ends, places, torch.empty(1, HEADS, 1, HEAD_DIM),
        torch.empty(1, HEADS, 1), torch.ones(1, dtype=torch.int32), 1, SCALE, 1.0, 1.0,
        page_size=page,
    )  # fmt: skip
    compare(out, query, keys[places], values[places], torch.ones(1, 4).bool())
    print("decode", page)


def drawn(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, HEAD_DIM).half()


def compare(
    found: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    mask: torch.Tensor,
) -> None:  # fmt: skip
    inputs = (each.float().transpose(0, 1)[None] for each in (query, keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(found.float(), expected[0].transpose(0, 1), rtol=0, atol=4e-3)


if __name__ == "__main__":
    main()
