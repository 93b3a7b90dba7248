"""The ``peer`` power: engines on one host lend each other KV memory (SwiftCache)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from sgl_ext.config import Peer
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.core.served import Property
from sgl_ext.engine.core.sglang_types import (
    ForwardBatch,
    Req,
    ScheduleBatch,
    Scheduler,
    StepPlan,
)
from sgl_ext.engine.core.unserved import PIPELINE

if TYPE_CHECKING:
    from sgl_ext.engine.core.runtime import ExtRuntime
    from sgl_ext.engine.peer.reads import LentReads
    from sgl_ext.engine.peer.side import PeerSide, SharedSlab
    from sgl_ext.engine.peer.stream import LayerStream


def open_side(config: Peer, scheduler: Scheduler, slab: SharedSlab) -> PeerSide:
    """Opens the side of the configured role."""
    from sgl_ext.engine.peer.master import MasterSide
    from sgl_ext.engine.peer.worker import WorkerSide

    return (MasterSide if config.role == "master" else WorkerSide)(config, scheduler, slab)


class PeerPower(Power[Peer]):
    """Lending and borrowing of KV memory.

    Attributes:
        side: this process's side, worker or master.
    """

    name = "peer"
    needs_slab = True
    unserved = (
        *PIPELINE,
        ("tp_size", lambda size: size > 1, "tensor parallelism"),
        ("dp_size", lambda size: size > 1, "data parallelism"),
        ("enable_streaming_session", bool, "streaming sessions"),
        ("disaggregation_mode", lambda mode: mode != "null", "prefill-decode disaggregation"),
    )

    side: PeerSide
    _reads: LentReads | None = None
    """Spans of a master's prompts; None on a worker."""

    def attention(self) -> dict[Property, str]:
        buffered = self.section.role == "master" and self.section.stream != "direct"
        own = (Property.OWN, Property.EAGER_DECODE) if buffered else ()
        option = f"peer.stream {self.section.stream}"
        return {**dict.fromkeys(own, option), **super().attention()}

    def open(self, ext: ExtRuntime, scheduler: Scheduler) -> None:
        # A pool that is built with a peer section has such a slab.
        slab = cast("SharedSlab", ext.require_slab(self.name))
        self.side = open_side(self.section, scheduler, slab)
        self._ext, self._runner = ext, scheduler.tp_worker.model_runner
        if self.section.role == "master":
            from sgl_ext.engine.peer.reads import LentReads

            first = slab.own * slab.layout.page
            self._reads = LentReads(scheduler, first, self.side.stream)

    @property
    def stream(self) -> LayerStream | None:
        """Layer buffers of a master; None on a worker, or if borrowed memory is read in place."""
        return self.side.stream

    def launching(self, batch: ForwardBatch, whole: bool) -> None:
        """Starts to stream the K and V that lie in workers' memory.

        Two kinds of forwards read them in place. A forward that goes on with other rows may restore
        a layer's KV after the layer would have been loaded into its buffer, and rows that follow
        stored contexts read the contexts' memory where other rows would read the buffer.
        """
        if (stream := self.side.stream) is None:
            return
        clusters = self._ext.clusters
        if not whole or (clusters is not None and clusters.following is not None):
            stream.read_in_place()
        else:
            stream.begin(
                self._runner.req_to_token_pool.req_to_token, batch.req_pool_indices.tolist(),
                batch.seq_lens.tolist(), batch.out_cache_loc,
            )  # fmt: skip

    def forwarding(self, batch: ScheduleBatch) -> None:
        if self._reads is not None:
            self._reads.begin()

    def forwarded(self, batch: ScheduleBatch) -> None:
        if self._reads is not None:
            self._reads.end(batch)

    def withheld(self) -> Iterator[Req]:
        yield from self.side.aside
        yield from self.side.out

    def before_step(self, running: ScheduleBatch) -> None:
        self.side.step(running)

    def after_step(self, plan: StepPlan) -> None:
        self.side.planned()
        if self._ext.metrics is not None:
            self.side.measure(self._ext.metrics)

    def describe(self) -> Mapping[str, object]:
        return self.side.describe()

    def close(self) -> None:
        self.side.close()
