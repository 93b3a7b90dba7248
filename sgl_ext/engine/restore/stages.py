"""The ``restore`` power in pipeline stages, which restore their layers at once (CacheFlow §3.2)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from sgl_ext.config import Restore
from sgl_ext.config.restore import EXPERIMENT, IN_SEQUENCE
from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.meta_info import tell
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler
from sgl_ext.engine.core.tracing import trace
from sgl_ext.engine.restore import setup
from sgl_ext.engine.restore.prompt_forward import compute, extend_batch
from sgl_ext.engine.restore.totals import RestoreTotals
from sgl_ext.engine.step import cached_tokens
from sgl_ext.errors import ExtError
from sgl_ext.planning.request import Restored
from sgl_ext.planning.staged_restorations import Admitted, StagedRestorations
from sgl_ext.planning.staged_stores import PairedStores, Storing
from sgl_ext.restore.stage import Arrivals, restore
from sgl_ext.tiers.arena import Pages

if TYPE_CHECKING:
    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.restore.input_rows import InputRows
    from sgl_ext.planning.planner import Planner
    from sgl_ext.tiers.stack import TierStack

logger = logging.getLogger(__name__)
_DEADLINE_S = 300.0
"""Deadline of a restoration, in seconds; a stage that exceeds it ends the server."""


class StagedRestorePower(Power[Restore]):
    """Restoration of prefixes in a pipeline stage, before the stage waits for the one before it.

    Attributes:
        prefixes: prefixes that all stages restore.
        rows: boundary activations of this stage; None in the first one.
    """

    name = "restore"

    prefixes: StagedRestorations
    planner: Planner
    stack: TierStack
    rows: InputRows | None = None
    _in_sequence: bool = False
    _totals: RestoreTotals

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        from sglang.srt.runtime_context import get_parallel, get_schedule

        if ext.tiers is None or self.config.tiers is None:
            raise RuntimeError("restore is configured without tiers")
        self._scheduler, self.stack, linker = scheduler, ext.tiers.stack, ext.tiers.linker
        self.planner, first = ext.tiers.planner, get_parallel().pp_rank == 0
        setup.require_stages(scheduler.tp_worker.model_runner.model)
        setup.require_unaligned(scheduler.truncation_align_size)
        setup.prepare(
            self.section, self.stack.layout.page, get_schedule().chunked_prefill_size, ext.costs
        )
        storing: Storing = self.stack.stores
        if not first:
            from sgl_ext.engine.restore.input_rows import InputRows

            config = scheduler.model_config
            self.rows = InputRows(ext, self.config.tiers, config.hidden_size, config.dtype)
            storing = PairedStores(storing, self.rows)
        self.prefixes = StagedRestorations(
            self.stack, self.planner, linker.agreement, self.rows, self._running
        )
        linker.use_in_stages(self.prefixes, storing)
        if experiment := os.environ.get(EXPERIMENT):
            logger.warning("%s is set: this server is part of an experiment", EXPERIMENT)
        self._in_sequence = experiment == IN_SEQUENCE
        # The other stages restore the same requests.
        self._totals = RestoreTotals(ext.metrics if first else None)

    def matching(self, req: Req, prefix: int) -> None:  # noqa: ARG002
        """Excludes prompts whose tokens alone do not determine their KV, and those of sessions."""
        if req.session is not None or req.multimodal_inputs is not None:
            self.prefixes.exclude(req.rid)

    def receive(self, original: Original, scheduler: Scheduler, batch: ScheduleBatch) -> object:
        """Surrounds the wait for what the stage before this one computes of the next batch."""
        received: Any = original(scheduler) if self._in_sequence else None
        for admitted in self.prefixes.admitted():
            self._restore(admitted, next(req for req in batch.reqs if req.rid == admitted.rid))
            self.prefixes.restored(admitted.rid)
        if not self._in_sequence:
            received = original(scheduler)
        if self.rows is not None:
            if "residual" not in received.tensors:
                raise ExtError(
                    "restore does not support this model in pipeline stages: a stage receives no "
                    "residual; remove the restore section"
                )
            self.rows.keep(batch.out_cache_loc, received["hidden_states"], received["residual"])
        return received

    def _restore(self, admitted: Admitted, req: Req) -> None:
        began, page = time.monotonic(), self.planner.page
        (run,) = admitted.want.runs
        blocks, row = admitted.blocks, req.kv.req_pool_idx
        runner = self._scheduler.tp_worker.model_runner
        table, ids = runner.req_to_token_pool.req_to_token, req.full_untruncated_fill_ids
        self.stack.holds.used(run.keys[: run.here])
        self.stack.holds.fill(admitted.here, blocks[: run.here])
        if self.rows is not None and admitted.inputs is not None:
            self.rows.overwritten(blocks[: run.here])
            self.rows.fill(admitted.inputs[: len(blocks) - run.here], blocks[run.here :])

        def work(begin: int, end: int) -> None:
            slots = table[row, begin:end].long()
            batch = extend_batch(torch.tensor(ids[begin:end]), row, begin, slots)
            compute(runner, batch, None if self.rows is None else self.rows[slots])

        def adopt(begin: int, end: int, places: Pages) -> None:
            first, last = ((at - run.start) // page for at in (begin, end))
            self.stack.holds.fill(places, blocks[first:last])

        inputs = Arrivals()
        inputs.come(run.start + len(run.keys) * page)
        found = restore(self.planner, admitted.want, inputs, work, adopt, _DEADLINE_S)
        tokens = (len(run.keys) - run.here) * page
        restored = found or Restored(loaded={}, computed=tokens, seconds=0.0)
        restored["seconds"] = time.monotonic() - began
        restored["loaded"]["host"] = restored["loaded"].get("host", 0) + run.here * page
        self._report(req, restored, len(run.keys) * page)

    def _report(self, req: Req, restored: Restored, tokens: int) -> None:
        """Reports a restoration; SGLang has counted its tokens as loaded from host memory."""
        tell(req, {"power": self.name, "exact": True, **restored})
        loaded = restored["loaded"]
        trace(req, self.name, restored["seconds"], computed=restored["computed"], **loaded)
        self._totals.count(restored)
        if not req.retracted_stain:
            req.cached_tokens -= tokens
            req.cached_tokens_host -= tokens
            for tier, held in loaded.items():
                cached_tokens.count(req, tier, held)

    def _running(self) -> int:
        return sum(len(batch.reqs) for batch in self._scheduler.running_mbs)

    def describe(self) -> Mapping[str, object]:
        return {"interrupted": 0, **self._totals.describe()}

    def poll(self) -> None:
        if self.rows is not None:
            self.rows.poll()

    def reset(self) -> None:
        self.prefixes.clear()
        if self.rows is not None:
            self.rows.reset()

    def weights_changed(self) -> None:
        self.prefixes.clear()
        if self.rows is not None:
            self.rows.disable()

    def close(self) -> None:
        self.prefixes.clear()
        if self.rows is not None:
            self.rows.close()


def _receive(original: Original, scheduler: Scheduler) -> object:
    power = None if runtime.current is None else runtime.current.restore
    batch = scheduler.cur_batch_for_debug
    if not isinstance(power, StagedRestorePower) or batch is None:
        return original(scheduler)
    return power.receive(original, scheduler, batch)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._pp_recv_proxy_tensors",
        "around",
        _receive,
        "SGLang calls nothing between the plan of a step and the wait for the stage before, in "
        "which this stage can restore its layers, and passes what it receives only to the model",
    ),
)
