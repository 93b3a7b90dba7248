"""The tiers as SGLang's external cache, which the radix tree looks up, loads from and stores in."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.activation import refuse
from sgl_ext.engine.core.sglang_types import Node, ServerArgs, TreeCore
from sgl_ext.engine.kv.indices import Download, on_host
from sgl_ext.engine.tiers.once import used_once
from sgl_ext.engine.tiers.planner import open_planner
from sgl_ext.engine.tiers.stages import Stages
from sgl_ext.errors import ExtError
from sgl_ext.memory.streams import streams_of
from sgl_ext.planning.agreement import Agreement
from sgl_ext.planning.prefixes import Prefixes
from sgl_ext.planning.staged_prefixes import StagedPrefixes
from sgl_ext.planning.staged_stores import StagedStores, Storing
from sgl_ext.tiers.arena import Key
from sgl_ext.tiers.build import open_stack
from sgl_ext.tiers.departures import Departures

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

_NODES = 1 << 16
"""Maximum number of nodes of the radix tree whose uses are counted."""


class Restoring(Protocol):
    """Interface of a power that loads some prefixes in place of the tiers."""

    def lookup(self, rid: str, keys: Sequence[Key]) -> int | None:
        """Returns how many of a request's next pages SGLang can load; None to look up the tiers."""


class LookUp(NamedTuple):
    """Look-up of the pages behind a request's prefix on the device."""

    rid: str
    began: float
    """Begin and end, on the clock of :func:`time.perf_counter`."""
    ended: float
    asked: int
    """Pages that were looked up."""
    loads: int
    """Pages that SGLang loads; those that ``restore`` loads are in its own span."""


