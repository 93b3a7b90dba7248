"""Tests of the KL divergence between next-token distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr

from sgl_ext.chunks.divergence import divergence, mean_divergence


def logprobs(weights: list[int]) -> dict[int, float]:
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def top(all_: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(all_.items(), key=lambda pair: -pair[1])[:count])


WEIGHTS = st.lists(st.integers(1, 1000), min_size=8, max_size=8)


@given(WEIGHTS, WEIGHTS, st.integers(1, 7))
def test_divergence_is_kl_and_a_lower_bound_for_top_tokens(
    one: list[int], other: list[int], count: int
) -> None:
    right, found = logprobs(one), logprobs(other)
    expected = rel_entr(np.array(one) / sum(one), np.array(other) / sum(other)).sum()
    assert divergence(right, found) == pytest.approx(expected, abs=1e-9)
    partial = divergence(top(right, count), top(found, count))
    assert -1e-9 <= partial <= expected + 1e-9
    assert mean_divergence([right, right], [found, right]) == pytest.approx(expected / 2, abs=1e-9)
