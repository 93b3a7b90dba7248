"""The stand-in for SGLang's compiled kernels, compared with plain definitions in float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from conftest import ROOT


def _module(name: str) -> ModuleType:
    """Loads a module of the stand-in without its package, which SGLang would find afterwards."""
    path = ROOT / "scripts" / "gpu" / "sgl_kernel" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"stand_in_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


elementwise, sampling = _module("elementwise"), _module("sampling")
DTYPES = (torch.float32, torch.bfloat16)


def _normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "offset"), [("rmsnorm", 0), ("gemma_rmsnorm", 1)])
def test_norms_return_normalized_rows_or_write_them_into_out(
    name: str, offset: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.rand(64).to(dtype)
    expected = _normalized(x.double(), weight.double() + offset)
    norm = getattr(elementwise, name)
    before = x.clone()
    found = norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert _near(found, expected)
    out = torch.empty_like(x)
    assert norm(x, weight, 1e-5, out=out) is out
    assert torch.equal(out, found)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "offset"), [("fused_add_rmsnorm", 0), ("gemma_fused_add_rmsnorm", 1)]
)
def test_fused_norms_add_to_the_residual_and_normalize_in_place(
    name: str, offset: int, dtype: torch.dtype
) -> None:
    x, residual, weight = (torch.randn(3, 64).to(dtype) for _ in range(3))
    total = x.double() + residual.double()
    assert getattr(elementwise, name)(x, residual, weight, 1e-5) is None
    assert _near(residual, total)
    assert _near(x, _normalized(total, weight.double() + offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu_and_mul", torch.nn.functional.silu),
        ("gelu_and_mul", torch.nn.functional.gelu),
        ("gelu_tanh_and_mul", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_multiply_the_halves_of_their_input(
    name: str, activation: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = torch.randn(4, 2, 48).to(dtype)
    gate, up = x.double().chunk(2, -1)
    found = getattr(elementwise, name)(x)
    assert found.dtype == dtype
    assert _near(found, activation(gate) * up)
    out = torch.empty_like(found)
    getattr(elementwise, name)(x, out)
    assert torch.equal(out, found)
    with pytest.raises(ValueError, match=r"input of shape \(4, 2, 48\) does not fit .*\(4, 48\)"):
        getattr(elementwise, name)(x, torch.empty(4, 48))


def test_top_k_keeps_the_most_likely_tokens_of_each_row() -> None:
    probs = torch.rand(6, 50).softmax(-1)
    some = torch.tensor([1, 2, 10, 49, 50, 1000])
    found = sampling.top_k_renorm_prob(probs, some)
    assert torch.allclose(found.sum(-1), torch.ones(6))
    for row, most in enumerate(some.tolist()):
        kept = set(found[row].nonzero().flatten().tolist())
        assert kept == set(probs[row].topk(min(most, 50)).indices.tolist())
    assert torch.equal(sampling.top_k_renorm_prob(probs, 10)[2], found[2])


def test_top_p_keeps_the_fewest_tokens_that_reach_the_sum() -> None:
    probs = torch.rand(5, 40).softmax(-1)
    some = torch.tensor([0.0, 0.05, 0.5, 0.99, 1.0])
    found = sampling.top_p_renorm_prob(probs, some)
    assert torch.allclose(found.sum(-1), torch.ones(5))
    for row, least in enumerate(some.tolist()):
        kept = found[row] > 0
        mass = float(probs[row][kept].sum())
        assert mass >= least - 1e-5
        fewer = mass - float(probs[row][kept].min())
        assert fewer < least + 1e-5 or int(kept.sum()) == 1
    assert torch.equal(sampling.top_p_renorm_probs(probs, 0.5)[2], found[2])
