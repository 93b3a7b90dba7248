"""Normalizations and gated activations, computed in float32 and rounded once, as the kernels do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns ``x / RMS(x) * weight`` of float32 rows, float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> torch.Tensor:
    result = _normalized(x.float(), weight, eps)
    return result.to(x.dtype) if out is None else out.copy_(result)


def _fused_add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normalized(total, weight, eps))


def rmsnorm(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,  # noqa: ARG001
) -> torch.Tensor:
    """Returns ``input / RMS(input) * weight``, written into ``out`` if it is given."""
    return _norm(input, weight.float(), eps, out)


def gemma_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,  # noqa: ARG001
) -> torch.Tensor:
    """Returns ``input / RMS(input) * (weight + 1)``, written into ``out`` if it is given."""
    return _norm(input, weight.float() + 1, eps, out)


def fused_add_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,  # noqa: ARG001
) -> None:
    """Adds ``input`` to ``residual`` in place; ``input`` becomes the normalized sum.

    The sum is normalized before it is rounded to the dtype of ``residual``.
    """
    _fused_add_norm(input, residual, weight.float(), eps)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,  # noqa: ARG001
) -> None:
    """Does what :func:`fused_add_rmsnorm` does, with the weight ``weight + 1``."""
    _fused_add_norm(input, residual, weight.float() + 1, eps)


def _gated(
    activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    half = x.shape[-1] // 2
    expected = (*x.shape[:-1], half)
    if x.shape[-1] % 2 or (out is not None and out.shape != expected):
        found = None if out is None else tuple(out.shape)
        raise ValueError(f"an input of shape {tuple(x.shape)} does not fit an output of {found}")
    result = activation(x[..., :half].float()) * x[..., half:].float()
    return result.to(x.dtype) if out is None else out.copy_(result)


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """Returns ``silu(gate) * up`` of ``input = [gate, up]``, written into ``out`` if given."""
    return _gated(F.silu, input, out)


def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """Returns ``gelu(gate) * up`` of ``input = [gate, up]``, written into ``out`` if given."""
    return _gated(F.gelu, input, out)


def gelu_tanh_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """Does what :func:`gelu_and_mul` does, with the approximation by tanh."""
    return _gated(lambda gate: F.gelu(gate, approximate="tanh"), input, out)
