"""Hooks on SGLang, and the order in which the powers surround a step of its scheduler."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler

from sgl_ext.config import ExtConfig
from sgl_ext.engine.chunks import blend
from sgl_ext.engine.core import dispatch, runtime, weight_updates
from sgl_ext.engine.core.activation import CARRIED
from sgl_ext.engine.core.powers import ORDER
from sgl_ext.engine.core.scheduler import HOOKS
from sgl_ext.engine.cpu import hicache, hicache_link, packed_linear
from sgl_ext.engine.front import dispatch as front
from sgl_ext.engine.front.fronts import add_front
from sgl_ext.engine.launch import launcher
from sgl_ext.engine.restore import fill, interruption
from sgl_ext.engine.step import forward
from sgl_ext.engine.workarounds import empty_outputs
from sgl_ext.planning.plan import Compute, PrefillPlan, Span

NAMES = tuple(kind.name for kind in ORDER)


PLATFORM = (*packed_linear.HOOKS, *hicache.HOOKS, *hicache_link.HOOKS)


@pytest.mark.parametrize(
    "hooks", [(*HOOKS, *PLATFORM), launcher.HOOKS], ids=["scheduler", "launcher"]
)
def test_each_target_is_hooked_once(hooks: Any) -> None:
    counts = Counter(hook.target for hook in hooks)
    assert not [target for target, count in counts.items() if count > 1]
    assert all(hook.why for hook in hooks)


class Step:
    """Step in which a peer sets a follower aside and restoration interrupts a chunked prefill.

    The powers are real; the objects that they own are stubs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        requests = [SimpleNamespace(rid=rid, retraction_count=1) for rid in ("follower", "waits")]
        self.prefilled = SimpleNamespace(rid="prefilled", retraction_count=1)
        self.scheduler = SimpleNamespace(
            waiting_queue=requests, chunked_req=self.prefilled, collect_inflight_reqs=list,
            grammar_manager=SimpleNamespace(grammar_queue=[]), forward_ct=0, tree_cache=None,
            _add_request_to_queue=lambda req, **_kw: self.scheduler.waiting_queue.append(req),
        )  # fmt: skip
        self.followed: set[str] = set()
        self.ranked: set[str] = set()
        self.planned: list[str] = []

    def power(self, name: str, ext: runtime.ExtRuntime) -> Any:
        (kind,) = (kind for kind in ORDER if kind.name == name)
        power: Any = kind(ExtConfig(), SimpleNamespace())  # type: ignore[arg-type]
        return getattr(self, name)(power, ext) or power

    def restore(self, power: Any, _ext: Any) -> None:
        def interrupt(*_: Any) -> Any:
            self.scheduler.chunked_req = None
            return self.prefilled

        self._monkeypatch.setattr(interruption, "interrupt", interrupt)
        power._scheduler = self.scheduler

    def swap(self, power: Any, ext: Any) -> None:
        def step(waiting: Sequence[Any], holding: Sequence[Any], _forwards: int) -> None:
            self.ranked = {req.rid for req in (*waiting, *holding)}

        power.ext, power.scheduler = ext, self.scheduler
        power.manager = SimpleNamespace(
            clock=SimpleNamespace(on=nullcontext), advance=lambda: False
        )
        power.ahead = SimpleNamespace(land=lambda _tree: ())
        power.priorities = SimpleNamespace(step=step)
        power.after_step = lambda _plan: None

    def peer(self, power: Any, ext: Any) -> None:
        def step(_running: Any) -> None:
            power.side.aside, self.scheduler.waiting_queue = (
                self.scheduler.waiting_queue[:1],
                self.scheduler.waiting_queue[1:],
            )

        def planned() -> None:
            self.scheduler.waiting_queue[:0] = power.side.aside
            power.side.aside = ()

        power.side = SimpleNamespace(step=step, planned=planned, aside=(), out=())
        power._ext = ext

    def clusters(self, power: Any, _ext: Any) -> None:
        power._scheduler, power._metrics = self.scheduler, None
        power.stored = SimpleNamespace(
            tidy=lambda: None, any=True, keep=self.followed.update, refused={}
        )
        power.recorder = SimpleNamespace(any=False, keep=lambda _rids: None)

    def run(self, order: Sequence[str]) -> None:
        ext = runtime.ExtRuntime(ExtConfig())
        for name in order:
            if name not in ("tiers", "chunks"):  # these do not take part in a step
                ext.add(self.power(name, ext))
        self._monkeypatch.setattr(runtime, "current", ext)

        def plan(scheduler: Any, _running: Any) -> Any:
            self.planned = [req.rid for req in scheduler.waiting_queue]
            return SimpleNamespace()

        running = SimpleNamespace(reqs=[], batch_is_full=True)
        dispatch._step(plan, self.scheduler, running)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    return Step(monkeypatch)


