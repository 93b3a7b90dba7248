"""Classes of the powers, and the order in which the powers surround SGLang."""

from __future__ import annotations

from typing import Any

from sgl_ext.config import ExtConfig
from sgl_ext.engine.chunks.power import ChunksPower
from sgl_ext.engine.clusters.power import ClustersPower
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.peer.power import PeerPower
from sgl_ext.engine.restore.power import RestorePower
from sgl_ext.engine.restore.stages import StagedRestorePower
from sgl_ext.engine.swap.power import SwapPower
from sgl_ext.engine.tiers.power import TiersPower

ORDER: tuple[type[Power[Any]], ...] = (
    TiersPower,
    RestorePower,
    SwapPower,
    ChunksPower,
    PeerPower,
    ClustersPower,
)
"""Classes of the powers, from the inside out.

The last one sees a step, a request and a forward first, and the end of a step last.

- Restore is inside swap: the fairness policy sees a prompt before restoration interrupts it.
- Peer is inside clusters: clusters see followers before a peer makes them wait for memory, and the
  rows of a forward before layer buffers are filled for them.
- Chunks are outside restore: a forward that selects the tokens to recompute continues with other
  rows between two layers. It can do so only once, and restoration loads everything then.
- A waiting request belongs to the innermost power that owns it: swap before chunks.
"""


_IN_STAGES: dict[type[Power[Any]], type[Power[Any]]] = {RestorePower: StagedRestorePower}
"""Classes of powers that work in another way in the schedulers of pipeline stages."""


def powers_of(config: ExtConfig, *, stages: int = 1) -> list[Power[Any]]:
    """Returns new powers for the sections that are on, from the inside out.

    Args:
        stages: number of pipeline stages, for the powers of a scheduler.
    """
    on = config.sections()
    kinds = [kind for kind in ORDER if kind.name in on]
    if stages > 1:
        kinds = [_IN_STAGES.get(kind, kind) for kind in kinds]
    return [kind(config, on[kind.name]) for kind in kinds]
