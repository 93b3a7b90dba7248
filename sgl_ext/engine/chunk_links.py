"""Links chunks into requests: finds their KV in SGLang's tree, keeps it, and copies it in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_ext.chunks.composition import Composition, LinkedChunk, Selection, path_of
from sgl_ext.chunks.rotation import FROM, FROM_PITCH, TO, TO_PITCH, TOKENS, RotatingCopy
from sgl_ext.engine import hooks
from sgl_ext.engine.rope import rope_of
from sgl_ext.memory.runs import run_starts
from sgl_ext.memory.slab import Slab
from sgl_ext.plan import Link, PrefillPlan, Span
from sgl_ext.runtime import ExtRuntime

COMPOSITION, SELECTION = "ext_composition", "ext_selection"
"""Keys of a request's ``custom_params``: what its prompt is made of; what is asked of a chunk."""

T = TypeVar("T")


@dataclass
class _Found:
    """A chunk's KV on the device."""

    slots: NDArray[np.int64]
    """Of the chunk's tokens, from the first one on; maybe not of all."""
    origin: int
    """Position that its first token was computed at."""
    lock: Any


@dataclass
class LinkedRequest:
    """A request whose prompt holds chunks, from its admission until its prefill has ended."""

    plan: PrefillPlan
    chunks: Sequence[_Found | None]
    """None for one that lies in the prefix that the request has already."""


class Linked(TypedDict):
    """What was linked into a request, for its ``meta_info``."""

    power: str
    exact: bool
    method: str
    linked: int
    """Tokens whose KV is a chunk's."""
    recomputed: int
    """Tokens of chunks that are computed, as the method wants it."""
    missing: int
    """Tokens of chunks that are computed because there was no KV of them."""