def test_swap_and_clusters_see_every_request_of_a_step(step: Step) -> None:
    step.run(NAMES)
    everyone = {"follower", "waits", "prefilled"}
    assert step.followed == step.ranked == everyone
    assert step.planned == ["waits"]
    assert [req.rid for req in step.scheduler.waiting_queue] == ["follower", "waits", "prefilled"]
    assert step.prefilled.retraction_count == 0


@pytest.mark.parametrize(
    ("inner", "outer", "seen", "forgotten"),
    [("restore", "swap", "ranked", "prefilled"), ("peer", "clusters", "followed", "follower")],
)
def test_another_order_hides_a_request_from_a_power(
    step: Step, inner: str, outer: str, seen: str, forgotten: str
) -> None:
    """Shows the reasons for :data:`ORDER`.

    In another order, swap forgets the priority of an interrupted prompt, or clusters forget the
    context of a follower that waits for memory.
    """
    swapped = {inner: outer, outer: inner}
    step.run([swapped.get(name, name) for name in NAMES])
    assert {"follower", "waits", "prefilled"} - getattr(step, seen) == {forgotten}


class Forward:
    """Forward in which chunks select the tokens to recompute and restoration loads a prefix.

    The powers are real; what they would compute and copy is a stub.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.loaded: list[str] = []

        def stand_in() -> None:
            raise AssertionError("the model does not run")

        @contextmanager
        def blending(planned: Any, parts: Any, _candidates: Any) -> Iterator[Any]:
            with planned.replaced(stand_in):
                yield parts

        @contextmanager
        def by_strategy(_power: Any, planned: Any, parts: Any, _coming: Any) -> Iterator[Any]:
            with planned.replaced(stand_in):
                yield parts

        coming = SimpleNamespace(pages="pages", blocks="blocks")
        monkeypatch.setattr(blend, "blending", blending)
        monkeypatch.setattr(fill, "_coming", lambda _power, _forward: {0: [coming]})
        monkeypatch.setattr(fill, "_by_strategy", by_strategy)
        monkeypatch.setattr(fill, "_count", lambda *_: None)
        monkeypatch.setattr(forward, "rows", SimpleNamespace(
            rows_of=lambda *_: [], split_of=lambda *_: None, split=lambda batch, _parts: batch,
            any_number=lambda *_: nullcontext(),
        ))  # fmt: skip

    def run(self, order: Sequence[str]) -> None:
        ext = runtime.ExtRuntime(ExtConfig(), plans={"r": PrefillPlan([Span(0, 8, Compute())])})
        for name in order:
            (kind,) = (kind for kind in ORDER if kind.name == name)
            power: Any = kind(ExtConfig(), SimpleNamespace())  # type: ignore[arg-type]
            power.fill = lambda *_: None
            ext.add(power)
        chunks: Any = ext.chunks
        chunks.links = SimpleNamespace(
            queried=lambda *_: None,
            blended=lambda *_: "candidates",
            release=lambda _rid: None,
            forget=lambda _rid: None,
        )
        restore: Any = ext.restore
        restore.prefixes = {"r": SimpleNamespace(computed=0, tier=None)}
        restore.batch = SimpleNamespace(reqs=["request"])
        restore.stack = SimpleNamespace(
            holds=SimpleNamespace(fill=lambda pages, _blocks: self.loaded.append(pages))
        )
        restore.prefilled = lambda _rid: None
        runner = SimpleNamespace(
            model=SimpleNamespace(),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 8, dtype=torch.int32)),
            token_to_kv_pool_allocator=SimpleNamespace(
                known=SimpleNamespace(extended=lambda _row: None)
            ),
        )
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True), rids=["r"],
            extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[8], seq_lens_cpu=torch.tensor([8]),
            req_pool_indices_cpu=[0],
        )  # fmt: skip
        arguments: Any = (runner, batch)
        forward.forward(ext, lambda *_: "output", *arguments)


def test_chunks_recompute_and_restoration_loads_within_one_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Forward(monkeypatch)
    step.run([name for name in NAMES if name in ("restore", "chunks")])
    assert step.loaded == ["pages"]


def test_another_order_cuts_a_forward_over_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="already continues with other rows"):
        Forward(monkeypatch).run(["chunks", "restore"])


def test_swap_owns_a_request_before_chunks_do() -> None:
    """Avoids linking chunks again that are part of the KV of a swapped-out request."""
    order = [name for name in NAMES if name in ("swap", "chunks")]
    ext: Any = runtime.ExtRuntime(ExtConfig())
    ext.inside_out = [SimpleNamespace(name=name, owns=lambda _req: True) for name in order]
    assert ext.owner(SimpleNamespace()).name == "swap"


def test_poll_hook_accepts_all_keywords_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls the hook as a prefill server does: a hook before a method gets all of its arguments."""
    (hook,) = (each for each in HOOKS if each.function is dispatch._poll)
    name = hook.target.rpartition(".")[2]
    original = getattr(Scheduler, name)
    parameters = inspect.signature(getattr(original, "__wrapped__", original)).parameters
    keywords = {key: None for key in parameters if key != "self"}
    assert keywords
    polled: list[str] = []
    powers = [SimpleNamespace(poll=lambda: polled.append("power"))]
    timer = SimpleNamespace(poll=lambda: polled.append("timer"))
    monkeypatch.setattr(
        runtime, "current", SimpleNamespace(inside_out=powers, timer=timer, planning_metrics=None)
    )
    hook.function(None, **keywords)
    assert polled == ["timer", "power"]


