"""Report of linked tokens, also of a prompt that was interrupted between two parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_ext.chunks.composition import Composition, LinkedChunk
from sgl_ext.engine.chunks.linked_request import LinkedRequest
from sgl_ext.engine.chunks.links import ChunkLinks
from sgl_ext.engine.chunks.report import COUNTED, report

CHUNKS = (LinkedChunk(4, 20, 0, (0, 1), 0, 0), LinkedChunk(24, 16, 1, (2,), 0, 0))
COMPOSITION = Composition("lego-2", "ext:chunk", ((), (1,)), CHUNKS, "")


def counts(found: Any) -> dict[str, int]:
    return {name: found[name] for name in (*COUNTED, "prefix")}


def test_parts_of_an_interrupted_prompt_add_up() -> None:
    available = [[range(20)], [range(10)]]
    plan = COMPOSITION.plan(48, available, blend_share=0.1)
    whole = counts(report(COMPOSITION, plan, 0))
    assert whole == {"linked": 27, "recomputed": 3, "missing": 6, "computed": 0, "prefix": 0}
    for end in (1, 5, 17, 24, 31, 47):
        first = LinkedRequest(COMPOSITION, 48, {}, plan, 0, reached=end)
        now = LinkedRequest(COMPOSITION, 48, {}, plan, end, earlier=[first])
        links: Any = SimpleNamespace(_requests={"r": now})
        req: Any = SimpleNamespace(rid="r", prefix_len=end)
        found = ChunkLinks.report(links, req)
        assert found is not None
        assert counts(found) == whole


def test_tokens_that_are_linked_again_count_once() -> None:
    plan = COMPOSITION.plan(48, [[range(20)], [range(16)]], blend_share=0.1)
    first = LinkedRequest(COMPOSITION, 48, {}, plan, 0, reached=32)
    now = LinkedRequest(COMPOSITION, 48, {}, plan, 10, earlier=[first])  # the rest was evicted
    links: Any = SimpleNamespace(_requests={"r": now})
    found = ChunkLinks.report(links, SimpleNamespace(rid="r", prefix_len=10))  # type: ignore[arg-type]
    assert found is not None
    assert counts(found) == counts(report(COMPOSITION, plan, 0))
