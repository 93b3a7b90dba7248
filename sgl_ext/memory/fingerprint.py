"""Fingerprint of the KV in a slab or a file: a digest of everything that decides its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import xxhash

if TYPE_CHECKING:
    import torch

_CHUNK = 64 << 20


def fingerprint(model: torch.nn.Module, identity: Mapping[str, object]) -> str:
    """Returns 16 hex digits that are equal for equal weights, buffers and ``identity``.

    The files that the weights came from do not matter. Fine-tunes, quantizations, rotary scalings
    and the shards of tensor-parallel ranks get different fingerprints. Reads every weight once.

    Args:
        identity: everything else that decides the values of KV, in plain JSON types.
    """
    digest = xxhash.xxh3_64(msgspec.json.encode(identity, order="deterministic"))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for part in _bytes(tensor):
            digest.update(part.numpy().data)
    return digest.hexdigest()


def joint(own: str, every: Sequence[str]) -> str:
    """Returns the fingerprint of one share of a model that depends on all shares.

    Args:
        own: fingerprint of this share.
        every: fingerprints of all shares, in the order of their ranks.
    """
    return xxhash.xxh3_64(msgspec.json.encode([own, *every])).hexdigest()


def _bytes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the contents of ``tensor`` as 1-D uint8 tensors in host memory, in order."""
    import torch

    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK].cpu()