class TierLinker(UnifiedCacheLinker):
    """Adapter from SGLang's page hashes and slots to a :class:`~sgl_ext.tiers.stack.TierStack`.

    SGLang's tree keeps a node locked from :meth:`offload` until its completion is popped, and keeps
    the slots of a load private to the request. The bytes in both do not change during a copy. An
    offload begins when its slots are known on the host, in the order of the calls.

    Attributes:
        planner: planner of the loads from lower tiers.
        prefixes: prefixes that SGLang loads.
        departures: pages that stay on the device until tiers have them.
    """

    def __init__(
        self,
        server_args: ServerArgs,  # noqa: ARG002  (SGLang's constructor)
        params: CacheInitParams,
        *,
        components: set[ComponentType],
        extra_config: object = None,  # noqa: ARG002
        forward_stream: object = None,
    ) -> None:
        self._page = params.page_size
        self._allocator = params.token_to_kv_pool_allocator
        ext = runtime.current
        try:
            if ext is None or ext.config.tiers is None:
                raise hooks.ActivationError(
                    "SGLang requests tiers, but the configuration has no tiers section"
                )
            slab = ext.require_slab("tiers")
            if params.disable:
                raise hooks.ActivationError(
                    "tiers require the radix cache, which SGLang has disabled for this model; "
                    "remove the tiers section"
                )
            if components != {ComponentType.FULL}:
                raise hooks.ActivationError(
                    "tiers support the KV of full attention only, but this model also has: "
                    f"{', '.join(sorted(component.name for component in components))}"
                )
            swap = ext.config.swap
            self.stack = open_stack(
                ext.config.tiers,
                slab,
                streams_of(slab.device, forward_stream),
                costs=ext.costs,
                by_layer=swap is not None and swap.experiment.by_layer,
                engine=ext.transfers,
            )
            planner = open_planner(ext.config, self.stack, ext.costs)
            self._stages = Stages(params) if params.pp_size > 1 else None
        except ExtError as error:
            refuse(error)
        self.planner = planner
        self.prefixes = Prefixes(self.stack, planner)
        self._storing: Storing = self.stack.stores
        self._stores: StagedStores | None = None
        if self._stages is not None:
            prefixes = StagedPrefixes(self.stack, planner, self._stages.agreement)
            self.use_in_stages(prefixes, self.stack.stores)
        self.departures = Departures(self.stack, time.monotonic)
        self._allocator.in_flight = self.stack.in_flight
        self._allocator.streams = self.stack.streams
        self.restoring: Restoring | None = None
        """Power that is asked for a prefix before the stack; None if there is none."""
        self.before: Sequence[Key] = ()
        """Keys of the pages before the next node that is offloaded."""
        self.used_once = False
        """Whether the KV of that node is not looked up again."""
        self.begin = 0
        """Position in its prompt of the first token that is looked up next."""
        self.end = 0
        """Position behind the last token that SGLang may take from a cache."""
        self.looked_up: LookUp | None = None
        """Latest look-up of the request that SGLang considers; None if there was none."""
        self.layer_done_counter = self.stack.loads.layers
        self.pools = {PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()}
        self._offloads: deque[tuple[Sequence[Key], Download, Sequence[Key]]] = deque()
        """Offloads that have not begun: keys, slots and the keys of the pages before."""
        self._uses: OrderedDict[Node, int] = OrderedDict()
        self._ranks = params.attn_tp_cache_group or params.tp_cache_group

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        began = time.perf_counter()
        # What is looked up beyond the end would be loaded in vain, and the request would wait.
        most = max(self.end // self._page - self.begin // self._page, 0)
        keys, pages = _keys(transfers[0])[:most], None
        if not keys:
            return [0]
        if self.restoring is not None and self.stack.enabled:
            pages = self.restoring.lookup(rid, keys)
        if pages is None:
            pages = self.prefixes.lookup(rid, keys, self.begin)
        # Every length up to this one can be restored. Only the longest one that all ranks have is
        # returned, because SGLang examines each length.
        found = self.agreed(pages)
        self.looked_up = LookUp(rid, began, time.perf_counter(), len(keys), found)
        return [found]

    def use_in_stages(self, prefixes: StagedPrefixes, storing: Storing) -> None:
        """Sets how this pipeline stage finds prefixes and stores pages; called at start only."""
        self.prefixes, self._storing = prefixes, storing
        self._stores = StagedStores(storing, self.agreement)

    @property
    def agreement(self) -> Agreement:
        """Agreement of the pipeline stages.

        Raises:
            RuntimeError: there is only one stage.
        """
        if self._stages is None:
            raise RuntimeError("one stage agrees with nobody")
        return self._stages.agreement

    def ready(self, rid: str) -> bool:
        """Returns whether the pages of a request have landed, or need not be awaited."""
        if not self.stack.lower and self._stages is None:
            return True
        return bool(self.agreed(int(self.prefixes.ready(rid))))

    def agreed(self, value: int) -> int:
        """Returns the minimum of the values of all tensor-parallel ranks."""
        if self._ranks is None or torch.distributed.get_world_size(self._ranks) == 1:
            return value
        least = torch.tensor([value])
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, self._ranks)
        return int(least)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        transfer = transfers[0]
        slots = self._allocator.known.on_host(transfer.device_indices)
        return self.prefixes.load(rid, _keys(transfer), slots[:: self._page] // self._page)

    def start_layer_wise_loading(self) -> int:
        return self.stack.loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed = self.stack.loads.finish(counter_index)
        if not landed and self._stages is not None:
            # The other stages do not know, and would go on with the request.
            raise ExtError(
                "a copy from host memory failed in one pipeline stage; restart the server"
            )
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        return self.prefixes.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:  # noqa: ARG002
        # Ranks may differ in whether they have room. All accept the offload, and SGLang considers
        # the node stored only if all ranks report success in the end.
        before, self.before = self.before, ()
        if self.used_once:
            return False
        slots = Download(transfers[0].device_indices[:: self._page])
        # Begun by the next poll, not while a first token waits to be sent. SGLang locks the node.
        self._offloads.append((_keys(transfers[0]), slots, before))
        if self._stores is not None:
            self._stores.announce()
        return True

    def flush(self) -> None:
        """Begins all offloads, and waits for their slots."""
        self._begin_offloads(wait=True)

    def _begin_offloads(self, *, wait: bool) -> None:
        while self._offloads and (wait or self._offloads[0][1].landed()):
            keys, slots, before = self._offloads.popleft()
            self._storing.store(keys, slots.numpy() // self._page, before)

    def num_completed_offloads(self) -> int:
        self._begin_offloads(wait=False)
        self.stack.poll()
        return (self._stores or self.stack.stores).completed()

    def pop_completed_offload(self) -> bool:
        return (self._stores or self.stack.stores).pop()

    def reset(self) -> None:
        if (ext := runtime.current) is not None:
            ext.reset()
        self._offloads.clear()
        self.prefixes.clear()
        if self._stores is not None:
            self._stores.clear()
            self.agreement.reset()
        self.planner.clear()
        self.stack.clear()

    def close(self) -> None:
        self._offloads.clear()
        self.prefixes.clear()
        self.planner.close()
        self.stack.close()
        if self._stages is not None:
            self._stages.close()

    def leave(self, tree: TreeCore, node: Node, *, at_once: bool) -> bool:
        """Stores the pages of a node that has to leave the device, as far as tiers lack them.

        Args:
            at_once: stores what host memory has room for; the next owner of the blocks waits for
                the copies. Otherwise the node stays until tiers have all of its pages.

        Returns:
            Whether the node can be evicted.
        """
        keys = _bytes(tree.get_hash_values(node))
        slots = tree.get_component_device_value(node, ComponentType.FULL)
        if not self.stack.enabled or slots is None or used_once(tree, node):
            return True
        if at_once and not self.stack.host.missing(keys):
            return True
        blocks = on_host(slots[:: self._page]) // self._page
        if not at_once:
            return self.departures.leave(keys, blocks)
        self.stack.stores.store_lost(keys, blocks)
        return True

    def used_in_device(self, tree: TreeCore, node: object) -> None:
        """Counts a use of the pages on the path to ``node``, which a request has on the device."""
        if not isinstance(node, int):  # the slot of a streaming session, which is not in the tree
            return
        for step in tree.collect_path_info([Node(node)])[0]:
            uses = self._uses[step.node_id] = self._uses.pop(step.node_id, 1) + 1
            # Passed on at powers of two only, because some pages are used very often.
            if uses & (uses - 1) == 0:
                self.stack.used(_bytes(tree.get_hash_values(step.node_id)), uses)
        while len(self._uses) > _NODES:
            self._uses.popitem(last=False)


def _keys(transfer: PoolTransfer) -> Sequence[Key]:
    return _bytes(transfer.keys)


def _bytes(hashes: Sequence[str]) -> Sequence[Key]:
    return list(map(bytes.fromhex, hashes))
