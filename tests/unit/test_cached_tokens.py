"""Tokens that tiers brought count as cached, once, and under the tier that they came from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sgl_ext.config import load
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.restore import within
from sgl_ext.engine.restore.by_layers import Coming
from sgl_ext.engine.restore.power import RestorePower
from sgl_ext.engine.step import cached_tokens
from sgl_ext.plan import Compute, Load, PrefillPlan, Span
from sgl_ext.restore.host_prefixes import Held, Strategy
from sgl_ext.restore.pointers import Pointers, Stretch
from sgl_ext.restore.restorer import Restorer

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
    found.restorer = Restorer.__new__(Restorer)
    found.restorer.page = PAGE
    found.restorer._opened = {"r": SimpleNamespace(pointers=Pointers(0, stretches))}  # type: ignore[dict-item]
    return found


def details(req: Any) -> dict[str, Any] | None:
    streamer = SimpleNamespace(enable_hicache_storage=lambda: False)
    original = SchedulerOutputStreamer.get_cached_tokens_details
    original = getattr(original, "__wrapped__", original)
    return cached_tokens._name_tiers(original(streamer, req), streamer, req)


def part(req: Any, start: int, end: int, *, stained: bool = False) -> None:
    """As ``ScheduleBatch.prepare_for_extend`` counts, at first."""
    req.prefix_len, req.extend_end = start, end
    if not stained and not getattr(req, "before", 0):
        req.cached_tokens += start
        req.cached_tokens_device = start
    req.before = end


PLAN = PrefillPlan(
    [Span(0, 96, Compute()), Span(96, 160, Load()), Span(160, 176, Compute()),
     Span(176, 288, Load()), Span(288, 300, Compute())]
)  # fmt: skip


def test_parts_count_what_tiers_have_loaded() -> None:
    brings = power(Stretch("ssd", 2, 12), Stretch("remote", 12, 18))
    req = request(300)
    for start, end in ((32, 112), (112, 200), (200, 300)):
        part(req, start, end)
        brings._count_loaded(req)
    assert req.cached_tokens == 32 + 64 + 112
    assert details(req) == {"device": 32, "host": 0, "ssd": 64 + 16, "remote": 96}


def test_nothing_is_counted_twice_after_a_retraction() -> None:
    brings = power(Stretch("ssd", 2, 18))
    req = request(300)
    part(req, 0, 200)
    brings._count_loaded(req)
    assert details(req) == {"device": 0, "host": 0, "ssd": 64 + 24}
    part(req, 96, 300, stained=True)  # from the start, or from what the tree has kept
    brings._count_loaded(req)
    assert req.cached_tokens == 64 + 112
    part(req, 0, 300, stained=True)
    brings._count_loaded(req)
    assert req.cached_tokens == 64 + 112
    assert details(req) == {"device": 0, "host": 0, "ssd": 64 + 112}


def test_an_answer_is_no_part_of_the_prompt() -> None:
    req = request(200)  # was retracted before its first part had run, or stock counts nothing
    part(req, 0, 300, stained=True)
    power(Stretch("ssd", 2, 18))._count_loaded(req)
    assert req.cached_tokens == 64 + 24


@pytest.mark.parametrize(
    ("computed", "reached", "counted"), [(0, 0, 96), (40, 0, 56), (96, 0, 0), (40, 96, 32)]
)
def test_a_prefix_in_host_memory_counts_what_was_not_computed(
    computed: int, reached: int, counted: int
) -> None:
    req = request(200, _sgl_ext_reached=reached)
    held = Held(2, np.arange(6), Strategy.TOKENS, 0.0, computed=7, request=req)
    found = power(Stretch("ssd", 2, 8))
    found.prefixes = {"r": held}  # type: ignore[assignment]
    found.stack = SimpleNamespace(layout=SimpleNamespace(page=PAGE))  # type: ignore[assignment]
    coming = [Coming(32, np.arange(4), np.arange(4)), Coming(96, np.arange(2), np.arange(2))]
    held.computed += computed
    within._count(found, "r", coming, before=7)
    assert req.cached_tokens == counted
    assert details(req) == ({"device": 0, "host": counted} if counted else None)


def test_a_request_without_restoration_says_what_it_said() -> None:
    assert details(request(100)) is None
    assert details(request(100, cached_tokens=7)) == {"device": 7, "host": 0}
    told = {"ext": [{"power": "tiers", "sources": {"ssd": {"tokens": 48}}}]}
    req = request(100, cached_tokens=64, cached_tokens_device=16, cached_tokens_host=48)
    req.customized_info = told
    assert details(req) == {"device": 16, "host": 0, "ssd": 48}