@pytest.mark.parametrize("active", [True, False])
def test_packed_weights_and_powers_learn_that_weights_change(
    monkeypatch: pytest.MonkeyPatch, active: bool
) -> None:
    told: list[str] = []
    ext = SimpleNamespace(outside_in=[SimpleNamespace(weights_changed=lambda: told.append("ext"))])
    layer = torch.nn.Linear(10, 20)
    monkeypatch.setattr(runtime, "current", ext if active else None)
    monkeypatch.setattr(packed_linear, "_left", packed_linear.LIMIT)
    monkeypatch.setattr(weight_updates, "listeners", set())
    packed_linear.install()
    packed_linear._pack(layer)
    assert layer in packed_linear._packed
    asked = SimpleNamespace(action="reset_tensors")
    for hook in weight_updates.HOOKS:
        hook.function(lambda *_: None, None, asked)
    assert told == ["ext"] * len(weight_updates.HOOKS) * active
    assert layer not in packed_linear._packed
    packed_linear._pack(layer)
    assert layer not in packed_linear._packed


def test_generate_hook_accepts_the_request_of_the_grpc_bridge() -> None:
    given: list[object] = []

    async def original(_manager: object, obj: object, **kw: object) -> AsyncIterator[str]:
        given.extend((obj, kw))
        yield "answer"

    async def answers() -> list[object]:
        manager: Any = SimpleNamespace(server_args=SimpleNamespace())
        generated: Any = front._generate(original, manager, "obj", request="the bridge's")
        return [answer async for answer in generated]

    assert asyncio.run(answers()) == ["answer"]
    assert given == ["obj", {"request": "the bridge's"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ["a"] * 65_537}, "65537 prompts with n=1 request 65537 answers"),
        ({"text": ["a"] * 1000, "sampling_params": {"n": 100}}, "request 100000 answers"),
        ({"text": 5}, "the request cannot be read"),
    ],
)
def test_prompts_are_counted_before_fronts_rewrite_them(
    fields: dict[str, Any], message: str
) -> None:
    async def original(*_: object) -> AsyncIterator[str]:
        yield "answer"

    async def answers() -> list[object]:
        args = SimpleNamespace(enable_metrics=False, **{CARRIED: SimpleNamespace(config=1)})
        manager: Any = SimpleNamespace(server_args=args)
        rewritten: list[object] = []
        add_front(manager, SimpleNamespace(accept=rewritten.append))  # type: ignore[arg-type]
        generated = front._generate(original, manager, GenerateReqInput(**fields))
        try:
            return [answer async for answer in generated]
        finally:
            assert not rewritten

    with pytest.raises(ValueError, match=message):
        asyncio.run(answers())


