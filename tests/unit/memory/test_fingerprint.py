"""Fingerprint of a model: everything that changes its KV changes the fingerprint, nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sgl_ext.memory.fingerprint import fingerprint

IDENTITY = {"config": {"rope_theta": 1e5}, "tensor_parallel": [0, 1]}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 5), nn.Embedding(7, 3, dtype=torch.bfloat16))
    made.register_buffer("table", torch.arange(9, dtype=torch.float32))
    made.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    return made.requires_grad_(False)


def swap_rows(made: nn.Module) -> None:
    made[0].weight[[0, 1]] = made[0].weight[[1, 0]]


def test_equal_models_have_equal_fingerprints() -> None:
    assert fingerprint(model(), IDENTITY) == fingerprint(model(), dict(reversed(IDENTITY.items())))
    assert len(fingerprint(model(), IDENTITY)) == 16


@pytest.mark.parametrize(
    "change",
    [
        swap_rows,
        lambda made: made[1].weight[6, 2].add_(1),
        lambda made: made.table[3].neg_(),
        lambda made: made.scale.mul_(2),
        lambda made: setattr(made, "table", made.table.to(torch.float64)),
        lambda made: made.append(nn.Linear(1, 1)),
    ],
)
def test_changed_models_have_different_fingerprints(change: Callable[[nn.Module], object]) -> None:
    changed = model()
    change(changed)
    assert fingerprint(changed, IDENTITY) != fingerprint(model(), IDENTITY)


def test_other_configurations_and_ranks_have_different_fingerprints() -> None:
    other = {**IDENTITY, "config": {"rope_theta": 1e6}}
    rank = {**IDENTITY, "tensor_parallel": [1, 2]}
    assert len({fingerprint(model(), identity) for identity in (IDENTITY, other, rank)}) == 3


def test_fingerprint_covers_strided_and_large_tensors() -> None:
    made = nn.Module()
    made.register_buffer("view", torch.arange(20, dtype=torch.int16).view(4, 5).t())
    same = nn.Module()
    same.register_buffer("view", made.view.contiguous())
    assert fingerprint(made, {}) == fingerprint(same, {})
    large = nn.Module()
    large.register_buffer("large", torch.zeros((64 << 20) + 3, dtype=torch.uint8))
    before = fingerprint(large, {})
    large.large[-1] = 1
    assert fingerprint(large, {}) != before
