"""The ``chunks`` power: position-independent chunk caching (EPIC)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sgl_ext.chunks.methods import Recompute, link_method
from sgl_ext.config import Chunks, ExtConfig
from sgl_ext.engine.chunks import warmup
from sgl_ext.engine.chunks.report import COUNTED
from sgl_ext.engine.core.attention_backends import require_running
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.core.meta_info import tell, told
from sgl_ext.engine.core.power import Filler, Front, Power
from sgl_ext.engine.core.sglang_types import (
    ModelConfig,
    PrefillAdder,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
    ServerArgs,
    TokenizerManager,
)
from sgl_ext.engine.core.tracing import trace
from sgl_ext.engine.core.unserved import LORA, PIPELINE
from sgl_ext.engine.step import cached_tokens
from sgl_ext.planning.plan import Link, Source

if TYPE_CHECKING:
    import torch
    from fastapi import FastAPI

    from sgl_ext.engine.chunks.changed_values import ChangedValues
    from sgl_ext.engine.chunks.links import ChunkLinks
    from sgl_ext.engine.chunks.metrics import ChunksMetrics
    from sgl_ext.engine.chunks.report import Linked
    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.step.forward import PlannedForward
    from sgl_ext.engine.step.rows import Row


class ChunksPower(Power[Chunks]):
    """Power that links the KV of chunks into prompts at any position.

    Attributes:
        links: linked requests of the scheduler.
    """

    name = "chunks"
    needs_slab = plans_rows = True
    launcher_hooks = warmup.LAUNCHER_HOOKS
    path = "/ext/chunks"
    unserved = (
        *PIPELINE,
        ("enable_return_hidden_states", bool, "hidden states in answers"),
        ("enable_streaming_session", bool, "streaming sessions"),
        ("skip_tokenizer_init", bool, "a disabled tokenizer"),
        *LORA,
    )

    links: ChunkLinks
    changed_values: ChangedValues
    _linked: Linked | None = None
    """Report of the request whose admission is tried; None if its prompt has no chunks."""
    _unserved: Mapping[Recompute, str] = {}
    """Ways to choose the recomputed tokens that are refused, with the reasons."""
    _metrics: ChunksMetrics | None = None

    def __init__(self, config: ExtConfig, section: Chunks) -> None:
        super().__init__(config, section)
        self._counts: Counter[str] = Counter()

    def serve(self, app: FastAPI, manager: TokenizerManager, info: Mapping[str, Any]) -> Front:
        from sgl_ext.engine.chunks import api
        from sgl_ext.engine.chunks.service import context_service

        service = context_service(manager, self.section, self.config.tiers, info)
        api.install(app, service, self.section)
        return service

    def require_resolved(self, view: ServerArgs, model: ModelConfig) -> None:
        from sgl_ext.engine.chunks.parameters import refused
        from sgl_ext.engine.chunks.rope import require_architecture

        require_architecture(model.hf_config.architectures[0])
        unserved = refused(model.num_hidden_layers, view.tp_size)
        if (reason := unserved.get(link_method(self.section.method).recompute)) is not None:
            raise ActivationError(f"chunks.method {self.section.method}: {reason}")

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        from sglang.srt.runtime_context import get_parallel

        from sgl_ext.engine.chunks.changed_values import ChangedValues
        from sgl_ext.engine.chunks.links import open_links
        from sgl_ext.engine.chunks.parameters import refused
        from sgl_ext.memory.streams import streams_of

        require_running(scheduler.tp_worker.model_runner, self.attention())
        self._ext = ext
        layers = scheduler.model_config.num_hidden_layers
        self._unserved = refused(layers, get_parallel().tp_size)
        self.links = open_links(scheduler, ext, self.section)
        slab, pool = ext.require_slab(self.name), scheduler.tp_worker.model_runner.token_to_kv_pool
        self.changed_values = ChangedValues(
            self.links.search, pool, slab.layout.layers, streams_of(slab.device, None)
        )
        if ext.metrics is not None:
            from sgl_ext.engine.chunks.metrics import ChunksMetrics

            self._metrics = ChunksMetrics(ext.metrics)

    def owns(self, req: Req) -> bool:
        from sgl_ext.engine.chunks.parameters import composition_of

        return composition_of(req) is not None

    def arrive(self, req: Req) -> None:
        """Aborts a request with invalid parameters; starts to load the chunks of other requests."""
        if (owner := self._ext.owner(req)) is not None and owner is not self:
            return  # checked when it arrived; it needs its chunks only if its KV is lost
        from sgl_ext.engine.chunks.parameters import read_parameters

        if req.to_finish is not None:
            return  # SGLang has rejected it already
        try:
            read_parameters(req, self._unserved)
        except ValueError as error:
            req.set_finish_with_abort(str(error))
        self.links.ask(req)

    def needed(self, req: Req) -> None:
        self.links.ask(req)

    def plan(self, adder: PrefillAdder, req: Req) -> bool:
        """Returns whether the chunks are here. They are asked for when no other power defers the
        request any more: waiting for them is limited, and so is the time that they are kept."""
        owner = self._ext.owner(req)
        if owner is not None and owner is not self:
            return True
        self.links.plan(req.rid)  # of a prompt that goes on: more may have been loaded since
        return self.links.ready(req)

    def acquire(self, req: Req) -> None:
        self._linked = self.links.acquire(req)

    def concede(self, req: Req) -> bool:
        """Plans to compute all chunks of the request, so that none is kept for it."""
        if self._linked is None:
            return False
        self._linked = self.links.acquire(req, computing=True)
        return True

    def considered(self, adder: PrefillAdder, req: Req, admitted: bool) -> None:
        if self._linked is None:
            return
        self._linked = None
        if admitted:
            self.links.admitted(req)
            self.continued(req)
        else:
            self.links.release(req.rid)

    def continued(self, req: Req) -> None:
        """Reports the links of a prompt when its last part is admitted, as they are known then."""
        self.links.reached(req)
        last = req.extend_end >= len(req.full_untruncated_fill_ids)
        # Reported once, not again after a retraction.
        if not last or told(req, self.name) or (linked := self.links.report(req)) is None:
            return
        tell(req, linked)
        cached_tokens.count(req, self.name, linked["linked"] + linked["prefix"])
        self._counts["requests"] += 1
        for name in COUNTED:
            self._counts[name] += linked[name]
        if self._metrics is not None:
            self._metrics.count(linked)

    def forwarded(self, batch: ScheduleBatch) -> None:
        if not self.links.copied:
            return
        for req in batch.reqs:
            if (one := self.links.copied.get(req.rid)) is not None:
                trace(
                    req, "chunks_link", one.seconds, ended=one.ended,
                    method=one.method, tokens=one.tokens,
                )  # fmt: skip
        self.links.copied.clear()

    def describe(self) -> Mapping[str, object]:
        return {name: self._counts[name] for name in ("requests", *COUNTED)}

    @property
    def fillers(self) -> Mapping[type[Source], Filler]:
        return {Link: lambda *request: self.links.fill(*request)}

    @contextmanager
    def within(self, forward: PlannedForward, rows: list[Row]) -> Iterator[list[Row]]:
        """Surrounds a forward that selects the tokens to recompute."""
        queried, blended = {}, {}
        for at, _, start, end in forward.planned():
            rid = forward.rids[at]
            if (asked := self.links.queried(rid, start, end)) is not None:
                queried[at] = asked
            if (each := self.links.blended(rid, start, end)) is not None:
                blended[at] = each
        if queried:
            from sgl_ext.engine.chunks.query import with_selected

            rows = with_selected(forward, rows, queried)
        if not blended:
            yield rows
            return
        from sgl_ext.engine.chunks.blend import blending

        with blending(forward, rows, blended) as begin:
            yield begin

    def locked(self, req: Req) -> Sequence[torch.Tensor]:
        return self.links.locked(req.rid)

    def prefilled(self, rid: str) -> None:
        self.links.release(rid)
        self.links.forget(rid)

    def released(self, tree: RadixTree, req: Req, checkpointed: bool) -> None:
        from sgl_ext.engine.chunks.parameters import selection_of

        if (selection := selection_of(req)) is not None and req.finished():
            tell(req, {"power": self.name, "selected": self.changed_values.select(req, selection)})

    def forget(self, rid: str) -> None:
        self.links.forget(rid)