@pytest.mark.parametrize(
    ("device", "overlap", "stages", "stream"),
    [
        ("cuda", True, 1, "forward"), ("cuda", False, 1, "schedule"),
        ("cuda", False, 2, "forward"), ("cpu", True, 1, None),
    ],
)  # fmt: skip
def test_forwards_are_timed_on_the_stream_that_they_run_on(
    device: str, overlap: bool, stages: int, stream: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(pp_size=stages))
    scheduler: Any = SimpleNamespace(
        enable_overlap=overlap, forward_stream="forward", schedule_stream="schedule",
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(device=device)),
    )  # fmt: skip
    assert dispatch._stream_of_forwards(scheduler) == stream


@pytest.mark.parametrize(
    ("success", "message", "changed"),
    [
        (True, "Succeeded to update model weights.", True),
        (False, "Failed to get weights iterator: no such folder.", False),
        (False, "Weights were updated, but the cache was not flushed because", True),
        (False, "update_weights_from_tensor must run between begin_weight_update()", False),
        (False, "an error that is not known", True),
        (False, "Failed to update weights: no memory.\nRolling back to original", True),
    ],
)
def test_powers_are_told_of_weights_that_have_changed_only(
    monkeypatch: pytest.MonkeyPatch, success: bool, message: str, changed: bool
) -> None:
    told: list[str] = []
    ext = SimpleNamespace(outside_in=[SimpleNamespace(weights_changed=lambda: told.append("ext"))])
    monkeypatch.setattr(runtime, "current", ext)
    result = SimpleNamespace(success=success, message=message)
    assert weight_updates.HOOKS[0].function(lambda *_: result, None, None) is result
    assert told == ["ext"] * changed


@pytest.mark.parametrize(
    ("action", "changes"),
    [("reset_tensors", True), ("snapshot", False), ("compare", False), ("checksum", False)],
)
def test_a_check_of_weights_that_overwrites_them_is_a_change(
    monkeypatch: pytest.MonkeyPatch, action: str, changes: bool
) -> None:
    told: list[str] = []
    ext = SimpleNamespace(outside_in=[SimpleNamespace(weights_changed=lambda: told.append("ext"))])
    monkeypatch.setattr(runtime, "current", ext)
    monkeypatch.setattr(weight_updates, "listeners", {lambda: told.append("packed")})
    (hook,) = (each for each in weight_updates.HOOKS if each.target.endswith(".check_weights"))
    result = SimpleNamespace(success=False, message="half of it")
    assert hook.function(lambda *_: result, None, SimpleNamespace(action=action)) is result
    assert told == ["packed", "ext"] * changes


def test_powers_are_told_of_weights_if_the_update_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    ext = SimpleNamespace(outside_in=[SimpleNamespace(weights_changed=lambda: told.append("ext"))])
    monkeypatch.setattr(runtime, "current", ext)

    def update(*_: object) -> None:
        raise RuntimeError("half of it")

    with pytest.raises(RuntimeError, match="half"):
        weight_updates.HOOKS[0].function(update, None, None)
    assert told == ["ext"]


@pytest.mark.parametrize(
    ("retracted", "tokens", "finished", "sent"),
    [
        (True, 3, False, False),
        (True, 4, False, True),
        (False, 3, False, True),
        (True, 3, True, True),
    ],
)
def test_nothing_is_sent_of_a_retracted_request_without_new_tokens(
    monkeypatch: pytest.MonkeyPatch, retracted: bool, tokens: int, finished: bool, sent: bool
) -> None:
    monkeypatch.setattr(runtime, "current", SimpleNamespace())
    req = SimpleNamespace(
        is_retracted=retracted, output_ids=[1] * tokens, send_token_offset=3,
        finished=lambda: finished,
    )  # fmt: skip
    accepted: list[object] = []
    (hook,) = empty_outputs.HOOKS
    hook.function(lambda _outputs, *, req: accepted.append(req), None, req=req)
    assert accepted == [req] * sent
