"""State of one scheduler process that several parts of the extension share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch
from sgl_ext.engine.step.timing import ForwardTimer
from sgl_ext.memory.slab import Slab
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.plan import Compute, PrefillPlan, Source

PLANNING = "SGLEXT_PLANNING"
"""Environment variable of benchmarks: ``independent`` has each power decide for itself. Chunks in
lower tiers are loaded as a whole also with restore, and the KV of preempted requests and of lent
memory does not go on to other tiers."""

if TYPE_CHECKING:
    from prometheus_client import Histogram

    from sgl_ext.engine.chunks.power import ChunksPower
    from sgl_ext.engine.clusters.power import ClustersPower
    from sgl_ext.engine.core.metrics import Family, Metrics
    from sgl_ext.engine.core.planning_metrics import PlanningMetrics
    from sgl_ext.engine.core.power import Filler, Power
    from sgl_ext.engine.peer.power import PeerPower
    from sgl_ext.engine.restore.power import RestorePower
    from sgl_ext.engine.restore.stages import StagedRestorePower
    from sgl_ext.engine.step.rows import Split
    from sgl_ext.engine.swap.power import SwapPower
    from sgl_ext.engine.tiers.power import TiersPower
    from sgl_ext.memory.transfer import TransferEngine


@dataclass
class ExtRuntime:
    """Powers of a scheduler process, and the state that they share.

    A power's field is None until the power is open, and stays None if its section is off.
    """

    config: ExtConfig
    slab: Slab | None = None
    """KV pool; None if SGLang's own layer-major pool is used."""
    layer_major_because: str | None = None
    """Reason for which there is no slab."""
    plans: dict[str, PrefillPlan] = field(default_factory=dict)
    """Prefill plans by request id; requests without one are computed as usual."""
    fillers: dict[type[Source], Filler] = field(default_factory=dict)
    """Function that carries out the spans of each type of source of plans."""
    split: Split | None = None
    """Rows of the running forward; None if it follows no plans."""
    eager: bool = False
    """True while a forward follows plans; its parts are not computed by captured CUDA graphs."""
    timer: ForwardTimer = field(default_factory=lambda: ForwardTimer(None))
    prefill_seconds: float = 0.0
    """Total duration of all prefill forwards so far, in seconds."""
    costs: Costs = field(default_factory=Costs)
    """Cost model of all powers."""
    independent: bool = field(default_factory=lambda: os.environ.get(PLANNING) == "independent")
    """True in a benchmark's comparison: no power uses what another one offers it."""
    metrics: Metrics | None = None
    """Factory of this process's metrics; None if SGLang serves no metrics."""
    planning_metrics: PlanningMetrics | None = None
    """Metrics of the cost model; None if SGLang serves no metrics."""
    stage_seconds: Family[Histogram] | None = None
    """Durations of stages of requests; None if SGLang serves no metrics."""
    tiers: TiersPower | None = None
    restore: RestorePower | StagedRestorePower | None = None
    swap: SwapPower | None = None
    chunks: ChunksPower | None = None
    peer: PeerPower | None = None
    clusters: ClustersPower | None = None

    inside_out: list[Power[Any]] = field(default_factory=list)
    """Open powers, in the order of :data:`~sgl_ext.engine.core.powers.ORDER`."""

    @cached_property
    def transfers(self) -> TransferEngine:
        """Transfer engine of all powers that read and write files, so that those which use one
        device share its lane."""
        from sgl_ext.memory.transfer import TransferEngine

        return TransferEngine()

    def close(self) -> None:
        """Closes what powers share; called after these and the tiers are closed."""
        if "transfers" in self.__dict__:
            self.transfers.close()

    def add(self, power: Power[Any]) -> None:
        """Adds an open power outside of the powers that are open already."""
        setattr(self, power.name, power)
        self.inside_out.append(power)
        self.fillers |= power.fillers

    def require_slab(self, section: str) -> Slab:
        """Returns the KV pool.

        Raises:
            ActivationError: there is none, so that the section cannot be served.
        """
        if self.slab is None:
            raise ActivationError(
                f"the {section} section requires the block-major KV layout, but "
                f"{self.layer_major_because}; remove the {section} section"
            )
        return self.slab

    @property
    def outside_in(self) -> list[Power[Any]]:
        """Open powers, the outermost one first."""
        return self.inside_out[::-1]

    def owner(self, req: Req) -> Power[Any] | None:
        """Returns the innermost power that provides all KV of a waiting request, or None."""
        return next((power for power in self.inside_out if power.owns(req)), None)

    def withheld(self) -> Iterator[Req]:
        """Yields waiting requests that powers keep outside of SGLang's queue."""
        for power in self.inside_out:
            yield from power.withheld()

    def computed_parts(self, batch: ScheduleBatch) -> list[tuple[int, int]] | None:
        """Returns tokens ``begin .. end - 1`` of each prompt that an extend forward computes.

        None if plans link or load some tokens of the ``ScheduleBatch``, or if it does not tell its
        parts.
        """
        begins, lengths = batch.prefix_lens or (), batch.extend_lens or ()
        if not len(begins) == len(lengths) == len(batch.reqs):
            return None
        parts = [(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        for req, part in zip(batch.reqs, parts, strict=True):
            if (plan := self.plans.get(req.rid)) is not None and not all(
                isinstance(span.source, Compute) for span in plan.between(*part)
            ):
                return None
        return parts

    @property
    def loading_seconds(self) -> float:
        """Total duration of all loads from host memory that forwards wait for, in seconds."""
        return 0.0 if self.tiers is None else self.tiers.stack.loads.traffic.seconds

    def prefilled(self, rid: str) -> None:
        """Tells the powers that a request's prefill has ended, or that the request is released."""
        for power in self.inside_out:
            power.prefilled(rid)

    def recomputes(self, req: Req) -> bool:
        """Returns whether a power requires that a preempted request is computed again."""
        return any(power.recomputes(req) for power in self.inside_out)

    def needed(self, req: Req) -> None:
        """Tells the powers that another power has lost KV of a waiting request."""
        for power in self.outside_in:
            power.needed(req)

    def pending(self) -> bool:
        """Returns whether waiting requests depend on I/O that is in progress."""
        return any(power.pending() for power in self.inside_out)

    def reset(self) -> None:
        """Tells the powers that SGLang's radix tree drops all cached KV."""
        for power in self.outside_in:
            power.reset()

    def describe_memory(self) -> dict[str, object]:
        """Returns the layout of the KV pool, for ``/server_info``."""
        if self.slab is None:
            return {"layout": "layer_major", "because": self.layer_major_because}
        layout = self.slab.layout
        return {
            "layout": "block_major",
            "blocks": self.slab.own,
            "page": layout.page,
            "block_bytes": layout.block_bytes,
            "layers": layout.layers,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "dtype": layout.dtype,
            "on_device": self.slab.device is not None,
            "fingerprint": layout.fingerprint,
        }


current: ExtRuntime | None = None
"""Runtime of this scheduler process; None if the extension is not active in this process."""
