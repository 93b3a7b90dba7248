"""The ``tiers`` power: KV beyond the device, as SGLang's external cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from sgl_ext.config import Tiers
from sgl_ext.engine.core import planning, releases
from sgl_ext.engine.core.hooks import ActivationError, installed_sglang
from sgl_ext.engine.core.meta_info import tell
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.core.requests import reusable
from sgl_ext.engine.core.sglang_types import (
    ModelConfig,
    PrefillAdder,
    Req,
    ScheduleBatch,
    Scheduler,
    ServerArgs,
)
from sgl_ext.engine.core.tracing import trace
from sgl_ext.engine.core.unserved import Unserved, require_served
from sgl_ext.engine.tiers import hooks, page_hash
from sgl_ext.planning.profile import devices

if TYPE_CHECKING:
    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.tiers.linker import TierLinker
    from sgl_ext.engine.tiers.metrics import TierMetrics
    from sgl_ext.planning.planner import Planner
    from sgl_ext.tiers.loads import Restored
    from sgl_ext.tiers.stack import TierStack
    from sgl_ext.tiers.statistics import TierReport


class TiersPower(Power[Tiers]):
    """KV in host memory, on SSDs and in a distributed store.

    Attributes:
        linker: the external cache of SGLang's radix tree.
        stack: the tiers.
        planner: planner of the loads from lower tiers.
    """

    name = "tiers"
    needs_slab = True
    hooks = hooks.HOOKS
    unserved = (
        ("enable_unified_cache_external_linker", bool, "another external cache"),
        ("hicache_storage_backend", bool, "HiCache's storage"),
        ("enable_lmcache", bool, "LMCache"),
        ("enable_flexkv", bool, "FlexKV"),
    )
    unserved_with_pipeline: ClassVar[Unserved] = (
        ("tp_size", lambda size: size > 1, "tensor parallelism with pipeline parallelism"),
    )
    """Arguments that it does not serve together with pipeline parallelism: the stages agree, and
    each is one process."""

    linker: TierLinker
    stack: TierStack
    planner: Planner
    _metrics: TierMetrics | None = None
    _loading: list[tuple[Req, Mapping[str, Restored]]]
    """Requests whose load has not been traced yet."""

    def declare(self, server_args: ServerArgs) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        if (self.section.ssd or self.section.remote) and (
            server_args.enable_lora or server_args.lora_paths
        ):
            # SGLang names an adapter after its path, whose files may change.
            raise ActivationError(
                "the ssd and remote tiers do not support LoRA adapters (--enable-lora, "
                "--lora-paths), because the stored KV would outlive the adapters; use the host "
                "tier only"
            )
        super().declare(server_args)
        if server_args.pp_size > 1:
            require_served(server_args, self.name, self.unserved_with_pipeline)
        declare_resolution(server_args, "sgl_ext", **releases.linker_arguments(hooks.LINKER))

    def require_resolved(self, view: ServerArgs, model: ModelConfig) -> None:
        beyond = self.section.ssd or self.section.remote
        if beyond and not releases.MEDIA_BY_WIDE_HASH and model.is_multimodal:
            raise ActivationError(
                "the ssd and remote tiers do not support multimodal models with SGLang "
                f"{installed_sglang()}, whose keys hold 30 bits of an image's hash, so that the "
                "KV of another image could be loaded; install a newer SGLang, or use the host "
                "tier only"
            )

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        self._loading = []
        page_hash.prepare()
        self._wrapper = scheduler.tree_cache.linker
        self.linker = self._wrapper.cache_linker
        self.stack, self.planner = self.linker.stack, self.linker.planner
        self.stack.keepers.append(self.planner.give_up_one)
        planning.seed(ext, self.stack.layout, devices(self.section))
        if ext.metrics is not None:
            from sgl_ext.engine.tiers.metrics import TierMetrics

            self._metrics = TierMetrics(ext.metrics)

    def matching(self, req: Req, prefix: int) -> None:
        """Removes the mark of an earlier look-up, which would stay if this one finds nothing, and
        tells the linker where this one begins and has to end."""
        self._wrapper.hit_markers.pop(req.rid, None)
        self.linker.begin, self.linker.end = prefix, reusable(req)
        self.linker.looked_up = None
        self.linker.prefixes.matching(req.rid)

    def ready(self, adder: PrefillAdder, req: Req, continuing: bool) -> bool:
        """Returns whether the pages of the request's prefix have landed, or need not be awaited."""
        return self.linker.ready(req.rid)

    def considered(self, adder: PrefillAdder, req: Req, admitted: bool) -> None:
        if restored := self.stack.loads.take_restored(req.rid):
            tell(req, {"power": self.name, "exact": True, "sources": restored})
            self._loading.append((req, restored))
        if admitted:
            if (found := self.linker.looked_up) is not None and found.rid == req.rid:
                trace(
                    req, "tiers_lookup", found.ended - found.began, ended=found.ended,
                    pages=found.asked, loads=found.loads,
                )  # fmt: skip
            self.stack.missed += self.linker.prefixes.missed(req.rid)
            self.linker.prefixes.forget(req.rid)  # it no longer waits, whether or not it loads KV
            self.linker.used_in_device(adder.tree_cache.tree_core, req.last_node)

    def poll(self) -> None:
        self.planner.advance()
        self._trace_loads()
        if self._metrics is not None and self._metrics.due:
            self._metrics.update(self.describe(), self.planner.late)

    def forwarded(self, batch: ScheduleBatch) -> None:
        self._trace_loads()  # before SGLang ends the traces of requests that have ended

    def _trace_loads(self) -> None:
        self._loading = [each for each in self._loading if not self._traced(*each)]

    def _traced(self, req: Req, restored: Mapping[str, Restored]) -> bool:
        """Adds the span of a request's load if it has ended; returns whether it has.

        The time of a load is known behind the forward that it is part of.
        """
        if self.stack.loads.loads(req.rid):
            return False
        lower = [each["seconds"] for at, each in restored.items() if at != "host"]
        # All pages are copied from host memory, those of lower tiers when they have landed there.
        seconds = max(lower, default=0.0) + restored["host"]["seconds"]
        trace(req, "tiers_load", seconds, **{at: of["tokens"] for at, of in restored.items()})
        return True

    def pending(self) -> bool:
        return bool(self._loading) or self.planner.pending()

    def forget(self, rid: str) -> None:
        self.linker.prefixes.forget(rid)

    def weights_changed(self) -> None:
        """Disables the tiers, whose pages belong to the weights that the server started with."""
        self.linker.prefixes.clear()
        self.planner.clear()
        self.stack.disable(
            "an update of the model's weights has started; restart the server to use the tiers "
            "again"
        )

    def describe(self) -> Mapping[str, TierReport]:
        from sgl_ext.tiers.statistics import describe

        return describe(self.stack)
