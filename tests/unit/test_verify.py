"""Comparison of answers by ``sgl-ext verify``: bounds, windows, and tokens that are tied."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sgl_ext.verify.compare import WINDOW, Reply, bounds, difference, diverges_at
from sgl_ext.verify.steps import not_loaded


def reply(*tokens: int, likeliest: tuple[Mapping[int, float], ...] = ()) -> Reply:
    return Reply("", tokens, likeliest, 8, {}, (), 0.1)


def test_the_difference_of_a_page_is_found_where_it_is() -> None:
    right = [-1.0] * 200
    wrong = [*right[:64], *[-4.0] * WINDOW, *right[64 + WINDOW :]]
    assert difference(right, wrong) == (3.0, 64, 3.0)
    assert difference(right, right) == (0, 0, 0)


def test_one_outlier_counts_less_than_a_page() -> None:
    right, wrong = [-1.0] * 100, [-1.0] * 100
    wrong[50] = -2.6
    assert difference(right, wrong).mean == pytest.approx(1.6 / WINDOW)


def test_answers_shorter_than_a_window_are_averaged_as_a_whole() -> None:
    assert difference([-1.0, -1.0], [-1.0, -2.0]) == (0.5, 0, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_differ(value: float) -> None:
    assert difference([-1.0] * 40, [-1.0] * 39 + [value]).mean == float("inf")


def test_answers_of_other_lengths_differ() -> None:
    assert difference([-1.0], [-1.0, -1.0]).mean == float("inf")


def test_halves_round_more() -> None:
    assert bounds("float32", "float32").mean < bounds("bfloat16").mean
    assert bounds("auto") == bounds("bfloat16") == bounds("float32", "bfloat16")


def test_tokens_that_are_equally_likely_do_not_diverge() -> None:
    likeliest: tuple[Mapping[int, float], ...] = ({5: -0.1}, {6: -0.70, 7: -0.71}, {8: -0.1})
    one, tied = reply(5, 6, 8, likeliest=likeliest), reply(5, 7, 9, likeliest=likeliest)
    assert diverges_at(one, tied, 0.05) is None
    assert diverges_at(one, tied, 0.005) == 1
    assert diverges_at(one, reply(5, 9, 8, likeliest=likeliest), 0.05) == 1
    assert diverges_at(one, reply(5, 6, 8), 0.05) is None
    assert diverges_at(one, reply(5, 6), 0.05) == 2


@pytest.mark.parametrize(
    ("pages", "pool", "found"),
    [
        (2880, 65_536, "it holds 46,080 tokens, and what filled the device pool of 65,536 tokens"),
        (2880, 46_080, "no KV was loaded from it"),
        (None, 65_536, "no KV was loaded from it"),
    ],
)
def test_a_tier_smaller_than_the_device_pool_is_named(
    pages: int | None, pool: int, found: str
) -> None:
    tiers = {} if pages is None else {"host": {"capacity_pages": pages}}
    state = {"sgl_ext": {"tiers": tiers}}
    info = {"internal_states": [state], "page_size": 16, "max_total_num_tokens": pool}
    assert not_loaded(info, "host").startswith(found)
