"""Comparison of answers by ``sgl-ext verify``: bounds, windows, and tokens that are tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sgl_ext.verify.background import background
from sgl_ext.verify.compare import WINDOW, Reply, bounds, difference, diverges_at
from sgl_ext.verify.preemption import Preemption
from sgl_ext.verify.steps import not_loaded
from sgl_ext.verify.target import Target


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
    assert not_loaded(info, "host", filled=True).startswith(found)
    assert "the device pool was not filled" in not_loaded(info, "host", filled=False)


PRIORITIES = {"enable_priority_scheduling": True}


@pytest.mark.parametrize(
    ("policy", "more", "why"),
    [
        ("static", PRIORITIES, ""),
        ("round-robin", PRIORITIES, ""),
        ("sglang", PRIORITIES, ""),
        ("sglang", {}, "only if memory runs out"),
        ("sglang", {**PRIORITIES, "disable_priority_preemption": True}, "only if memory runs out"),
        ("fcfs", PRIORITIES, "only if memory runs out"),
        ("static", {**PRIORITIES, "max_queued_requests": 8}, "exceed --max-queued-requests 8"),
        ("static", {**PRIORITIES, "max_total_num_tokens": 1_000_000}, "a smaller --max-total"),
    ],
)
def test_preemption_is_provoked_only_where_it_can_be(
    policy: str, more: dict[str, Any], why: str
) -> None:
    info = {
        "max_total_num_tokens": 65_536, "max_req_input_len": 8000,
        "sgl_ext": {"config": {"swap": {"policy": policy}}}, **more,
    }  # fmt: skip
    target = Target("http://127.0.0.1:1")
    prompts = [[1] * 1000] * 4
    found = Preemption(target, info, prompts, 1e-3).why_not
    assert (found == "") == (why == "") and why in found
    if not why:
        assert "about 655 s" in Preemption(target, info, prompts, 1e-2).why_not


def test_urgent_prompts_fit_the_context() -> None:
    info = {
        "max_total_num_tokens": 8192, "max_req_input_len": 2040, **PRIORITIES,
        "sgl_ext": {"config": {"swap": {"policy": "static"}}},
    }  # fmt: skip
    made = Preemption(Target("http://127.0.0.1:1"), info, [[1] * 1000] * 8, 1e-3)
    assert made._length + 8 < 2040
    assert made._length * made._count > 8192


def test_errors_of_background_calls_are_raised_where_they_are_awaited() -> None:
    assert background(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        background(lambda: 1 // 0).result()
