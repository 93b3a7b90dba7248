"""What computing and loading KV cost, and where the two meet (CacheFlow §3.1)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_MEMORY = 0.8
"""Weight of what was known before against one more observation."""
_FARTHEST = 4.0
"""An observation that is more times off counts as this: something else was in the way."""
COMPUTE = "compute"
"""What costs are of, beside the names of tiers."""
CROSSOVER = 512
"""Tokens: L_delta where it was not measured."""
_OBSERVED = 512
"""Forwards, and loads of each tier, that are remembered."""
_FITTED = 64
"""The last of them, which say what computing costs."""
_BELIEF = 0.1
"""Weight of what a fit departs from against one forward."""


@dataclass(frozen=True)
class ComputeCost:
    """Seconds of a forward over tokens ``begin .. end - 1`` of a prompt.

    Attention makes a token the dearer the more tokens lie before it.
    """

    overhead: float = 0.0
    """Of every forward."""
    per_token: float = 1e-3
    per_pair: float = 0.0
    """Of every token and one that it attends to."""

    def seconds(self, begin: int, end: int) -> float:
        return self.overhead + self.work(begin, end)

    def work(self, begin: int, end: int) -> float:
        """Without what every forward takes."""
        return (end - begin) * (self.per_token + self.per_pair * (begin + end) / 2)

    def in_chunks(self, begin: int, end: int, chunk: int) -> float:
        """By forwards of ``chunk`` tokens each."""
        return math.ceil((end - begin) / chunk) * self.overhead + self.work(begin, end)

    def scaled(self, by: float) -> ComputeCost:
        return ComputeCost(self.overhead * by, self.per_token * by, self.per_pair * by)


def fit(
    samples: Sequence[tuple[int, int, float]], believed: ComputeCost | None = None
) -> ComputeCost:
    """The costs that explain forwards ``(begin, end, seconds)`` best.

    Least squares of relative errors, none of them negative: a short forward counts as much as a
    long one, and one that something was in the way of hardly counts.

    Args:
        believed: of what the forwards do not tell, being alike.

    Raises:
        ValueError: nothing is believed, and there are fewer than three forwards, or all of them
            are alike.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    begin, end, seconds = np.array(samples, float).reshape(-1, 3).T
    alike = len(seconds) < 3 or np.ptp(end - begin) == 0
    if (believed is None and alike) or not (seconds > 0).all():
        raise ValueError(f"{len(samples)} forwards say too little: {samples[:3]}")
    tokens = end - begin
    factors = np.stack((np.ones_like(tokens), tokens, tokens * (begin + end) / 2), axis=1)
    factors /= seconds[:, None]
    wanted = np.ones_like(seconds)
    if believed is not None:
        weights = math.sqrt(_BELIEF) * factors.mean(axis=0)
        belief = (believed.overhead, believed.per_token, believed.per_pair)
        factors = np.concatenate((factors, np.diag(weights)))
        wanted = np.concatenate((wanted, weights * belief))
    overhead, per_token, per_pair = map(float, nnls(factors, wanted)[0])
    return ComputeCost(overhead, max(per_token, 1e-9), per_pair)


@dataclass(frozen=True)
class LoadCost:
    """Seconds of a load of consecutive tokens from one tier."""

    latency: float = 0.0
    per_token: float = 1e-3

    def seconds(self, tokens: int) -> float:
        return self.latency + tokens * self.per_token

    def scaled(self, by: float) -> LoadCost:
        return LoadCost(self.latency * by, self.per_token * by)


