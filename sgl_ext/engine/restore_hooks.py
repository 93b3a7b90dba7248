"""Where restoration meets SGLang's scheduler: whose turn it is, and how far each forward goes.

Called by the hooks of :mod:`~sgl_ext.engine.admission`, :mod:`~sgl_ext.engine.plan_hooks` and
:mod:`~sgl_ext.engine.tier_hooks`, which own the seams.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext import runtime
from sgl_ext.config import ExtConfig, Restore
from sgl_ext.engine import hooks
from sgl_ext.engine.meta_info import tell, told
from sgl_ext.engine.unserved import Unserved, require_served
from sgl_ext.memory.slab import Layout
from sgl_ext.packages import cache_dir
from sgl_ext.plan import Load
from sgl_ext.restore.costs import ComputeCost, Costs, LoadCost
from sgl_ext.restore.policies import POLICIES
from sgl_ext.restore.profile import PROFILES, Subject, find
from sgl_ext.restore.restorer import Restored, Restorer
from sgl_ext.runtime import ExtRuntime
from sgl_ext.tiers.stack import TierStack

_UNIT = 128
"""Tokens of one load, at most."""
_WAIT_S = 10.0
"""Within which tiers have to say what they have."""
_PARKED = "_sgl_ext_parked"
"""Attribute of a ``PrefillAdder``: the prompt that it goes on with waits for its KV."""

logger = logging.getLogger(__name__)

_UNSERVED: Unserved = (
    ("enable_return_hidden_states", bool, "hidden states in answers"),
    ("enable_dp_attention", bool, "data-parallel attention"),
    ("tp_size", lambda size: size > 1, "tensor parallelism"),
)


class Prompt(NamedTuple):
    """Whose prefix may be restored."""

    first: int
    """Number of its first page that the device does not have."""
    behind: int
    """Tokens."""


def declare(server_args: Any, config: ExtConfig) -> None:
    """Raises ActivationError if the arguments ask for something that restoring does not serve."""
    if config.restore is not None:
        require_served(server_args, "restore", _UNSERVED)


def open_restorer(config: Restore | None, stack: TierStack) -> Restorer | None:
    """Of a scheduler that has its tiers.

    Raises:
        ActivationError: SGLang computes prompts whole, or chunk and page do not go together.
    """
    if config is None:
        return None
    from sglang.srt.runtime_context import get_schedule

    page, size = stack.layout.page, get_schedule().chunked_prefill_size
    if size is None or size < page:
        raise hooks.ActivationError(
            f"restore computes prompts part by part, and --chunked-prefill-size is {size}; "
            f"give one of {config.chunk} or more"
        )
    if config.chunk % page:
        raise hooks.ActivationError(
            f"restore.chunk is {config.chunk} tokens, no multiple of the page of {page}; "
            f"{-(-config.chunk // page) * page} is one"
        )
    return Restorer(
        stack.host,
        stack.lower,
        POLICIES[config.policy](config.ageing),
        _costs(stack, config.chunk),
        page=page,
        unit=max(_UNIT // page, 1),
        wait=_WAIT_S,
        hits=stack.hits,
    )


def subject_of(layout: Layout) -> Subject:
    """What is measured in this process."""
    return Subject(layout.fingerprint, layout.dtype, layout.page, _device())


def _costs(stack: TierStack, chunk: int) -> Costs:
    """Measured ones; without a profile those that the first forwards and loads will say."""
    tiers = [lower.tier.name for lower in stack.lower]
    profile = find(subject_of(stack.layout), cache_dir() / PROFILES)
    costs = None if profile is None else profile.costs(tiers, chunk)
    if costs is None:
        logger.info("restore has no profile of this model here; sgl-ext calibrate makes one")
        costs = Costs(ComputeCost(), {tier: LoadCost() for tier in tiers}, chunk)
    return costs


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "CPU")
    return f"{model}, {torch.get_num_threads()} threads"


def prompt_of(req: Any, prefix: int) -> Prompt | None:
    """The request's prompt, of which the device has ``prefix`` tokens; None if it is not to be
    restored."""
    ext = runtime.current
    if ext is None or ext.restorer is None or req.session is not None:
        return None
    if ext.links is not None:
        from sgl_ext.engine.link_parameters import composition_of

        if composition_of(req) is not None:
            return None
    return Prompt(prefix // ext.restorer.page, len(req.full_untruncated_fill_ids))


def held_back(adder: Any, req: Any, continuing: bool) -> bool:
    """Whether it is not the request's turn."""
    restorer = _restorer()
    if restorer is None:
        return False
    # SGLang would count a part that waits among those of a batch of others.
    return getattr(adder, _PARKED, False) or not restorer.turn(req.rid, continuing)


