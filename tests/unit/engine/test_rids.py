"""Tests of ids that clients give to their requests: an abort ends the request of one id."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

from sgl_ext.engine.core import runtime
from sgl_ext.engine.workarounds import rids

NAMES = ("a", "a1", "ab", "b")


class Request(SimpleNamespace):
    """Request that records its abort."""

    __hash__ = object.__hash__

    def finished(self) -> bool:
        return False


def scheduler(place: str) -> Any:
    """Returns a scheduler whose requests are in one of the places in which SGLang looks."""
    requests = [Request(rid=rid, to_finish=None) for rid in NAMES]
    grammars = SimpleNamespace(
        grammar_queue=requests if place == "grammar" else [],
        abort_requests=lambda abort: [
            setattr(req, "to_finish", True) for req in requests
            if place == "grammar" and (abort.abort_all or req.rid.startswith(abort.rid))
        ],
    )  # fmt: skip
    return SimpleNamespace(
        all=requests, grammar_manager=grammars, mm_receiver=None, dllm_config=None,
        chunked_req=requests[1] if place == "chunked" else None, disaggregation_mode=None,
        _pending_chunked_abort_req=None, waiting_queue=[],
        collect_inflight_reqs=lambda: {*(requests if place == "running" else ())},
    )  # fmt: skip


def aborted(of: Any) -> list[str]:
    marked = [req.rid for req in of.all if req.to_finish is not None]
    return marked + ([of._pending_chunked_abort_req.rid] if of._pending_chunked_abort_req else [])


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", SimpleNamespace())


@pytest.mark.parametrize("place", ["running", "grammar"])
@pytest.mark.parametrize("rid", NAMES)
def test_an_abort_ends_the_request_of_its_id_only(place: str, rid: str) -> None:
    of = scheduler(place)
    rids._abort(Scheduler.abort_request, of, AbortReq(rid=rid))
    assert aborted(of) == [rid]
    assert [req.rid for req in of.all] == [*NAMES]


def test_a_request_in_chunks_is_aborted_by_its_own_id_only() -> None:
    of = scheduler("chunked")
    rids._abort(Scheduler.abort_request, of, AbortReq(rid="a"))
    assert aborted(of) == []
    rids._abort(Scheduler.abort_request, of, AbortReq(rid="a1"))
    assert aborted(of) == ["a1"]


def test_waiting_requests_are_hidden_from_the_abort_of_another_id() -> None:
    of = scheduler("running")
    of.waiting_queue = of.all
    seen: list[str] = []
    rids._abort(lambda *_: seen.extend(req.rid for req in of.all), of, AbortReq(rid="a"))
    assert seen == ["a", "", "", "b"]

    def fails(*_: object) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        rids._abort(fails, of, AbortReq(rid="a"))
    assert [req.rid for req in of.all] == [*NAMES]


def test_all_requests_are_aborted_together() -> None:
    of = scheduler("running")
    rids._abort(Scheduler.abort_request, of, AbortReq(rid="", abort_all=True))
    assert aborted(of) == [*NAMES]


@pytest.mark.parametrize(
    ("rid", "path", "refused"),
    [
        (f"{HEALTH_CHECK_RID_PREFIX}_1", "/generate", True),
        (["a", HEALTH_CHECK_RID_PREFIX], "/generate", True),
        (f"{HEALTH_CHECK_RID_PREFIX}_1", "/health_generate", False),
        (f"{HEALTH_CHECK_RID_PREFIX}_1", "/root/health", False),
        (f"a{HEALTH_CHECK_RID_PREFIX}", "/generate", False),
        (None, "/generate", False),
        (5, "/generate", False),
    ],
)
def test_ids_of_health_checks_are_reserved(rid: Any, path: str, refused: bool) -> None:
    http = SimpleNamespace(url=SimpleNamespace(path=path))
    request = SimpleNamespace(rid=rid)
    if not refused:
        rids.check(request, http)
        return
    for sender in (http, None, object()):
        with pytest.raises(ValueError, match="is reserved for health checks; choose another rid"):
            rids.check(request, sender)
