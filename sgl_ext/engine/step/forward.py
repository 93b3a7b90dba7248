"""Forward that follows prefill plans: existing KV is copied in place, the rest becomes rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.releases import forward_context
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import ForwardBatch, ModelRunner
from sgl_ext.engine.kv.indices import on_host
from sgl_ext.engine.step import rows
from sgl_ext.engine.step.rows import Row
from sgl_ext.planning.plan import Compute, PrefillPlan, Source, Span


@dataclass
class PlannedForward:
    """An extend forward, some of whose requests have plans.

    Attributes:
        original: SGLang's ``ModelRunner.forward``.
        runner: SGLang's ``ModelRunner``.
        batch: SGLang's ``ForwardBatch`` of whole requests.
        rids: ids of the requests, in the order of the batch; the lists below have the same order.
        plans: plan of each request; None for a request without one.
        prefixes: first token of each request that is computed or filled.
        ends: end of these tokens of each request.
        cut_over: whether the model's forward continues with other rows between two layers already,
            which it can do only once.
    """

    ext: ExtRuntime
    original: Original
    runner: ModelRunner
    batch: ForwardBatch
    rids: Sequence[str]
    plans: Sequence[PrefillPlan | None]
    prefixes: Sequence[int]
    ends: Sequence[int]
    cut_over: bool = False

    def planned(self) -> Iterator[tuple[int, PrefillPlan, int, int]]:
        """Yields place in the batch, plan, first token and end of each request that has a plan."""
        every = zip(self.plans, self.prefixes, self.ends, strict=True)
        for at, (plan, start, end) in enumerate(every):
            if plan is not None:
                yield at, plan, start, end

    def row(self, at: int) -> int:
        """Returns the row of a request in SGLang's table of slots."""
        rows = self.batch.req_pool_indices_cpu
        return int((self.batch.req_pool_indices if rows is None else rows)[at])

    def slots(self, at: int) -> NDArray[np.int64]:
        """Returns the slots of a request's computed or filled tokens, int64 ``[tokens]``."""
        start, end, row = self.prefixes[at], self.ends[at], self.row(at)
        slots = self.runner.token_to_kv_pool_allocator.known.extended(row)
        if slots is None or len(slots) != end - start:
            slots = on_host(self.runner.req_to_token_pool.req_to_token[row, start:end])
        return slots

    def run(self, batch: ForwardBatch) -> object:
        """Runs another ``ForwardBatch`` with the same runner."""
        return _launch(self.ext, not self.cut_over, self.original, self.runner, batch)

    @contextmanager
    def replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Has ``forward`` run in place of the model's next forward.

        SGLang's runner calls the attribute of the model object, which hides the method of its
        class.

        Raises:
            RuntimeError: the model's forward continues with other rows already.
        """
        if self.cut_over:
            raise RuntimeError("the forward already continues with other rows")
        model, self.cut_over = self.runner.model, True
        model.forward = forward
        try:
            yield
        finally:
            del model.forward

    @contextmanager
    def cutting_over(
        self, before: Sequence[Row], after: Sequence[Row], first: ForwardBatch
    ) -> Iterator[ForwardBatch]:
        """Continues with other rows between two layers.

        Args:
            before: rows of the first layers.
            after: rows of the other layers, a subset of ``before``.
            first: the ``ForwardBatch`` of ``before``, after the first layers.

        Yields:
            The ``ForwardBatch`` of ``after``, for calls of the model's layers inside the block.
        """
        from sglang.srt.model_executor.forward_context import get_forward_context

        second = rows.handed_over(self.batch, before, after, first)
        self.ext.split = rows.split_of(self.batch, after)
        for power in self.ext.outside_in:
            power.cut_over(second)
        self.runner.attn_backend.init_forward_metadata(second)
        with forward_context(get_forward_context(), second):
            yield second


def forward(
    ext: ExtRuntime,
    original: Original,
    runner: ModelRunner,
    batch: ForwardBatch,
    *args: object,
    **kw: object,
) -> object:
    """Runs SGLang's ``ForwardBatch``, according to plans if any of its requests has one."""
    if not ext.plans or not batch.forward_mode.is_extend_without_speculative():
        return _launch(ext, True, original, runner, batch, *args, **kw)
    plans = [ext.plans.get(rid) for rid in batch.rids]
    if not any(plan is not None for plan in plans):
        return _launch(ext, True, original, runner, batch, *args, **kw)
    planned = PlannedForward(
        ext, original, runner, batch, batch.rids, plans,
        batch.extend_prefix_lens_cpu, batch.seq_lens_cpu.tolist(),
    )  # fmt: skip
    _fill(planned)
    parts = rows.rows_of(plans, planned.prefixes, planned.ends)
    with ExitStack() as surrounding:
        surrounding.callback(setattr, ext, "eager", False)
        ext.eager = True
        surrounding.enter_context(rows.any_number(runner, sum(batch.extend_seq_lens_cpu)))
        for power in ext.outside_in:
            parts = surrounding.enter_context(power.within(planned, parts))
        try:
            ext.split = rows.split_of(batch, parts)
            part = rows.split(batch, parts)
            output = _launch(ext, not planned.cut_over, original, runner, part, *args, **kw)
        finally:
            ext.split = None
    for at, plan, _, end in planned.planned():
        if end >= len(plan):
            ext.prefilled(batch.rids[at])
    return output


def _fill(planned: PlannedForward) -> None:
    """Copies the KV that exists already into the slots of the forward's tokens.

    Raises:
        RuntimeError: a plan has a source that no power fills.
    """
    for at, plan, start, end in planned.planned():
        by_source: dict[type[Source], list[Span]] = {}
        for span in plan.between(start, end):
            by_source.setdefault(type(span.source), []).append(span)
        by_source.pop(Compute, None)
        if not by_source:
            continue
        slots = planned.slots(at)
        for source, spans in by_source.items():
            if (fill := planned.ext.fillers.get(source)) is None:
                raise RuntimeError(f"{planned.rids[at]}: no power fills {spans[0]}")
            fill(planned.rids[at], spans, start, slots)


def _launch(
    ext: ExtRuntime,
    whole: bool,
    original: Original,
    runner: ModelRunner,
    batch: ForwardBatch,
    *args: object,
    **kw: object,
) -> object:
    """Runs SGLang's ``ModelRunner.forward`` after the powers have seen its rows."""
    for power in ext.outside_in:
        power.launching(batch, whole)
    return original(runner, batch, *args, **kw)


def _logits(metadata: object, _class: object, batch: ForwardBatch) -> object:
    # The split is no attribute of the batch, because SGLang's runners copy it field by field.
    ext = runtime.current
    if ext is not None and ext.split is not None:
        ext.split.put_in(metadata, batch.return_logprob)
    return metadata


HOOKS = (
    hooks.Hook(
        "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
        "after",
        _logits,
        "SGLang computes logits for each row of a batch",
    ),
)

_EXECUTE = "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend"
SEAMS = (
    hooks.Seam(f"model.forward in {_EXECUTE}", hooks.uses(_EXECUTE, "model", "forward")),
    *rows.SEAMS,
)
"""Attribute of the model object that :meth:`PlannedForward.replaced` sets, and an option that
:func:`rows.any_number` sets."""
