"""Ownership checks of KV blocks: a block with two owners raises before it is computed with."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ext.bench.harness.prefix_tree import prefix_tree
from sgl_ext.config import SwapExperiment, load
from sgl_ext.engine.core import dispatch, runtime
from sgl_ext.engine.kv import ownership
from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.engine.kv.ownership import TwoOwnersError
from sgl_ext.engine.swap import resume
from sgl_ext.engine.swap.ahead import SwapAhead
from sgl_ext.engine.swap.power import SwapPower
from sgl_ext.memory.tickets import State
from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import HOST, Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.swap.manager import SwapManager

PAGE, BLOCKS = 16, 96
PROMPT, ANSWER = 480, 40


class Engine(SimpleNamespace):
    """SGLang's radix tree, request pool and requests over our allocator, without a model."""

    def __init__(self) -> None:
        size = BLOCKS * PAGE
        allocator = BlockGroupAllocator(
            size, PAGE, torch.float32, "cpu", None, False, expected_tokens=PAGE
        )
        pool = ReqToTokenPool(size=8, max_context_len=size, device="cpu", enable_memory_saver=False)
        tree = prefix_tree(allocator, tree_core_backend="python")
        tree.req_to_token_pool = pool
        super().__init__(
            token_to_kv_pool_allocator=allocator, tree_cache=tree, req_to_token_pool=pool,
            max_total_num_tokens=size, invariant_checker=SimpleNamespace(
                _requests_owning_rows=list
            ),
            pool_stats_observer=SimpleNamespace(session_held_tokens=lambda: 0),
        )  # fmt: skip

    def request(self, rid: str, **options: Any) -> Req:
        """Returns a request with a prompt and ``ANSWER`` generated tokens."""
        params = SamplingParams(max_new_tokens=2 * ANSWER, temperature=0)
        req = Req(rid, "", array("q", range(PROMPT)), params, **options)
        req.output_ids.extend(range(1000, 1000 + ANSWER))
        return req

    def start(self, req: Req, end: int) -> None:
        """Gives the request a row: the tree's slots of its prefix, then its own up to ``end``."""
        tree, pool, allocator = self.tree_cache, self.req_to_token_pool, self.allocator
        req.kv.req_pool_idx = pool.alloc_rows(1)[0]
        req.lock = tree.lock(req.last_node)
        prefix = tree.path_device_indices(req.last_node)
        assert len(prefix) == req.prefix_len
        slots = allocator.alloc(-(-(end - req.prefix_len) // PAGE) * PAGE)
        row = torch.cat((prefix, slots))[:end]
        pool.write((req.kv.req_pool_idx, slice(0, end)), row.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = end

    @property
    def allocator(self) -> BlockGroupAllocator:
        allocator: BlockGroupAllocator = self.token_to_kv_pool_allocator
        return allocator

    def check_integrity(self) -> None:
        """Checks that the tree's blocks are in use, and the integrity of the block groups."""
        self.allocator.groups.check_integrity()
        assert self.allocator.unused(self.tree_cache.path_device_indices(self.deepest())) is None

    def deepest(self) -> Any:
        ids = array("q", [*range(PROMPT), *range(1000, 1000 + ANSWER)])
        return self.tree_cache.match_prefix(MatchPrefixParams(RadixKey(ids))).last_device_node


class Host:
    """Tier stack whose host memory has no page of the swapped requests."""

    def __init__(self) -> None:
        self.in_flight = SimpleNamespace(waited_seconds=0.0)
        self.layout = SimpleNamespace(page=PAGE)
        self.enabled = True
        self.stores = SimpleNamespace(ended=0, in_progress=0)
        self.holds = SimpleNamespace(let_go=lambda _pages: None)
        self.host = SimpleNamespace(
            present=lambda _keys: [], places=lambda _keys: np.empty(0, np.int64),
            pin=lambda _pages: None,
        )  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine()
    original = type(engine.tree_cache).insert
    monkeypatch.setattr(
        type(engine.tree_cache), "insert",
        lambda tree, params: ownership._inserted(original(tree, params), tree, params),
    )  # fmt: skip
    config = load({"swap": {"capacity": "1MiB", "swap_in": "wait"}})
    assert config.swap is not None
    ext: Any = runtime.ExtRuntime(config)
    stack: Any = Host()
    power = SwapPower(config, config.swap)
    power.ext, power.resuming = ext, []
    power.manager = SwapManager(stack, 4, SwapExperiment())
    power.ahead = SwapAhead(stack, Costs())
    ext.slab = object()
    ext.add(power)
    monkeypatch.setattr(runtime, "current", ext)
    yield engine


def sibling_answers(engine: Engine) -> None:
    """Inserts the prompt and answer of an ended request with the same tokens into the tree."""
    slots = engine.allocator.alloc(PROMPT + ANSWER // PAGE * PAGE)
    ids = array("q", [*range(PROMPT), *range(1000, 1000 + ANSWER)])[: len(slots)]
    engine.tree_cache.insert(InsertParams(key=RadixKey(ids), value=slots))


def test_a_failed_resume_leaves_the_request_unchanged(engine: Engine) -> None:
    """Resumes a request whose partial last page is lost, so that it is recomputed.

    The request wants logprobs, so SGLang's look-up ends with the prompt, although the tree has the
    same answer of another request after it. The request is recomputed from the end of that look-up.
    """
    sibling_answers(engine)
    tree = engine.tree_cache
    req = engine.request("r", return_logprob=True)
    req.logprob_start_len = PROMPT
    swap = runtime.current.swap.manager
    swap.out("r", PROMPT + ANSWER - 1, [b"%d" % at for at in range(32)], tail=None)
    req.init_next_round_input(tree)
    tree.linker = SimpleNamespace(hit_markers={"r": "SGLang's"}, private_load_indices={})
    before = (req.prefix_len, req.last_node, req.kv.cache_protected_len)
    assert before[0] == PROMPT

    adder: Any = SimpleNamespace(
        page_size=PAGE, tree_cache=tree, memory_budget=SimpleNamespace(total_offset=0)
    )
    power = runtime.current.swap
    assert resume.look_up(power, tree, req).tokens == PROMPT + 2 * PAGE
    assert resume.try_resume(power, adder, req, swap.get("r")) is None
    assert "r" not in swap
    assert (req.prefix_len, req.last_node, req.kv.cache_protected_len) == before
    assert tree.linker.hit_markers == {"r": "SGLang's"}
    ownership.check_admitted(adder, req)

    engine.start(req, PROMPT + ANSWER)
    req.refresh_fill_ids()
    tree.linker = None
    tree.checkpoint_into_tree(req, up_to=PROMPT + ANSWER - 1)
    engine.check_integrity()
    assert ownership.owned_tokens(engine, SimpleNamespace(reqs=[req])) == BLOCKS * PAGE


@pytest.mark.parametrize("slow", [True, False])
def test_a_swapped_request_is_recomputed_if_that_is_faster(engine: Engine, slow: bool) -> None:
    """Host memory has all pages, behind a link that is slower or faster than computing.

    To recompute, SGLang must not load what it has found in host memory, either.
    """
    tree, power = engine.tree_cache, runtime.current.swap
    tokens = PROMPT + ANSWER // PAGE * PAGE
    load = LoadCost(0.0, 1.0 if slow else 1e-6)
    runtime.current.costs.seed(ComputeCost(0.0, 1e-3), {HOST: load}, None)
    power.manager.stack.host.lookup = len
    power.manager.stack.host.use = lambda keys: np.arange(len(keys))
    power.manager.out("r", tokens, [b"%d" % at for at in range(tokens // PAGE)], tail=None)
    req = engine.request("r")
    req.init_next_round_input(tree)
    req.host_hit_length = tokens
    tree.linker = SimpleNamespace(hit_markers={"r": "SGLang's"}, private_load_indices={})
    adder: Any = SimpleNamespace(
        page_size=PAGE, tree_cache=tree, can_run_list=[], running_batch=SimpleNamespace(reqs=[]),
        max_running_requests=None, rem_total_tokens=BLOCKS * PAGE, per_req_token_overhead=PAGE,
        memory_budget=SimpleNamespace(total_offset=0), _lock_node=lambda _node: nullcontext(),
    )  # fmt: skip
    result = resume.try_resume(power, adder, req, power.manager.get("r"))
    assert not tree.linker.hit_markers
    assert ("r" in power.manager) is not slow
    assert power.manager.counts.recomputed == slow
    assert [one.rid for one in power.resuming] == ["r"] * (not slow)
    assert result == (None if slow else AddReqResult.CONTINUE)
    assert req.host_hit_length == (0 if slow else tokens)
    if slow:
        assert (req.lock, adder.memory_budget.total_offset) == (None, 0)


@pytest.mark.parametrize("room", [True, False])
def test_a_resumed_request_adopts_a_prefix_beyond_its_prompt(engine: Engine, room: bool) -> None:
    """Resumes a request whose first answer pages the tree has on the device.

    If memory is exhausted afterwards, the request stays in the queue and holds no lock or pages.
    """
    sibling_answers(engine)
    tree, power = engine.tree_cache, runtime.current.swap
    swap = power.manager
    req = engine.request("r", return_logprob=True)
    req.logprob_start_len = PROMPT
    tokens = PROMPT + ANSWER - 1
    saved: Any = SimpleNamespace(
        pages=np.zeros(1, np.int64), ticket=SimpleNamespace(poll=lambda: True, state=State.DONE)
    )
    swap.stack.host.lookup = len
    swap.stack.host.use = lambda keys: np.arange(len(keys))
    swap.out("r", tokens, [b"%d" % at for at in range(tokens // PAGE)], tail=saved)
    req.init_next_round_input(tree)
    tree.linker = SimpleNamespace(hit_markers={"r": "SGLang's"}, private_load_indices={})
    assert (req.prefix_len, tree.evictable_size()) == (PROMPT, PROMPT + 2 * PAGE)

    adder: Any = SimpleNamespace(
        page_size=PAGE, tree_cache=tree, can_run_list=[], running_batch=SimpleNamespace(reqs=[]),
        max_running_requests=None, rem_total_tokens=BLOCKS * PAGE, per_req_token_overhead=PAGE,
        memory_budget=SimpleNamespace(total_offset=0), _lock_node=lambda _node: nullcontext(),
    )  # fmt: skip
    assert resume.try_resume(power, adder, req, swap.get("r")) == AddReqResult.CONTINUE
    deeper = PROMPT + 2 * PAGE
    assert (req.prefix_len, req.kv.cache_protected_len, req.extend_end) == (deeper, deeper, tokens)
    assert req.last_node is engine.deepest()
    assert not tree.linker.hit_markers
    assert adder.memory_budget.total_offset >= tokens - deeper
    assert tree.evictable_size() == 0
    ownership.check_resumed(req)

    scheduler = SimpleNamespace(
        page_size=PAGE, tree_cache=tree, token_to_kv_pool_allocator=engine.allocator
    )
    held = None if room else engine.allocator.alloc(engine.allocator.available_size())
    swapped = swap.get("r")
    if room:
        assert resume.fitting(power, scheduler) == [req]
        tree.unlock(req.lock)
    else:
        assert resume.fitting(power, scheduler) == []
        assert req.lock is None and swapped.coming is None
        engine.allocator.free(held)
    assert tree.evictable_size() == deeper
    engine.check_integrity()


def test_a_protected_length_below_the_prefix_raises(engine: Engine) -> None:
    """Checks a request whose prefix is longer than the part that it takes for the tree's."""
    sibling_answers(engine)
    req = engine.request("r")
    req.init_next_round_input(engine.tree_cache)
    assert req.prefix_len == PROMPT + 2 * PAGE
    adder: Any = SimpleNamespace(tree_cache=engine.tree_cache)
    ownership.check_admitted(adder, req)
    req.kv.cache_protected_len = PROMPT
    with pytest.raises(TwoOwnersError, match="counts 480 as owned by the radix tree"):
        ownership.check_admitted(adder, req)
    with pytest.raises(TwoOwnersError, match="counts 480 as owned by the radix tree"):
        ownership.check_resumed(req)
    engine.start(req, PROMPT + ANSWER)
    engine.allocator.free_group_begin()  # as SGLang does while it processes the results of a batch
    with pytest.raises(TwoOwnersError, match="the radix tree still owns it"):
        engine.tree_cache.checkpoint_into_tree(req, up_to=PROMPT + ANSWER - 1)


def test_check_admitted_accepts_a_tree_without_external_cache(engine: Engine) -> None:
    req = engine.request("r")
    req.init_next_round_input(engine.tree_cache)
    adder: Any = SimpleNamespace(tree_cache=SimpleNamespace())
    ownership.check_admitted(adder, req)


def test_a_batch_with_a_block_of_two_owners_raises(engine: Engine) -> None:
    sibling_answers(engine)
    req = engine.request("r")
    req.init_next_round_input(engine.tree_cache)
    engine.start(req, PROMPT + ANSWER)
    batch = SimpleNamespace(reqs=[req])
    ownership.check_step(engine, batch)
    engine.allocator.free_page_ids(
        torch.tensor([int(engine.req_to_token_pool.req_to_token[req.kv.req_pool_idx, 0]) // PAGE])
    )
    with pytest.raises(TwoOwnersError, match="blocks have two owners"):
        ownership.check_step(engine, batch)


@pytest.mark.parametrize("grouped", [False, True])
def test_freeing_a_block_twice_raises(engine: Engine, grouped: bool) -> None:
    allocator = engine.allocator
    slots = allocator.alloc(2 * PAGE)
    twice = torch.cat((slots, slots[PAGE : PAGE + 1]))
    if grouped:
        allocator.free_group_begin()
        allocator.free(slots)
        assert allocator.unused(slots) == int(slots[0]) // PAGE
        allocator.free(slots[PAGE : PAGE + 3])
        with pytest.raises(ValueError, match="released twice"):
            allocator.free_group_end()
    else:
        with pytest.raises(ValueError, match="freed twice"):
            allocator.free(twice)
        allocator.free(slots)
        with pytest.raises(ValueError, match="released twice"):
            allocator.free(slots[:PAGE])


def test_checks_are_hooked_into_insert_and_run_batch() -> None:
    targets = {hook.target for hook in (*ownership.HOOKS, *dispatch.HOOKS)}
    assert any(target.endswith("UnifiedRadixCache.insert") for target in targets)
    assert any(target.endswith("Scheduler.run_batch") for target in targets)