@dataclass
class Costs:
    """What is believed of one process; serving corrects it.

    Attributes:
        compute: of a forward.
        loads: by the name of the tier.
        chunk: tokens of a forward that restores.
        measured: what of them comes from a profile, tiers by their name; of the rest the first
            observations say all.
    """

    compute: ComputeCost
    loads: dict[str, LoadCost]
    chunk: int
    measured: frozenset[str] = frozenset()
    crossover: int = CROSSOVER
    """Tokens from which on a prefix in host memory is restored by tokens, not layers: L_delta."""
    forwards: deque[tuple[int, int, float]] = field(
        default_factory=lambda: deque(maxlen=_OBSERVED), repr=False
    )
    """The last ones: from which token to which, and the seconds that it took."""
    loaded_lately: dict[str, deque[tuple[int, float]]] = field(default_factory=dict, repr=False)
    """By tier: the tokens of the last loads, and the seconds that each took."""
    epoch: int = 0
    """How often something was observed for the first time, which makes all that was estimated
    before void."""
    _seen: set[str] = field(default_factory=set, repr=False)

    def computed(self, begin: int, end: int, seconds: float) -> None:
        """A forward over these tokens took so long."""
        self.forwards.append((begin, end, seconds))
        expected = self.compute.seconds(begin, end)
        correction = self._correction(COMPUTE, seconds / expected)
        if COMPUTE in self.measured:
            self.compute = self.compute.scaled(correction)
            return
        lately = [*self.forwards][-_FITTED:]
        rates = np.array([(until - start) / took for start, until, took in lately])
        self.compute = fit(lately, ComputeCost(per_token=float(rates.sum() / (rates**2).sum())))

    def loaded(self, tier: str, tokens: int, seconds: float) -> None:
        """A load of so many tokens took so long."""
        lately = self.loaded_lately.setdefault(tier, deque(maxlen=_OBSERVED))
        lately.append((tokens, seconds))
        cost = self.loads[tier]
        self.loads[tier] = cost.scaled(self._correction(tier, seconds / cost.seconds(tokens)))

    def meeting(self, front: int, back: int, tier: str, busy: float = 0.0) -> float:
        """Where computing from ``front`` on and loading from ``back`` down are done together.

        Equation 1's split, with a cost of computing that grows with the position.

        Args:
            busy: seconds until the loading begins.

        Returns:
            A position in ``front .. back``, in tokens; ``front`` if computing does not pay.
        """
        compute = self.compute
        at = self._meeting(front, back, tier, busy - compute.overhead, compute.per_token)
        if at - front <= self.chunk:  # one forward
            return at
        return self._meeting(
            front, back, tier, busy, compute.per_token + compute.overhead / self.chunk
        )

    def _meeting(self, front: int, back: int, tier: str, ahead: float, linear: float) -> float:
        if ahead == math.inf:
            return float(back)
        half, per_load = self.compute.per_pair / 2, self.loads[tier].per_token
        # linear·(x - front) + half·(x² - front²) = ahead + per_load·(back - x)
        slope = linear + per_load
        constant = ahead + per_load * back + linear * front + half * front * front
        # Written so that it holds for half = 0, too.
        at = 2 * constant / (slope + math.sqrt(max(slope * slope + 4 * half * constant, 0.0)))
        return min(max(at, float(front)), float(back))

    def remaining(self, front: int, back: int, end: int, behind: int, tier: str) -> float:
        """Seconds until a request is restored and its prompt computed, with all to itself.

        Args:
            front: where computing stands.
            back: down to where it is loaded.
            end: where what ``tier`` can load ends.
            behind: tokens of the prompt.
        """
        seconds = self.compute.seconds(end, behind) if behind > end else 0.0
        if front < back:
            meeting = self.meeting(front, back, tier)
            seconds += self.loads[tier].per_token * (back - meeting)
        return seconds

    def recomputing(self, front: int, back: int) -> float:
        """Seconds of computing what is not loaded (Algorithm 1's remaining work)."""
        return self.compute.in_chunks(front, back, self.chunk) if front < back else 0.0

    def _correction(self, what: str, ratio: float) -> float:
        if what not in self.measured and what not in self._seen:
            self._seen.add(what)
            self.epoch += 1
            return ratio
        return _MEMORY + (1 - _MEMORY) * min(max(ratio, 1 / _FARTHEST), _FARTHEST)
