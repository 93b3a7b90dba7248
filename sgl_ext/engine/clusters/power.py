"""The ``clusters`` power: decoding over contexts that are stored on SSDs (Swarm).

The prompt of a request that follows a context contains the request's own tokens only. SGLang
schedules and caches them as usual, under a key that names the context. Only their positions, which
begin behind the context, and their attention, which includes it, differ.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from sgl_ext.config import Clusters
from sgl_ext.engine.clusters import hooks
from sgl_ext.engine.core.meta_info import tell, told
from sgl_ext.engine.core.power import Front, Power
from sgl_ext.engine.core.requests import present
from sgl_ext.engine.core.served import Property
from sgl_ext.engine.core.sglang_types import (
    ForwardBatch,
    PrefillAdder,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
    TokenizerManager,
)
from sgl_ext.engine.core.tracing import trace
from sgl_ext.engine.core.unserved import LORA, PIPELINE
from sgl_ext.engine.front.custom_params import STORED
from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from sgl_ext.engine.clusters.contexts import StoredContexts
    from sgl_ext.engine.clusters.device import DeviceAttention
    from sgl_ext.engine.clusters.follower import Follower
    from sgl_ext.engine.clusters.forward import StoredForward
    from sgl_ext.engine.clusters.recorder import Recorder
    from sgl_ext.engine.core.runtime import ExtRuntime

logger = logging.getLogger(__name__)

NAMESPACE = "ext:stored"
"""Prefix of SGLang's ``extra_key`` of requests that follow a context."""


