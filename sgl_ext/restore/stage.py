"""Restoration in one pipeline stage, independent of the other stages (CacheFlow §3.2)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sgl_ext.errors import ExtError
from sgl_ext.planning.plan import Compute, Span
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.request import Restored
from sgl_ext.planning.want import Name, Want
from sgl_ext.tiers.arena import Pages

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
    planner: Planner,
    want: Want,
    inputs: Arrivals,
    compute: Callable[[int, int], None],
    adopt: Callable[[int, int, Pages], None],
    deadline: float,
) -> Restored | None:
    """Restores a prefix in the layers of this stage: computes its front while its back loads.

    Both pointers move as in :class:`~sgl_ext.planning.planner.Planner`, but a token can be
    computed only when its activations have arrived at the stage. Until then the stage loads.

    Args:
        want: pages of the prefix, in one run; this stage's tiers may have some of them. Its first
            ``here`` pages are on the device.
        inputs: progress of the activations.
        compute: computes tokens ``begin .. end - 1`` in all layers of the stage.
        adopt: takes the KV of tokens ``begin .. end - 1`` from its places in host memory.
        deadline: maximum duration, in seconds.

    Returns:
        The report of the restoration; None if tiers had nothing and everything was computed.

    Raises:
        ExtError: the deadline has passed, or no more activations arrive and some are missing.
    """
    name, (run,) = want.name, want.runs
    at, end = (run.start + pages * planner.page for pages in (run.here, len(run.keys)))
    give_up = time.monotonic() + deadline
    planner.restore(want)
    try:
        while at < end:
            if time.monotonic() > give_up:
                raise ExtError(f"a stage restored only {at} of {end} tokens within {deadline:g} s")
            planner.advance()
            if (span := _next_span(planner, name, at, end)) is None:
                time.sleep(_STEP_S)
                continue
            until = span.end
            if isinstance(span.source, Compute):
                until = min(until, inputs.end, at + planner.costs.chunk)
                if until <= at:
                    _await_inputs(planner, name, inputs, at)
                    continue
            planner.computing(name, until)
            if isinstance(span.source, Compute):
                began = time.monotonic()
                compute(at, until)
                planner.costs.computed(at, until, time.monotonic() - began)
            else:
                adopt(at, until, planner.places(name, at, until))
            at = until
        return planner.report(name, end)
    finally:
        planner.release(name)


def _next_span(planner: Planner, name: Name, at: int, end: int) -> Span | None:
    """Returns the next tokens to compute or to adopt; None if lookups or loads are awaited."""
    if planner.undecided(name):
        return None
    if name in planner.wants and not planner.restores(name):
        planner.release(name)  # its pages have no place in host memory, and are computed
    run = planner.run(name)  # its pages may go on behind those that are restored here
    last = end if run is None else run.start + len(run.keys) * planner.page
    if (plan := planner.plan(name, at, max(end, last) + 1)) is None:
        return None
    return next(plan.between(at, end if plan.stop is None else min(plan.stop, end)))


def _await_inputs(planner: Planner, name: Name, inputs: Arrivals, at: int) -> None:
    """Waits a step for the activations of token ``at``, or for loads that make them unnecessary.

    Raises:
        ExtError: no more activations arrive, and no more KV is loaded.
    """
    if not inputs.ended:
        inputs.wait(at, _STEP_S)
    elif planner.loads(name):
        time.sleep(_STEP_S)
    else:
        raise ExtError(
            f"a stage received no inputs after token {at}, and no tier loads their KV; check that "
            "the previous stage sends the inputs of all tokens"
        )