def planned(adder: Any, req: Any) -> bool:
    """Makes the request's next plan, if it is being restored; False if it has to wait."""
    ext, restorer = runtime.current, _restorer()
    if ext is None or restorer is None or not restorer.restores(req.rid):
        return True
    begin = req.prefix_len if restorer.computes(req.rid) else req.prefix_len + req.host_hit_length
    plan = restorer.plan(req.rid, begin, len(req.full_untruncated_fill_ids))
    if plan is None:
        if restorer.computes(req.rid):
            setattr(adder, _PARKED, True)
        return False
    ext.plans[req.rid] = plan
    return True


def considered(req: Any, admitted: bool) -> None:
    """SGLang has tried to compute the next part of the request."""
    ext, restorer = runtime.current, _restorer()
    if ext is None or restorer is None or not restorer.restores(req.rid):
        return
    if not admitted:
        if not restorer.computes(req.rid):
            ext.plans.pop(req.rid, None)
        return
    restorer.computing(req.rid, req.extend_end)
    if req.extend_end >= len(req.full_untruncated_fill_ids):
        restored = restorer.report(req.rid)
        if restored is not None and not told(req, "restore"):
            tell(req, {"power": "restore", "exact": True, **restored})
            _count(ext, restored)


def fill(ext: ExtRuntime, rid: str, start: int, end: int, slots: NDArray[np.int64]) -> None:
    """Copies what was loaded of tokens ``start .. end - 1`` to ``slots`` of theirs."""
    if ext.restorer is None or ext.tiers is None:
        return
    page = ext.restorer.page
    for span in ext.plans[rid].between(start, end):
        if isinstance(span.source, Load):
            places = ext.restorer.places(rid, span.start, span.end)
            blocks = slots[span.start - start : span.end - start : page] // page
            ext.tiers.fill(places, np.ascontiguousarray(blocks))


def release(ext: ExtRuntime, rid: str) -> None:
    """The request's prefill has ended, or it does not come to it."""
    if ext.restorer is not None and ext.restorer.restores(rid):
        ext.plans.pop(rid, None)
        ext.restorer.release(rid)


def computed(batch: Any, tokens: int, seconds: float) -> None:
    """A forward of SGLang's ``ScheduleBatch`` has computed so many tokens."""
    restorer = _restorer()
    if restorer is None or len(batch.reqs) != 1 or tokens != batch.extend_num_tokens:
        return
    (begin,) = batch.prefix_lens
    restorer.costs.computed(begin, begin + tokens, seconds)


def pending() -> bool:
    """Whether a request waits for a tier."""
    restorer = _restorer()
    return restorer is not None and restorer.pending()


def give_up() -> None:
    """What was being restored is computed."""
    ext, restorer = runtime.current, _restorer()
    if ext is not None and restorer is not None:
        for rid in restorer.clear():
            ext.plans.pop(rid, None)


def describe(stack: TierStack) -> dict[str, Any] | None:
    """What is believed to cost what, for ``/server_info``; None without the section."""
    if (restorer := _restorer()) is None:
        return None
    costs = restorer.costs
    return {
        "subject": msgspec.to_builtins(subject_of(stack.layout)),
        "measured": costs.measured,
        "compute": asdict(costs.compute),
        "loads": {name: asdict(load) for name, load in costs.loads.items()},
        "forwards": [*costs.forwards],
        "loaded": {name: [*each] for name, each in costs.loaded_lately.items()},
    }


def _count(ext: ExtRuntime, restored: Restored) -> None:
    from sglang.srt.runtime_context import get_observability

    if get_observability().enable_metrics:
        if ext.restore_metrics is None:
            from sgl_ext.engine.restore_metrics import RestoreMetrics

            ext.restore_metrics = RestoreMetrics()
        ext.restore_metrics.count(restored)


def _restorer() -> Restorer | None:
    return None if runtime.current is None else runtime.current.restorer
