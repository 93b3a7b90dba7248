"""Boundary activations beside the KV pool of a pipeline stage (CacheFlow §3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_ext.config import ExtConfig, Tiers
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.kv.indices import on_host
from sgl_ext.engine.tiers.planner import open_planner
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.stage_inputs import StageInputs
from sgl_ext.restore.boundaries import boundary_layout
from sgl_ext.tiers.arena import Key, Pages, stride_of
from sgl_ext.tiers.build import open_stack

_LEAST = 64
"""Minimum capacity of a tier, in pages."""


class InputRows(StageInputs):
    """A row of activations for each slot of the KV pool, and tiers that keep whole pages of rows.

    The tiers are those of the KV, with as many pages. KV that was loaded has no activations in its
    slots, unless they were loaded, too.

    Args:
        hidden: elements of a row.
        dtype: type of the model's activations.
    """

    def __init__(self, ext: ExtRuntime, config: Tiers, hidden: int, dtype: torch.dtype) -> None:
        slab = ext.require_slab("restore")
        kv = slab.layout
        layout = boundary_layout(
            hidden, kv.page, str(dtype).removeprefix("torch."), f"{kv.fingerprint}/inputs"
        )
        tiers = _as_many_pages(config, kv, layout)
        costs = Costs()
        self._page = kv.page
        self._slab = HostSlab.create(layout, slab.own)
        self._rows = self._slab.tensor().view(-1, hidden)
        self._known = np.zeros(len(self._rows), bool)
        self.stack = open_stack(tiers, self._slab, costs=costs, engine=ext.transfers)
        self._planner = open_planner(ExtConfig(tiers=tiers), self.stack, costs)
        super().__init__(self.stack, self._planner)

    # --- the rows --------------------------------------------------------------------------------

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the rows of some slots, ``[slots, hidden]``."""
        return self._rows[slots]

    def keep(self, slots: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Records the inputs of a forward, which the layer before has passed in two parts."""
        self._rows[slots] = hidden + residual
        self._known[on_host(slots)] = True

    def overwritten(self, blocks: Pages) -> None:
        """Records that KV was loaded into ``blocks`` without activations."""
        self._known.reshape(-1, self._page)[blocks] = False

    def fill(self, places: Pages, blocks: Pages) -> None:
        """Copies pages of activations from host memory to the rows of ``blocks``."""
        self.stack.holds.fill(places, blocks)
        self._known.reshape(-1, self._page)[blocks] = True

    # --- their stores, in the order of those of the KV --------------------------------------------

    def store(self, keys: Sequence[Key], blocks: Pages, before: Sequence[Key] = ()) -> None:
        known = self._known.reshape(-1, self._page)[blocks].all(axis=1)
        whole = np.flatnonzero(known).tolist()
        self.stack.stores.store([keys[at] for at in whole], blocks[whole], before)

    def completed(self) -> int:
        return self.stack.stores.completed()

    def pop(self) -> bool:
        return self.stack.stores.pop()

    # --- life ------------------------------------------------------------------------------------

    def poll(self) -> None:
        self._planner.advance()
        self.stack.poll()

    def reset(self) -> None:
        self.clear()
        self._planner.clear()
        self.stack.clear()

    def disable(self) -> None:
        """Finds and keeps nothing any more: the weights change. Stores in progress still end."""
        self.clear()
        self._planner.clear()
        self._known[:] = False
        self.stack.disable("an update of the model's weights has started")

    def close(self) -> None:
        self.clear()
        self._planner.close()
        self.stack.close()


def _as_many_pages(config: Tiers, kv: Layout, rows: Layout) -> Tiers:
    """Returns tiers for as many pages of activations as those of ``config`` hold of KV."""
    share, least = stride_of(rows) / stride_of(kv), _LEAST * stride_of(rows)

    def less(capacity: int) -> int:
        return max(round(capacity * share), least)

    host, ssd = config.host, config.ssd
    return config.model_copy(
        update={
            "host": host and host.model_copy(update={"capacity": less(host.capacity)}),
            # Rows are used only where the KV is restored: an SSD with KV and no rows is no use.
            "ssd": ssd and ssd.model_copy(update={"capacity": less(ssd.capacity), "keep_after": 1}),
            "staging": less(config.staging),
            "remote": None,
            "layout": "token_major",
        }
    )
