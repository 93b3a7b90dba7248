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
            told = _gather(params, first.address)
            first.connect()
            self.agreement = FirstStage(first)
        else:
            told = _gather(params, None)
            self._channel = further = FurtherStageChannel(Address(*told[0][1]), params.pp_rank)
            self.agreement = FurtherStage(further)
        others = {stage: pid for stage, (pid, _) in enumerate(told) if stage != params.pp_rank}
        self._watch = StageWatch(others)

    def close(self) -> None:
        self._watch.close()
        self._channel.close()


def _gather(params: CacheInitParams, address: Address | None) -> list[tuple[int, Any]]:
    """Returns the pid of each stage, and the address that only the first stage has."""
    told: list[Any] = [None] * params.pp_size
    mine = os.getpid(), address
    torch.distributed.all_gather_object(told, mine, group=params.pp_cache_group)
    return told