class ClustersPower(Power[Clusters]):
    """Power that serves requests that follow stored contexts, and records prompts to be stored.

    Attributes:
        stored: open contexts and their followers.
        recorder: recorder of prompts that are being stored.
        device: attention of followers if the KV pool is on a device; None if it is in host memory,
            where the attention backend reads :attr:`following`.
    """

    name = "clusters"
    needs_slab = True
    hooks = hooks.HOOKS
    path = "/ext/clusters"
    param = STORED
    unserved = (
        *PIPELINE,
        ("tp_size", lambda size: size > 1, "tensor parallelism"),
        *LORA,
        ("enable_streaming_session", bool, "streaming sessions"),
        ("skip_tokenizer_init", bool, "a disabled tokenizer"),
        ("disaggregation_mode", lambda mode: mode != "null", "prefill-decode disaggregation"),
    )

    stored: StoredContexts
    recorder: Recorder
    device: DeviceAttention | None = None

    def attention(self) -> dict[Property, str]:
        return {**super().attention(), Property.FOLLOWERS: self.name}

    def serve(self, app: FastAPI, manager: TokenizerManager, info: Mapping[str, Any]) -> Front:
        from sgl_ext.clusters.geometry import Geometry
        from sgl_ext.engine.clusters import api
        from sgl_ext.engine.clusters.service import StoredService
        from sgl_ext.engine.core.activation import REPORT_KEY

        memory, model = info[REPORT_KEY]["memory"], manager.model_config
        head_dim = memory["head_dim"]
        geometry = Geometry(
            memory["layers"], model.num_attention_heads, memory["kv_heads"], head_dim,
            memory["dtype"], head_dim**-0.5, memory["fingerprint"],
        )  # fmt: skip
        service = StoredService(
            manager, self.section, pool=info["max_total_num_tokens"],
            in_parts=not memory["on_device"], geometry=geometry,
        )  # fmt: skip
        api.install(app, service)
        return service

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        from sgl_ext.clusters.files import own_folders, sweep
        from sgl_ext.engine.clusters.contexts import StoredContexts
        from sgl_ext.engine.clusters.geometry import geometry_of
        from sgl_ext.engine.clusters.joined import verified_rope
        from sgl_ext.engine.clusters.reads import StoredReads
        from sgl_ext.engine.clusters.recorder import Recorder
        from sgl_ext.memory.streams import streams_of

        slab = ext.require_slab(self.name)
        self._ext, self._scheduler, config = ext, scheduler, self.section
        folders = own_folders(config.directories)
        if left := sweep(folders):
            logger.info("removed files of contexts that were not completely stored: %s", left)
        on_device = slab.device is not None
        self._runner = runner = scheduler.tp_worker.model_runner
        self._metrics = ext.metrics
        geometry = geometry_of(scheduler, slab.layout, on_device=on_device)
        longest = scheduler.model_config.context_len
        rope = verified_rope(runner.model)
        self.stored = StoredContexts(config, geometry, longest, ext.transfers, rope)
        self._reads = StoredReads(self.stored)
        forwards = scheduler.forward_stream if scheduler.enable_overlap else None
        self.recorder = Recorder(slab, geometry, folders[0], streams_of(slab.device, forwards))
        if on_device:
            from sgl_ext.engine.clusters.device import DeviceAttention

            self.device = DeviceAttention(self.stored, self.recorder, runner, slab.layout, geometry)
        if config.prefetch:
            from sgl_ext.engine.clusters.prefetch import Prefetch

            Prefetch(runner.model, runner.token_to_kv_pool, self.stored, config.prefetch)

    def arrive(self, req: Req) -> None:
        """Registers a request that follows or records a context, or aborts it if it is invalid."""
        from sgl_ext.engine.clusters.parameters import FollowsStored, read_stored

        self.stored.succeeded(req)
        if req.to_finish is not None:
            return
        try:
            asked = read_stored(req)
            if isinstance(asked, FollowsStored):
                if self.stored.follower(req.rid) is None:  # else queued again, after a retraction
                    follower = self.stored.ask(req, asked)
                    key = f"{NAMESPACE}:{follower.name}:{follower.share!r}"
                    req.extra_key = f"{key}:{req.extra_key}" if req.extra_key else key
            elif asked is not None:
                self.recorder.ask(req.rid, asked)
                if asked.start:
                    self.stored.ask_recorded(req, asked)
        except (ExtError, ValueError) as error:
            _refuse(req, error)

    def owns(self, req: Req) -> bool:
        """Returns whether the request is recorded, or waits for its context.

        All layers must compute the same tokens of a recorded prompt. The restoration of a request
        that cannot run yet would keep others waiting.
        """
        return req.rid in self.recorder or self.stored.waits(req.rid)

    def recomputes(self, req: Req) -> bool:
        """Returns whether the request is recorded: only tokens that are computed have queries."""
        return req.rid in self.recorder

    def ready(self, adder: PrefillAdder, req: Req, continuing: bool) -> bool:
        """Returns whether the request follows no context or its context is open."""
        try:
            opened = self.stored.opened(req.rid)
        except ExtError as error:
            self.stored.refuse(req.rid, error)
            return False
        follower = self.stored.follower(req.rid)
        if opened and follower is not None and not (follower.recorded or told(req, self.name)):
            waited = time.monotonic() - follower.tried  # without its time in the queue
            trace(req, "clusters_open", waited, context=follower.name, tokens=follower.tokens)
            tell(
                req,
                {
                    "power": self.name, "exact": follower.exact,
                    "context": follower.name, "tokens": follower.tokens,
                    "sparsity": follower.share,
                },
            )  # fmt: skip
        return opened

    def before_step(self, running: ScheduleBatch) -> None:
        if self.stored.any or self.recorder.any:
            rids = {req.rid for req in present(self._scheduler, running)}
            self.stored.keep(rids)
            self.recorder.keep(rids)
        self.stored.tidy()
        if self._metrics is not None:
            self.stored.measure(self._metrics)
        if self.stored.refused:
            for req in self._scheduler.waiting_queue:
                if (error := self.stored.refused.get(req.rid)) is not None:
                    for power in self._ext.inside_out:
                        power.forget(req.rid)  # its prompt is truncated
                    _refuse(req, error)
            self.stored.refused.clear()

    @property
    def following(self) -> StoredForward | None:
        """Rows of the current forward in host memory that follow contexts; None if no row does."""
        return cast("StoredForward | None", self.stored.running)

    def positioned(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns the batch with the positions of followers shifted behind their contexts."""
        lengths = _lengths(batch)
        if not (followers := self.stored.followers(batch.rids, len(lengths))):
            return batch
        import torch

        from sgl_ext.engine.kv.indices import upload

        behind = [0 if each is None else each.tokens for each in followers]
        shift = torch.tensor(behind).repeat_interleave(torch.tensor(lengths))
        batch = copy.copy(batch)
        shift = upload(shift.to(batch.positions.dtype), batch.positions.device)
        batch.positions = batch.positions + shift
        return batch

    def launching(self, batch: ForwardBatch, whole: bool) -> None:
        lengths = _lengths(batch)
        self.recorder.begin(batch.rids, self._contexts(batch), lengths)
        begin = self._in_host_memory if self.device is None else self.device.begin
        begin(batch, self.stored.followers(batch.rids, len(lengths)), lengths)

    def cut_over(self, batch: ForwardBatch) -> None:
        lengths = _lengths(batch)
        self.recorder.go_on(batch.rids, self._contexts(batch), lengths)
        go_on = self._in_host_memory if self.device is None else self.device.go_on
        go_on(batch, self.stored.followers(batch.rids, len(lengths)), lengths)

    def _contexts(self, batch: ForwardBatch) -> Sequence[int]:
        """Returns the number of tokens of each row's request if any request is recorded."""
        return batch.seq_lens_cpu.tolist() if self.recorder.any else ()

    def _in_host_memory(
        self, batch: ForwardBatch, followers: Sequence[Follower | None], lengths: Sequence[int]
    ) -> None:
        """Prepares the rows of followers for the attention backend of a pool in host memory."""
        self.stored.running = None
        if not followers:
            return
        from sgl_ext.engine.clusters.forward import StoredForward
        from sgl_ext.engine.clusters.own import Own

        table, contexts = self._runner.req_to_token_pool.req_to_token, batch.seq_lens_cpu.tolist()

        def own(some: Sequence[int]) -> Own:
            lines = batch.req_pool_indices[list(some)].tolist()
            slots = [table[line, : contexts[row]] for line, row in zip(lines, some, strict=True)]
            return Own.of([each.long().numpy() for each in slots], [lengths[row] for row in some])

        self.stored.running = StoredForward(self.stored, followers, lengths, own)

    def forwarding(self, batch: ScheduleBatch) -> None:
        if self.stored.any:
            self._reads.begin(batch)

    def forwarded(self, batch: ScheduleBatch) -> None:
        self._reads.end(batch)

    def eager(self, batch: ForwardBatch) -> bool:
        return self.device is not None and self.device.eager

    def released(self, tree: RadixTree, req: Req, checkpointed: bool) -> None:
        if not checkpointed:
            self.recorder.interrupted(req.rid)

    def weights_changed(self) -> None:
        """Aborts requests that follow contexts, and rejects new recordings.

        Contexts belong to the weights that the server started with.
        """
        message = (
            "an update of the model's weights has started; restart the server to use stored "
            "contexts again"
        )
        self.recorder.stale = message
        self.stored.give_up(message)

    def describe(self) -> Mapping[str, object]:
        return self.stored.describe()


def _lengths(batch: ForwardBatch) -> Sequence[int]:
    """Returns the number of new tokens of each row."""
    if batch.forward_mode.is_decode_or_idle():
        return [1] * batch.batch_size
    return batch.extend_seq_lens_cpu


def _refuse(req: Req, error: Exception) -> None:
    # SGLang runs an aborted request as a prompt of one token, which follows no context. Its KV must
    # not be cached under the request's key.
    req.skip_radix_cache_insert = True
    status = error.status if isinstance(error, ExtError) else HTTPStatus.BAD_REQUEST
    req.set_finish_with_abort(str(error), status)
