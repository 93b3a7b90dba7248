"""Connection of the schedulers of pipeline stages, which agree on what their tiers have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from sgl_ext.planning.agreement import Agreement, FirstStage, FurtherStage
from sgl_ext.tiers.stage_channel import Address, FirstStageChannel, FurtherStageChannel
from sgl_ext.tiers.stage_watch import StageWatch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class Stages:
    """Channel and agreement of this stage.

    All stages create it at the same time.

    Args:
        params: SGLang's parameters of the radix cache.

    Raises:
        ExtError: another stage has not connected before the deadline.
    """

    agreement: Agreement

    def __init__(self, params: CacheInitParams) -> None:
        self._channel: FirstStageChannel | FurtherStageChannel
        if params.pp_rank == 0:
            self._channel = first = FirstStageChannel(params.pp_size - 1)
            _broadcast(params, first.address)
            first.connect()
            self.agreement = FirstStage(first)
        else:
            self._channel = further = FurtherStageChannel(_broadcast(params), params.pp_rank)
            self.agreement = FurtherStage(further)
        pids: list[Any] = [None] * params.pp_size
        torch.distributed.all_gather_object(pids, os.getpid(), group=params.pp_cache_group)
        others = {stage: pid for stage, pid in enumerate(pids) if stage != params.pp_rank}
        self._watch = StageWatch(others)

    def close(self) -> None:
        self._watch.close()
        self._channel.close()


def _broadcast(params: CacheInitParams, address: Address | None = None) -> Address:
    """Returns the address that the first stage gives to all stages."""
    found: list[Any] = [address]
    torch.distributed.broadcast_object_list(found, group=params.pp_cache_group, group_src=0)
    return Address(*found[0])