class ChunkLinks:
    """The linked requests of one scheduler; its thread calls.

    Args:
        tree: SGLang's radix cache.
        pool: SGLang's view of the slab.
        slab: where KV lies.
        plans: takes the plan of each request that is acquired.
    """

    def __init__(
        self, tree: Any, pool: Any, slab: Slab, copy: RotatingCopy, plans: dict[str, PrefillPlan]
    ) -> None:
        self._tree = tree
        self._plans = plans
        self._slab = slab
        self._pool = pool
        self._copy = copy
        self._requests: dict[str, LinkedRequest] = {}

    def acquire(self, req: Any) -> Linked | None:
        """Finds and locks the chunks behind the prefix that SGLang's ``req`` has; makes its plan.

        A chunk that is not there, or not all of it, is computed.
        """
        self.release(req.rid)
        if (composition := composition_of(req)) is None:
            return None
        chunks = [
            None
            if chunk.at + chunk.length <= req.prefix_len
            else self._find(req, composition, chunk)
            for chunk in composition.chunks
        ]
        found = [0 if chunk is None else len(chunk.slots) for chunk in chunks]
        plan = composition.plan(len(req.origin_input_ids), found)
        self._requests[req.rid] = LinkedRequest(plan, chunks)
        self._plans[req.rid] = plan
        return _report(composition, plan, req.prefix_len)

    def fill(self, rid: str, start: int, end: int, slots: NDArray[np.int64]) -> None:
        """Copies what the plan links of tokens ``start .. end - 1`` to ``slots`` of theirs."""
        request = self._requests[rid]
        spans: dict[tuple[int, int], list[Span]] = {}
        for span in request.plan.between(start, end):
            if isinstance(span.source, Link):
                spans.setdefault((span.source.chunk, span.source.at), []).append(span)
        for (number, at), parts in spans.items():
            if (chunk := request.chunks[number]) is None:
                raise RuntimeError(f"{rid}: chunk {number} was taken to lie before token {start}")
            sources = np.concatenate([chunk.slots[one.start - at : one.end - at] for one in parts])
            targets = np.concatenate([slots[one.start - start : one.end - start] for one in parts])
            self._copy(self._runs(sources, targets), at - chunk.origin)

    def select(self, req: Any, selection: Selection) -> list[int] | None:
        """The chunk's tokens, ascending, whose values differ most; None if the KV is gone."""
        start = len(selection.preparation)
        tokens = req.origin_input_ids[start : start + selection.length]
        ways = []
        for before in (selection.preparation, selection.other):
            slots, lock = self._slots(selection.namespace, req.cache_salt, before, tokens)
            self._tree.unlock(lock)  # nothing is evicted before this has returned
            if len(slots) < len(tokens):
                return None
            ways.append(torch.from_numpy(slots))
        one, other = ways
        changed = torch.zeros(len(tokens))
        for layer in range(self._slab.layout.layers):
            values = self._pool.get_value_buffer(layer)
            here, there = values[one].float(), values[other].float()
            changed += (here - there).square().sum((1, 2)) / there.square().sum((1, 2))
        most = min(selection.count, len(tokens))
        chosen: list[int] = changed.topk(most).indices.sort().values.tolist()
        return chosen

    def release(self, rid: str) -> None:
        """The request's prefill has ended, or it does not come to it: its chunks may go."""
        self._plans.pop(rid, None)
        request = self._requests.pop(rid, None)
        for chunk in () if request is None else request.chunks:
            if chunk is not None:
                self._tree.unlock(chunk.lock)

    def _find(self, req: Any, composition: Composition, chunk: LinkedChunk) -> _Found:
        before = composition.preparations[chunk.preparation]
        tokens = req.origin_input_ids[chunk.at : chunk.at + chunk.length]
        slots, lock = self._slots(composition.namespace, req.cache_salt, before, tokens)
        return _Found(slots, len(before), lock)

    def _slots(
        self, namespace: str, salt: str | None, before: Sequence[int], tokens: Sequence[int]
    ) -> tuple[NDArray[np.int64], Any]:
        """Slots of a chunk's tokens, from the first one on as far as they are in the device, and
        the lock that keeps them there."""
        path = path_of(before, tokens, self._tree.page_size)
        key = RadixKey(path, namespace, cache_salt=salt)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        node, root = match.last_device_node, self._tree.root_node_handle(namespace)
        slots = self._tree.tree_core.collect_full_device_indices(node, root).numpy()
        end = min(len(before) + len(tokens), match.device_prefix_len)
        return slots[len(before) : end], self._tree.lock(node)

    def _runs(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self._slab.layout.token_bytes
        first = run_starts(sources, targets)
        runs = np.empty((len(first), 5), np.int64)
        runs[:, FROM] = self._slab.address + sources[first] * size
        runs[:, TO] = self._slab.address + targets[first] * size
        runs[:, TOKENS] = np.diff(first, append=len(sources))
        runs[:, [FROM_PITCH, TO_PITCH]] = size
        return runs


def _report(composition: Composition, plan: PrefillPlan, prefix: int) -> Linked:
    inside = [(max(one.at, prefix), one.at + one.length) for one in composition.chunks]
    tokens = sum(max(end - begin, 0) for begin, end in inside)
    linked = len(plan) - prefix - plan.computed(prefix, len(plan))
    wanted = sum(
        chunk.at + offset >= prefix for chunk in composition.chunks for offset in chunk.recompute
    )
    return Linked(
        power="chunks", exact=False, method=composition.method, linked=linked,
        recomputed=wanted, missing=tokens - wanted - linked,
    )  # fmt: skip


def open_links(scheduler: Any, ext: ExtRuntime) -> ChunkLinks:
    """The links of a scheduler that has its model and pool.

    Raises:
        ActivationError: its model's keys cannot be moved, or its KV does not lie in the slab.
    """
    if ext.slab is None:
        raise hooks.ActivationError(
            f"chunks need the block-major layout, and {ext.layer_major_because}"
        )
    rope = rope_of(scheduler.tp_worker.model_runner.model)
    try:
        copy = RotatingCopy(ext.slab.layout, rope)
    except ValueError as error:
        raise hooks.ActivationError(f"chunks do not serve this KV: {error}") from None
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    return ChunkLinks(scheduler.tree_cache, pool, ext.slab, copy, ext.plans)


def composition_of(req: Any) -> Composition | None:
    """What the request says of its prompt; raises ValueError where that cannot be."""
    composition = _parameter(req, COMPOSITION, Composition)
    if composition is not None:
        composition.check(len(req.origin_input_ids))
    return composition


def selection_of(req: Any) -> Selection | None:
    """What the request asks of the chunk that it computes; raises ValueError if that cannot be."""
    return _parameter(req, SELECTION, Selection)


def _parameter(req: Any, name: str, type_: type[T]) -> T | None:
    params = req.sampling_params.custom_params
    if req.to_finish is not None:  # it was aborted, and its prompt cut off
        return None
    if not isinstance(params, dict) or name not in params:
        return None
    try:
        return msgspec.convert(params[name], type_, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None
