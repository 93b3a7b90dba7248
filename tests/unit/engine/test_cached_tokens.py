"""Tests of ``cached_tokens``: tokens that tiers load count once, under the tier that has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sgl_ext.config import load
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.restore import fill
from sgl_ext.engine.restore.by_layers import Coming
from sgl_ext.engine.restore.power import RestorePower
from sgl_ext.engine.step import cached_tokens
from sgl_ext.planning.plan import Compute, Load, PrefillPlan, Span
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.pointers import Pointers, Stretch
from sgl_ext.planning.strategy import Strategy
from sgl_ext.planning.want import Positions
from sgl_ext.restore.host_prefixes import Held

PAGE = 16


def request(prompt: int, **more: Any) -> Any:
    fields = {
        "rid": "r", "origin_input_ids": [1] * prompt, "cached_tokens": 0, "customized_info": None,
        "cached_tokens_device": 0, "cached_tokens_host": 0, "cached_tokens_storage": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})


def power(*stretches: Stretch) -> RestorePower:
    config = load({"tiers": {"ssd": {"directories": ["/ssd"], "capacity": "1GiB"}}, "restore": {}})
    assert config.restore is not None
    found = RestorePower(config, config.restore)
    found._ext = ExtRuntime(config, plans={"r": PLAN})
    found.planner = Planner.__new__(Planner)
    pointers = Pointers(0, stretches)
    at = Positions(range(0, pointers.end * PAGE, PAGE), PAGE)
    opened = {"r": SimpleNamespace(pointers=pointers, at=at, whole=False)}
    found.planner.wants = SimpleNamespace(opened=opened)  # type: ignore[assignment]
    return found


def details(req: Any) -> dict[str, Any] | None:
    streamer = SimpleNamespace(enable_hicache_storage=lambda: False)
    original = SchedulerOutputStreamer.get_cached_tokens_details
    original = getattr(original, "__wrapped__", original)
    return cached_tokens._name_tiers(original(streamer, req), streamer, req)


def part(req: Any, start: int, end: int, *, stained: bool = False) -> None:
    """Sets the next part of the prompt and counts its prefix, as in ``prepare_for_extend``.

    Like SGLang's ``ScheduleBatch``, counts for the first part only.

    Args:
        stained: whether the request was retracted before, so that SGLang counts nothing.
    """
    req.prefix_len, req.extend_end = start, end
    if not stained and not getattr(req, "before", 0):
        req.cached_tokens += start
        req.cached_tokens_device = start
    req.before = end


PLAN = PrefillPlan(
    [Span(0, 96, Compute()), Span(96, 160, Load()), Span(160, 176, Compute()),
     Span(176, 288, Load()), Span(288, 300, Compute())]
)  # fmt: skip


def test_each_part_counts_the_tokens_that_tiers_loaded() -> None:
    brings = power(Stretch("ssd", 2, 12), Stretch("remote", 12, 18))
    req = request(300)
    for start, end in ((32, 112), (112, 200), (200, 300)):
        part(req, start, end)
        brings._count_loaded(req)
    assert req.cached_tokens == 32 + 64 + 112
    assert details(req) == {"device": 32, "host": 0, "ssd": 64 + 16, "remote": 96}


def test_retracted_requests_count_no_token_twice() -> None:
    brings = power(Stretch("ssd", 2, 18))
    req = request(300)
    part(req, 0, 200)
    brings._count_loaded(req)
    assert details(req) == {"device": 0, "host": 0, "ssd": 64 + 24}
    # The tree has kept a prefix of 96 tokens. In the next case it has kept none.
    part(req, 96, 300, stained=True)
    brings._count_loaded(req)
    assert req.cached_tokens == 64 + 112
    part(req, 0, 300, stained=True)
    brings._count_loaded(req)
    assert req.cached_tokens == 64 + 112
    assert details(req) == {"device": 0, "host": 0, "ssd": 64 + 112}


def test_output_tokens_of_retracted_requests_are_not_counted() -> None:
    # Retracted before its first part had run, or stock SGLang counts nothing.
    req = request(200)
    part(req, 0, 300, stained=True)
    power(Stretch("ssd", 2, 18))._count_loaded(req)
    assert req.cached_tokens == 64 + 24


@pytest.mark.parametrize(
    ("computed", "reached", "counted"), [(0, 0, 96), (40, 0, 56), (96, 0, 0), (40, 96, 32)]
)
def test_prefixes_in_host_memory_do_not_count_computed_tokens(
    computed: int, reached: int, counted: int
) -> None:
    req = request(200, _sgl_ext_reached=reached)
    held = Held(2, (), np.arange(6), Strategy.TOKENS, 0.0, computed=7)
    found = power(Stretch("ssd", 2, 8))
    found.prefixes = {"r": held}  # type: ignore[assignment]
    found.stack = SimpleNamespace(layout=SimpleNamespace(page=PAGE))  # type: ignore[assignment]
    coming = [Coming(32, np.arange(4), np.arange(4)), Coming(96, np.arange(2), np.arange(2))]
    held.computed += computed
    fill._count(found, req, coming, before=7)
    assert req.cached_tokens == counted
    assert details(req) == ({"device": 0, "host": counted} if counted else None)


def test_details_without_restored_tokens_keep_the_counts_of_sglang() -> None:
    assert details(request(100)) is None
    assert details(request(100, cached_tokens=7)) == {"device": 7, "host": 0}
    told = {"ext": [{"power": "tiers", "sources": {"ssd": {"tokens": 48}}}]}
    req = request(100, cached_tokens=64, cached_tokens_device=16, cached_tokens_host=48)
    req.customized_info = told
    assert details(req) == {"device": 16, "host": 0, "ssd": 48}
