"""Restoration in one pipeline stage, independent of the other stages (CacheFlow §3.2)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from sgl_ext.errors import ExtError
from sgl_ext.plan import Compute
from sgl_ext.restore.request import Restored
from sgl_ext.restore.restorer import Restorer
from sgl_ext.tiers.arena import Key, Pages

_STEP_S = 1e-3


class Arrivals:
    """Progress of the activations that arrive at a stage; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._end = 0
        self._ended = False

    @property
    def end(self) -> int:
        """Number of leading tokens whose activations have arrived."""
        return self._end

    @property
    def ended(self) -> bool:
        """Returns whether no more activations will arrive."""
        return self._ended

    def come(self, end: int) -> None:
        """Records that the activations of tokens up to ``end`` have arrived."""
        with self._changed:
            self._end = max(self._end, end)
            self._changed.notify_all()

    def close(self) -> None:
        """Records that no more activations will arrive."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, beyond: int, seconds: float) -> None:
        """Waits for more than ``beyond`` tokens or the end of arrivals, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._end > beyond or self._ended, seconds)


def restore(
    restorer: Restorer,
    keys: Sequence[Key],
    inputs: Arrivals,
    compute: Callable[[int, int], None],
    adopt: Callable[[int, int, Pages], None],
    deadline: float,
) -> Restored | None:
    """Restores a prefix in the layers of this stage: computes its front while its back loads.

    Both pointers move as in :class:`~sgl_ext.restore.restorer.Restorer`, but a token can be
    computed only when its activations have arrived at the stage. Until then the stage loads.

    Args:
        keys: keys of the pages of the prefix; this stage's tiers may have some of them.
        inputs: progress of the activations.
        compute: computes tokens ``begin .. end - 1`` in all layers of the stage.
        adopt: takes the KV of tokens ``begin .. end - 1`` from its places in host memory.
        deadline: maximum duration, in seconds.

    Returns:
        The report of the restoration; None if tiers had nothing and everything was computed.

    Raises:
        ExtError: the deadline has passed, or no more activations arrive and some are missing.
    """
    rid, page = "stage", restorer.page
    at, end = 0, len(keys) * page
    give_up = time.monotonic() + deadline
    restorer.ask(rid, keys, here=0, first=0, prompt_tokens=end + 1)
    try:
        while at < end:
            if time.monotonic() > give_up:
                raise ExtError(f"a stage restored only {at} of {end} tokens within {deadline:g} s")
            restorer.advance()
            if restorer.asked(rid) and not restorer.restores(rid):
                time.sleep(_STEP_S)
                continue
            plan = restorer.plan(rid, at, end + 1)
            if plan is None:
                time.sleep(_STEP_S)
                continue
            span = next(plan.between(at, end if plan.stop is None else plan.stop))
            until = span.end
            if isinstance(span.source, Compute):
                until = min(until, inputs.end, at + restorer.costs.chunk)
                if until <= at:
                    if not inputs.ended:
                        inputs.wait(at, _STEP_S)
                    elif restorer.loads(rid):
                        time.sleep(_STEP_S)
                    else:
                        raise ExtError(f"a stage received no inputs after token {at}")
                    continue
            restorer.computing(rid, until)
            if isinstance(span.source, Compute):
                began = time.monotonic()
                compute(at, until)
                restorer.costs.computed(at, until, time.monotonic() - began)
            else:
                adopt(at, until, restorer.places(rid, at, until))
            at = until
        return restorer.report(rid)
    finally:
        restorer.release(rid)
