"""Renormalization of probabilities ``[batch, vocabulary]`` by top-k and top-p; float32 results."""

from __future__ import annotations

import torch


def _column(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor | float:
    """Returns a value for each row as a column, or the one value of all rows."""
    return value.to(like.device).unsqueeze(-1) if isinstance(value, torch.Tensor) else value


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Returns the probabilities of the ``top_k`` most likely tokens of each row, with sum 1.

    Tokens as likely as the last of them are kept, too. ``top_k`` may exceed the vocabulary.
    """
    probs = probs.float()
    ordered = probs.sort(dim=-1, descending=True).values
    last = _column(top_k, probs)
    if isinstance(last, torch.Tensor):
        least = ordered.gather(-1, last.long().clamp(1, probs.shape[-1]) - 1)
    else:
        place = min(max(int(last), 1), probs.shape[-1])
        least = ordered[:, place - 1 : place]
    kept = probs.where(probs >= least, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """Returns the probabilities of the fewest tokens of each row whose sum is ``top_p`` or more.

    They are scaled to the sum 1. Tokens as likely as the last of them are kept, too.
    """
    probs = probs.float()
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    needed = (before < _column(top_p, probs)).sum(-1, keepdim=True).clamp(min=1)
    kept = probs.where(probs >= ordered.gather(-1, needed - 1), 0.0)
    return kept / kept.sum(-1, keepdim=True)


top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs
