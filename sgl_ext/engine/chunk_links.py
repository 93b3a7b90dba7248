"""Links chunks into requests: what their prompts are made of, and copies of the chunks' KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.chunks.composition import LEAD, Composition, Selection
from sgl_ext.chunks.rotation import FROM, FROM_PITCH, TO, TO_PITCH, TOKENS, RotatingCopy
from sgl_ext.engine import hooks
from sgl_ext.engine.chunk_search import ChunkSearch, Found, Wanted
from sgl_ext.engine.rope import rope_of
from sgl_ext.memory.slab import Slab
from sgl_ext.plan import Link, PrefillPlan, Span
from sgl_ext.runtime import ExtRuntime

COMPOSITION, SELECTION = "ext_composition", "ext_selection"
"""Keys of a request's ``custom_params``: what its prompt is made of; what is asked of a chunk."""
NO_BLEND = (
    "blend-R chooses tokens by the values of all KV heads, which tensor parallel ranks share "
    "out; choose another method"
)

T = TypeVar("T")


@dataclass
class LinkedRequest:
    """A request whose prompt holds chunks, from its admission until its prefill has ended."""

    composition: Composition
    plan: PrefillPlan
    found: dict[int, Found]
    """By the number of the chunk; those behind the prefix that the request has already."""


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
    prefix: int
    """Tokens before the first chunk whose KV, exact, is another prompt's."""


class ChunkLinks:
    """The linked requests of one scheduler; its thread calls.

    Args:
        pool: SGLang's view of the slab.
        slab: where KV lies.
        plans: takes the plan of each request that is acquired.
    """

    def __init__(
        self,
        search: ChunkSearch,
        pool: Any,
        slab: Slab,
        copy: RotatingCopy,
        plans: dict[str, PrefillPlan],
    ) -> None:
        self._search = search
        self._plans = plans
        self._slab = slab
        self._pool = pool
        self._copy = copy
        self._requests: dict[str, LinkedRequest] = {}

    def ask(self, req: Any) -> None:
        """SGLang's ``req`` has arrived: its chunks begin to come from where they are."""
        for number, wanted in self._wanted(req, 0):
            self._search.ask(_name(req, number), wanted)

    def ready(self, req: Any) -> bool:
        """Whether what comes of the request's chunks is here."""
        # Ranks, which answer together, are asked the same: of all chunks, whatever the first says.
        waiting = [name for name in _names(req) if not self._search.ready(name)]
        return not waiting

    def acquire(self, req: Any, *, computing: bool = False) -> Linked | None:
        """Finds and keeps the chunks behind the prefix that ``req`` has; makes its plan.

        A chunk that is not there, or not all of it, is computed.

        Args:
            computing: all of them are, and none is kept.
        """
        self.release(req.rid)
        if (composition := composition_of(req)) is None:
            return None
        found = {
            number: self._search.find(_name(req, number), wanted)
            for number, wanted in self._wanted(req, req.prefix_len)
            if not computing
        }
        for name in _names(req):
            self._search.forget(name)
        available = [
            len(found[number].addresses) if number in found else 0
            for number in range(len(composition.chunks))
        ]
        lead = len(found[LEAD].addresses) if LEAD in found else 0
        plan = composition.plan(len(req.origin_input_ids), available, lead)
        self._requests[req.rid] = LinkedRequest(composition, plan, found)
        self._plans[req.rid] = plan
        return report(composition, plan, req.prefix_len)

    def fill(self, rid: str, start: int, end: int, slots: NDArray[np.int64]) -> None:
        """Copies what the plan links of tokens ``start .. end - 1`` to ``slots`` of theirs."""
        request = self._requests[rid]
        spans: dict[Link, list[Span]] = {}
        for span in request.plan.between(start, end):
            if isinstance(span.source, Link):
                spans.setdefault(span.source, []).append(span)
        for link, parts in spans.items():
            if (chunk := request.found.get(link.chunk)) is None:
                raise RuntimeError(f"{rid}: {link} was taken to lie before token {start}")
            sources = np.concatenate(
                [chunk.addresses[one.start - link.at : one.end - link.at] for one in parts]
            )
            targets = np.concatenate([slots[one.start - start : one.end - start] for one in parts])
            self._copy(self._runs(sources, targets), link.at - chunk.origin)

    def blended(self, rid: str, start: int, end: int) -> tuple[NDArray[np.int64], int]:
        """Positions that are linked in ``start .. end - 1`` but may be computed, and how many of
        them are (CacheBlend)."""
        if (request := self._requests.get(rid)) is None:
            return np.empty(0, np.int64), 0
        positions, share = [], 0
        for span in request.plan.between(start, end):
            if not isinstance(span.source, Link) or span.source.chunk == LEAD:
                continue
            if blend := request.composition.chunks[span.source.chunk].blend:
                positions.append(np.arange(span.start, span.end))
                share += blend * (span.end - span.start)
        return np.concatenate([*positions, np.empty(0, np.int64)]), share // 100

    def select(self, req: Any, selection: Selection) -> list[int] | None:
        """The chunk's tokens, ascending, whose values differ most; None if the KV is gone."""
        start = len(selection.preparation)
        tokens = req.origin_input_ids[start : start + selection.length]
        ways = []
        for before in (selection.preparation, selection.other):
            wanted = Wanted(selection.namespace, req.cache_salt, before, tokens)
            found = self._search.find(req.rid, wanted)
            self._search.let_go(found)  # nothing is evicted before this has returned
            if len(found.slots) < len(tokens):
                return None
            ways.append(torch.from_numpy(found.slots))
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
        if (request := self._requests.pop(rid, None)) is not None:
            for found in request.found.values():
                self._search.let_go(found)

    def _wanted(self, req: Any, prefix: int) -> Iterator[tuple[int, Wanted]]:
        """What of the request's prompt, behind ``prefix`` tokens, there may be KV of."""
        if (composition := composition_of(req)) is None:
            return
        ids, salt = req.origin_input_ids, req.cache_salt
        lead = composition.chunks[0].at
        if lead > prefix:
            # What comes before any chunk is as in a prompt without chunks.
            plain = req.extra_key.removeprefix(composition.extra_key).removeprefix(":") or None
            yield LEAD, Wanted(plain, salt, (), ids[:lead])
        for number, chunk in enumerate(composition.chunks):
            if chunk.at + chunk.length > prefix and len(chunk.recompute) < chunk.length:
                before = composition.preparations[chunk.preparation]
                tokens = ids[chunk.at : chunk.at + chunk.length]
                yield number, Wanted(composition.namespace, salt, before, tokens)

    def _runs(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Both in the order of the prompt: addresses, and slots."""
        size = self._slab.layout.token_bytes
        breaks = (np.diff(sources) != size) | (np.diff(targets) != 1)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        runs = np.empty((len(first), 5), np.int64)
        runs[:, FROM] = sources[first]
        runs[:, TO] = self._slab.address + targets[first] * size
        runs[:, TOKENS] = np.diff(first, append=len(sources))
        runs[:, [FROM_PITCH, TO_PITCH]] = size
        return runs


def _name(req: Any, number: int) -> str:
    """What a chunk of the request is called while it is on its way."""
    return f"{req.rid}#{number}"


def _names(req: Any) -> list[str]:
    if (composition := composition_of(req)) is None:
        return []
    return [_name(req, number) for number in range(LEAD, len(composition.chunks))]


def report(composition: Composition, plan: PrefillPlan, prefix: int) -> Linked:
    """What ``plan`` does behind the ``prefix`` tokens that a request has already.

    After a retraction these may be more than the prompt's.
    """
    begin = min(prefix, len(plan))
    lead = linked = share = 0
    for start, end, source in plan.between(begin, len(plan)):
        if isinstance(source, Link) and source.chunk == LEAD:
            lead += end - start
        elif isinstance(source, Link):
            linked += end - start
            share += composition.chunks[source.chunk].blend * (end - start)
    tokens = sum(max(one.at + one.length - max(one.at, begin), 0) for one in composition.chunks)
    wanted = sum(
        chunk.at + offset >= begin for chunk in composition.chunks for offset in chunk.recompute
    )
    blended = share // 100
    return Linked(
        power="chunks", exact=False, method=composition.method, linked=linked - blended,
        recomputed=wanted + blended, missing=tokens - wanted - linked, prefix=lead,
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
    search = ChunkSearch(scheduler.tree_cache, ext.slab, ext.tiers)
    return ChunkLinks(search, pool, ext.slab, copy, ext.plans)


def read_parameters(req: Any, tp_size: int) -> None:
    """Reads what a request that arrives says of its prompt, once.

    Raises:
        ValueError: it cannot be; nothing of it is believed.
    """
    params = req.sampling_params.custom_params
    if not isinstance(params, dict):
        return
    given = {name: params.pop(name, None) for name in (COMPOSITION, SELECTION)}
    for name, type_ in ((COMPOSITION, Composition), (SELECTION, Selection)):
        if (value := given[name]) is None:
            continue
        try:
            read = value if isinstance(value, type_) else msgspec.convert(value, type_)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}") from None
        if isinstance(read, Composition):
            read.check(len(req.origin_input_ids), req.extra_key)
            if req.return_logprob:
                read.check_logprobs(req.logprob_start_len)
            if tp_size > 1 and any(chunk.blend for chunk in read.chunks):
                raise ValueError(NO_BLEND)
        params[name] = read


def composition_of(req: Any) -> Composition | None:
    """What the request's prompt is made of, if it says so."""
    return _parameter(req, COMPOSITION, Composition)


def selection_of(req: Any) -> Selection | None:
    """What the request asks of the chunk that it computes, if anything."""
    return _parameter(req, SELECTION, Selection)


def _parameter(req: Any, name: str, type_: type[T]) -> T | None:
    params = req.sampling_params.custom_params
    if req.to_finish is not None or not isinstance(params, dict):
        return None  # an aborted request's prompt is cut off
    value = params.get(name)
    return value if isinstance(value, type_) else None
