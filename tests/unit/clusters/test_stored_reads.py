"""Spans of forwards that read stored contexts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trace_kit import RecordedTrace, time_stats

from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.clusters.reads import StoredReads


class Contexts:
    """Contexts of followers, whose costs the test sets."""

    def __init__(self, **followed: str) -> None:
        self._followed = followed
        self.spent: dict[str, Counter[str]] = {id_: Counter() for id_ in followed.values()}

    def follower(self, rid: str) -> str | None:
        return self._followed.get(rid)

    def costs(self, follower: str) -> Counter[str]:
        return Counter(self.spent[follower])


def request(rid: str, *, traced: bool = True) -> Any:
    return SimpleNamespace(rid=rid, time_stats=time_stats(RecordedTrace(enabled=traced)))


def test_each_traced_follower_gets_what_its_contexts_cost_in_the_forward() -> None:
    contexts = Contexts(one="a", other="b", untraced="a")
    reads = StoredReads(cast(StoredContexts, contexts))
    reqs = [request("one"), request("other"), request("untraced", traced=False), request("plain")]
    batch = cast(Any, SimpleNamespace(reqs=reqs))
    contexts.spent["a"].update({"fetched": 100, "in_memory": 5, "fetch": 9})
    reads.begin(batch)
    contexts.spent["a"].update({"fetched": 7, "in_memory": 2, "prefetched": 1, "fetch": 0.5})
    reads.end(batch)
    reads.end(batch)  # a forward that no follower was in
    found = [
        (req.rid, span.attrs, (span.end_time_ns - span.start_time_ns) / 1e9)
        for req in reqs
        for span in req.time_stats.trace_ctx.slices
    ]
    assert [each[:2] for each in found] == [
        ("one", {"fetched": 7, "prefetched": 1, "in_memory": 2}),
        ("other", {"fetched": 0, "prefetched": 0, "in_memory": 0}),
    ]
    assert [each[2] for each in found] == pytest.approx([0.5, 0], abs=1e-5)


def test_a_request_that_has_ended_in_the_forward_gets_no_span() -> None:
    contexts = Contexts(one="a")
    reads = StoredReads(cast(StoredContexts, contexts))
    batch = cast(Any, SimpleNamespace(reqs=[request("one")]))
    reads.begin(batch)
    contexts._followed.clear()
    reads.end(batch)
    assert not batch.reqs[0].time_stats.trace_ctx.slices
