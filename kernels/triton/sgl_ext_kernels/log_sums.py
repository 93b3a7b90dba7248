"""Log-sum-exp of the logits of queries over keys in the KV pool: the weight of an attention.

Attention backends return their output without it. With it, the output can be merged with that of
attention to other keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS = 64
"""Keys of a step of a program."""

WARPS = 4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def log_sums(
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Computes log-sum-exps in fp32; asynchronous on the current stream.

    Reads no index on the host: the caller guarantees that requests, lengths and slots are valid.

    Args:
        query: ``[rows, heads, head_dim]`` of one of :data:`DTYPES`, with any strides but 1 in
            ``head_dim``; the heads of a KV head are consecutive. All tensors are on one device.
        keys: ``[slots, kv_heads, head_dim]`` of the query's dtype, with any stride between slots.
        table: slot of each token, int32 ``[requests, width]`` with contiguous rows.
        requests: line of ``table`` of each row, int64 ``[rows]``.
        lengths: number of tokens that each row sees, the first ones of its line, int64 ``[rows]``.
        scale: factor of the logits.

    Returns:
        Natural log-sum-exp of the scaled logits, fp32 ``[rows, heads]``; minus infinity for rows
        that see no token.

    Raises:
        ValueError: a shape, dtype, device or layout is not as above.
    """
    _check(query, keys, table, requests, lengths)
    rows, heads, head_dim = query.shape
    out = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    if rows == 0:
        return out
    if query.device.type == "cpu" and isinstance(_log_sums, triton.runtime.JITFunction):
        raise RuntimeError(
            "Triton kernel asked for on a CPU tensor: Triton compiles for GPUs alone; use "
            "sgl_ext_kernels.log_sums.reference, or set TRITON_INTERPRET=1 before this package is "
            "imported"
        )
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # Triton launches on the current device, which may differ from the device of the tensors.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _log_sums[(rows, kv_heads)](
            query,
            keys,
            table,
            requests,
            lengths,
            out,
            scale,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            table.stride(0),
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            # A product of tensor cores has 16 rows and columns at least.
            group_tile=max(16, triton.next_power_of_2(group)),
            head_tile=max(16, triton.next_power_of_2(head_dim)),
            tile=KEYS,
            num_warps=WARPS,
        )
    return out


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Does the same as :func:`log_sums` in plain torch, on any device; validates nothing."""
    group = query.shape[1] // keys.shape[1]
    out = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        seen = keys[table[request, :length].long()].double().repeat_interleave(group, 1)
        logits = torch.einsum("hd,nhd->nh", query[row].double(), seen) * scale
        out[row] = logits.logsumexp(0)
    return out


# A program computes the heads of one KV head for one row, which share its keys.
@triton.jit  # type: ignore[untyped-decorator]
def _log_sums(  # type: ignore[no-untyped-def]
    query,
    keys,
    table,
    requests,
    lengths,
    out,
    scale,
    query_stride,
    query_head_stride,
    key_stride,
    pitch,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    group_tile: tl.constexpr,
    head_tile: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, group_tile)
    dim = tl.arange(0, head_tile)
    at_head = row * query_stride + (kv_head * group + head) * query_head_stride
    in_query = (head[:, None] < group) & (dim[None, :] < head_dim)
    q = tl.load(query + (at_head[:, None] + dim[None, :]), mask=in_query, other=0.0)
    slots = table + tl.load(requests + row).to(tl.int64) * pitch
    length = tl.load(lengths + row)
    top = tl.full([group_tile], float("-inf"), tl.float32)
    total = tl.zeros([group_tile], tl.float32)
    for first in range(0, length, tile):
        token = first + tl.arange(0, tile)
        slot = tl.load(slots + token, mask=token < length, other=0).to(tl.int64)
        in_keys = (token[None, :] < length) & (dim[:, None] < head_dim)
        at_key = slot * key_stride + kv_head * head_dim
        k = tl.load(keys + (at_key[None, :] + dim[:, None]), mask=in_keys, other=0.0)
        logits = tl.dot(q, k, input_precision="ieee") * scale
        logits = tl.where(token[None, :] < length, logits, float("-inf"))
        now = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - now) + tl.sum(tl.exp(logits - now[:, None]), 1)
        top = now
    at_out = row * (kv_heads * group) + kv_head * group + head
    tl.store(out + at_out, top + tl.log(total), mask=head < group)


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    if (
        query.dim() != 3
        or keys.dim() != 3
        or query.shape[2] != keys.shape[2]
        or query.shape[1] % max(keys.shape[1], 1)
        or 0 in (*query.shape[1:], *keys.shape[1:])
    ):
        raise ValueError(
            f"asked for queries {list(query.shape)} over keys {list(keys.shape)}, expected "
            "[rows, heads, head_dim] and [slots, kv_heads, head_dim] with heads that are a "
            "multiple of kv_heads"
        )
    if query.dtype not in DTYPES or keys.dtype != query.dtype:
        raise ValueError(
            f"asked for queries of {query.dtype} over keys of {keys.dtype}, expected the same, one "
            f"of {', '.join(map(str, DTYPES))}"
        )
    if query.stride(2) != 1 or keys.stride()[1:] != (keys.shape[2], 1):
        raise ValueError(
            f"found strides {list(query.stride())} of queries and {list(keys.stride())} of keys, "
            "expected contiguous heads"
        )
    for name, given, dtype, shape in (
        ("table", table, torch.int32, table.shape[:2]),
        ("requests", requests, torch.int64, query.shape[:1]),
        ("lengths", lengths, torch.int64, query.shape[:1]),
    ):
        good = given.dtype == dtype and given.shape == shape and given.stride(-1) == 1
        if not good or given.dim() == 0 or (name == "table" and given.dim() != 2):
            raise ValueError(
                f"{name}: found {given.dtype} {list(given.shape)} with strides "
                f"{list(given.stride())}, expected contiguous {dtype} "
                f"{'[requests, width]' if name == 'table' else list(shape)}"
            )
    if len({each.device for each in (query, keys, table, requests, lengths)}) != 1:
        raise ValueError(
            f"found queries on {query.device}, keys on {keys.device}, indices on {table.device}, "
            f"{requests.device} and {lengths.device}, expected one device"
        )
