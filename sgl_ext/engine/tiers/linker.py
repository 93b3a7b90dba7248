"""The tiers as SGLang's external cache: what its radix tree asks, loads from and stores into."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_observability, get_parallel

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.activation import refuse
from sgl_ext.engine.restore.power import open_restoring
from sgl_ext.engine.restore.turn import Prompt, give_up, strategy
from sgl_ext.engine.swap.ahead import SwapAhead
from sgl_ext.engine.swap.metrics import SwapMetrics
from sgl_ext.engine.swap.priorities import priorities_of
from sgl_ext.engine.tiers.metrics import TierMetrics
from sgl_ext.errors import ExtError
from sgl_ext.swap.adaptive import Adaptive
from sgl_ext.swap.manager import SwapManager
from sgl_ext.tiers.arena import Key, Pages, stride_of
from sgl_ext.tiers.build import open_stack
from sgl_ext.tiers.statistics import describe

_NODES = 1 << 16
"""Nodes of the radix tree whose uses are remembered."""
_HELD_S = 60.0
"""How long host memory's pages are held for a request that SGLang does not come back to."""


class TierLinker(UnifiedCacheLinker):
    """Hands SGLang's page hashes and slots to a :class:`~sgl_ext.tiers.stack.TierStack`.

    SGLang's tree keeps a node locked from :meth:`offload` until its completion is popped, and the
    slots of a load private to its request, so the bytes in both do not change under a copy. On the
    CPU the forward has ended when its pages are offloaded; there is no stream to wait for.
    """

    def __init__(
        self,
        server_args: Any,  # noqa: ARG002  (SGLang's constructor)
        params: Any,
        *,
        components: set[ComponentType],
        extra_config: Any = None,  # noqa: ARG002
        forward_stream: Any = None,  # noqa: ARG002
    ) -> None:
        self._page = params.page_size
        ext = runtime.current
        try:
            if ext is None or ext.config.tiers is None:
                raise hooks.ActivationError("SGLang asks for tiers that nobody configured")
            if ext.slab is None:
                raise hooks.ActivationError(
                    f"tiers need the block-major layout, and {ext.layer_major_because}"
                )
            if params.disable:
                raise hooks.ActivationError(
                    "tiers need the radix cache, and SGLang has switched it off for this model"
                )
            if components != {ComponentType.FULL}:
                raise hooks.ActivationError(
                    "tiers hold the KV of full attention only; this model has more: "
                    f"{', '.join(sorted(component.name for component in components))}"
                )
            swap = ext.config.swap
            capacity = 0 if swap is None else swap.capacity // stride_of(ext.slab.layout)
            by_layer = swap is not None and swap.baseline.by_layer
            ext.tiers = open_stack(ext.config.tiers, ext.slab, by_layer=by_layer, swapped=capacity)
            open_restoring(ext, ext.tiers)
            params.token_to_kv_pool_allocator.in_flight = ext.tiers.in_flight
            if swap is not None:
                ext.swap = SwapManager(ext.tiers, capacity, swap.baseline)
                ext.ahead = SwapAhead(ext.tiers, Adaptive())
                ext.priorities = priorities_of(swap)
        except ExtError as error:
            refuse(error)
        self.stack = ext.tiers
        self.restorer, self.prefixes = ext.restorer, ext.prefixes
        self.asking: Prompt | None = None
        """That the next look-up is for, if its prefix may be restored."""
        self.parent: Key | None = None
        """Of the next node that is offloaded: the last page before it."""
        self.layer_done_counter = self.stack.loads
        self.pools = {PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()}
        self._metrics: TierMetrics | None = None
        self._swap_metrics: SwapMetrics | None = None
        self._has_metrics = get_observability().enable_metrics
        self._uses: OrderedDict[Any, int] = OrderedDict()
        self._ranks = params.attn_tp_cache_group or params.tp_cache_group

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        keys, prompt, self.asking = _keys(transfers[0]), self.asking, None
        if (
            self.restorer is None
            or self.prefixes is None
            or prompt is None
            or not self.stack.enabled
        ):
            pages = self.stack.lookup(rid, keys)
        else:
            keys = keys[: prompt.most]
            pages = self.stack.here(keys)
            self.restorer.ask(rid, keys, pages, prompt.first, prompt.behind, prompt.precedence)
            by = None if self.restorer.asked(rid) else strategy(self.stack, prompt, pages)
            if by is not None:
                self.prefixes.hold(rid, keys[:pages], prompt.first, by)
                pages = 0  # SGLang computes them, as far as it knows
        # Every length up to this one can be restored; the longest that all ranks have is asked
        # for here, because SGLang looks at each length that it is given.
        return [self.agreed(pages)]

    def agreed(self, value: int) -> int:
        """The least of all tensor-parallel ranks' values."""
        if self._ranks is None or torch.distributed.get_world_size(self._ranks) == 1:
            return value
        least = torch.tensor([value])
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, self._ranks)
        return int(least)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        transfer = transfers[0]
        return self.stack.load(rid, _keys(transfer), self._blocks(transfer))

    def start_layer_wise_loading(self) -> int:
        return self.stack.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.stack.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self.stack.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:  # noqa: ARG002
        # Ranks may differ in whether they have room. All take the offload on, and SGLang takes the
        # node for stored only if all of them say so in the end.
        parent, self.parent = self.parent, None
        self.stack.store(_keys(transfers[0]), self._blocks(transfers[0]), parent)
        return True

    def num_completed_offloads(self) -> int:
        # SGLang asks once a step, idle or not.
        if self._has_metrics:
            if self._metrics is None:
                self._metrics = TierMetrics(get_parallel().tp_rank)
            if self._metrics.due:
                self._metrics.update(describe(self.stack))
                self._update_swap()
        if self.restorer is not None:
            self.restorer.advance()
        if self.prefixes is not None:
            # SGLang looks nobody up while it has no room: a long queue would keep all pages.
            planned = () if runtime.current is None else runtime.current.plans
            self.prefixes.expire(time.monotonic() - _HELD_S, planned)
        return self.stack.completed()

    def _update_swap(self) -> None:
        if (ext := runtime.current) is None or ext.swap is None:
            return
        if self._swap_metrics is None:
            self._swap_metrics = SwapMetrics(get_parallel().tp_rank)
        self._swap_metrics.update(ext.swap.describe())

    def pop_completed_offload(self) -> bool:
        return self.stack.pop()

    def reset(self) -> None:
        give_up()
        if (ext := runtime.current) is not None and ext.swap is not None:
            if ext.ahead is not None:
                ext.ahead.clear()
            ext.swap.clear()
            if ext.priorities is not None:
                ext.priorities.clear()
        self.stack.clear()

    def close(self) -> None:
        give_up()
        if self.restorer is not None:
            self.restorer.close()
        self.stack.close()

    def used_in_device(self, tree: Any, node: Any) -> None:
        """A request begins with the KV that the path to ``node`` has in the device."""
        if not isinstance(node, int):  # the slot of a streaming session, which is in no tree
            return
        for step in tree.collect_path_info([node])[0]:
            uses = self._uses[step.node_id] = self._uses.pop(step.node_id, 1) + 1
            # At powers of two, so that it costs little however often a page is used.
            if uses & (uses - 1) == 0:
                self.stack.used(_bytes(tree.get_hash_values(step.node_id)), uses)
        while len(self._uses) > _NODES:
            self._uses.popitem(last=False)

    def _blocks(self, transfer: PoolTransfer) -> Pages:
        slots: Pages = transfer.device_indices.numpy()
        blocks: Pages = slots[:: self._page] // self._page
        return np.ascontiguousarray(blocks)


def _keys(transfer: PoolTransfer) -> Sequence[Key]:
    return _bytes(transfer.keys)


def _bytes(hashes: Sequence[str]) -> Sequence[Key]:
    return list(map(bytes.fromhex, hashes))
