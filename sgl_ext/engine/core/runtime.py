"""What one scheduler process of the extension is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sgl_ext.config import ExtConfig
from sgl_ext.memory.slab import Slab
from sgl_ext.plan import PrefillPlan
from sgl_ext.restore.host_prefixes import HostPrefixes
from sgl_ext.restore.restorer import Restorer
from sgl_ext.swap.manager import SwapManager
from sgl_ext.tiers.stack import TierStack

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.links import ChunkLinks
    from sgl_ext.engine.chunks.metrics import LinkMetrics
    from sgl_ext.engine.clusters.contexts import StoredContexts
    from sgl_ext.engine.clusters.recorder import Recorder
    from sgl_ext.engine.peer.side import PeerSide
    from sgl_ext.engine.peer.stream import LayerStream
    from sgl_ext.engine.restore.metrics import RestoreMetrics
    from sgl_ext.engine.step.rows import Split
    from sgl_ext.engine.swap.ahead import SwapAhead
    from sgl_ext.engine.swap.priorities import Priorities


@dataclass
class ExtRuntime:
    """Holds what the powers share; :mod:`sgl_ext.engine` fills it while SGLang starts."""

    config: ExtConfig
    slab: Slab | None = None
    """The KV pool; None if SGLang's own layer-major pool is in place."""
    layer_major_because: str | None = None
    """Why there is no slab."""
    tiers: TierStack | None = None
    """What lies beyond the device; None if nothing does."""
    restorer: Restorer | None = None
    """Prefixes that are computed and loaded at once; None without the section."""
    prefixes: HostPrefixes | None = None
    """Those in host memory that are; None without the section."""
    restore_metrics: RestoreMetrics | None = None
    """What is restored, counted; None if SGLang's metrics are off."""
    plans: dict[str, PrefillPlan] = field(default_factory=dict)
    """Of requests that are not simply computed, by their id."""
    split: Split | None = None
    """Of the forward that runs, if it is one of rows."""
    links: ChunkLinks | None = None
    """Chunks in prompts; None without the section."""
    swap: SwapManager | None = None
    """Preempted requests; None without the section."""
    ahead: SwapAhead | None = None
    """Their swap-ins that nobody waits for; None without the section."""
    interrupted: str | None = None
    """Request whose KV is being released, if its restoration goes on later."""
    giving_way: Any = None
    """SGLang's request whose KV is being released, if that is because it gives way."""
    resuming: list[Any] = field(default_factory=list)
    """SGLang's requests that come back in this step."""
    priorities: Priorities | None = None
    """Who gives way; None if that is SGLang's own business."""
    peer: PeerSide | None = None
    """This process's side of lending and borrowing; None without the section."""
    stored: StoredContexts | None = None
    """Contexts on devices that requests follow; None without the section."""
    recorder: Recorder | None = None
    """Writes contexts down that are to be stored; None without the section."""
    link_metrics: LinkMetrics | None = None
    """What is linked, counted; None if SGLang's metrics are off."""

    @property
    def stream(self) -> LayerStream | None:
        """Layer buffers of a master; None if it reads workers' memory where it is."""
        return None if self.peer is None else self.peer.stream

    def describe_memory(self) -> dict[str, Any]:
        """Where KV lies, for ``/server_info``."""
        if self.slab is None:
            return {"layout": "layer_major", "because": self.layer_major_because}
        layout = self.slab.layout
        return {
            "layout": "block_major",
            "blocks": self.slab.own,
            "page": layout.page,
            "block_bytes": layout.block_bytes,
            "layers": layout.layers,
            "dtype": layout.dtype,
            "fingerprint": layout.fingerprint,
        }


current: ExtRuntime | None = None
"""Of this scheduler process; hooks do nothing without it."""
