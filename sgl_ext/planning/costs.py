"""Cost model of computing and loading KV, and the position where both meet (CacheFlow §3.1)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_MEMORY = 0.8
"""Weight of the previous estimate against one more observation."""
_FARTHEST = 4.0
"""Limit of the ratio between an observation and its estimate; a larger one has other causes."""
COMPUTE = "compute"
"""Name of the cost of computing; costs of loading have the names of tiers."""
CROSSOVER = 512
"""Default of L_delta where it was not measured, in tokens."""
_OBSERVED = 512
"""Recent forwards, and recent loads of each tier, that are kept."""
_FITTED = 64
"""Recent forwards that the cost of computing is fitted to."""
_BELIEF = 0.1
"""Weight of the prior costs of a fit against one forward."""


@dataclass(frozen=True)
class ComputeCost:
    """Cost in seconds of a forward over tokens ``begin .. end - 1`` of a prompt.

    The cost of a token grows with its position because it attends to all tokens before it.
    """

    overhead: float = 0.0
    """Seconds of a forward, whatever its tokens."""
    per_token: float = 1e-3
    """Seconds per token."""
    per_pair: float = 0.0
    """Seconds per pair of a token and a token that it attends to."""

    def seconds(self, begin: int, end: int) -> float:
        """Returns the seconds of one forward."""
        return self.overhead + self.work(begin, end)

    def work(self, begin: int, end: int) -> float:
        """Returns the seconds without the overhead of the forward."""
        return (end - begin) * (self.per_token + self.per_pair * (begin + end) / 2)

    def in_chunks(self, begin: int, end: int, chunk: int) -> float:
        """Returns the seconds of computing in forwards of ``chunk`` tokens each."""
        return math.ceil((end - begin) / chunk) * self.overhead + self.work(begin, end)

    def scaled(self, by: float) -> ComputeCost:
        return ComputeCost(self.overhead * by, self.per_token * by, self.per_pair * by)


def fit(
    samples: Sequence[tuple[int, int, float]], believed: ComputeCost | None = None
) -> ComputeCost:
    """Returns the costs that explain measured forwards best.

    Minimizes the squared relative errors over non-negative costs: a short forward counts as much as
    a long one, and a delayed forward hardly counts.

    Args:
        samples: ``(begin, end, seconds)`` of each forward.
        believed: prior costs, which decide what similar forwards leave undetermined.

    Raises:
        ValueError: a forward did not take any time; or ``believed`` is None and there are fewer
            than three forwards, or all have the same number of tokens.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    begin, end, seconds = np.array(samples, float).reshape(-1, 3).T
    alike = len(seconds) < 3 or np.ptp(end - begin) == 0
    if (believed is None and alike) or not (seconds > 0).all():
        raise ValueError(f"{len(samples)} forwards do not determine the costs: {samples[:3]}")
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
    """Cost in seconds of a load of consecutive tokens from one tier."""

    latency: float = 0.0
    per_token: float = 1e-3

    def seconds(self, tokens: int) -> float:
        return self.latency + tokens * self.per_token

    def scaled(self, by: float) -> LoadCost:
        return LoadCost(self.latency * by, self.per_token * by)


@dataclass
class Costs:
    """Estimated costs of one process, corrected by observations while it serves.

    Attributes:
        compute: cost of a forward.
        loads: cost of a load, by the name of the tier.
        chunk: tokens of a forward that restores.
        measured: names of the costs that come from a profile: :data:`COMPUTE` and tiers. The first
            observation replaces the default of any other cost.
    """

    compute: ComputeCost
    loads: dict[str, LoadCost]
    chunk: int
    measured: frozenset[str] = frozenset()
    crossover: int = CROSSOVER
    """Length in tokens from which on a prefix in host memory is restored by tokens instead of by
    layers: L_delta."""
    forwards: deque[tuple[int, int, float]] = field(
        default_factory=lambda: deque(maxlen=_OBSERVED), repr=False
    )
    """Recent forwards: ``(begin, end, seconds)``."""
    loaded_lately: dict[str, deque[tuple[int, float]]] = field(default_factory=dict, repr=False)
    """Recent loads by tier: ``(tokens, seconds)``."""
    epoch: int = 0
    """Number of costs that were observed for the first time. Each change invalidates all earlier
    estimates."""
    _seen: set[str] = field(default_factory=set, repr=False)

    def computed(self, begin: int, end: int, seconds: float) -> None:
        """Records a forward over tokens ``begin .. end - 1``."""
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
        """Records a load of ``tokens`` tokens from a tier."""
        lately = self.loaded_lately.setdefault(tier, deque(maxlen=_OBSERVED))
        lately.append((tokens, seconds))
        cost = self.loads[tier]
        self.loads[tier] = cost.scaled(self._correction(tier, seconds / cost.seconds(tokens)))

    def meeting(self, front: int, back: int, tier: str, busy: float = 0.0) -> float:
        """Returns the position where computing and loading finish at the same time.

        Computing goes from ``front`` up, loading from ``back`` down. This is the split of equation
        1, with a cost of computing that grows with the position.

        Args:
            front: first token that is not computed.
            back: end of the tokens that are not loaded.
            busy: seconds until loading begins; ``back`` is returned if it is infinite.

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
        # This form also holds for half = 0.
        at = 2 * constant / (slope + math.sqrt(max(slope * slope + 4 * half * constant, 0.0)))
        return min(max(at, float(front)), float(back))

    def remaining(self, front: int, back: int, end: int, prompt_tokens: int, tier: str) -> float:
        """Returns the seconds until a request is restored and its prompt computed.

        Assumes that computing and loading serve only this request.

        Args:
            front: first token that is not computed.
            back: end of the tokens that are not loaded.
            end: end of the tokens that are computed or restored before the rest of the prompt.
            prompt_tokens: tokens of the prompt.
        """
        seconds = self.compute.seconds(end, prompt_tokens) if prompt_tokens > end else 0.0
        if front < back:
            meeting = self.meeting(front, back, tier)
            seconds += self.loads[tier].per_token * (back - meeting)
        return seconds

    def recomputing(self, front: int, back: int) -> float:
        """Returns the seconds of computing what is not loaded (remaining work of Algorithm 1)."""
        return self.compute.in_chunks(front, back, self.chunk) if front < back else 0.0

    def _correction(self, what: str, ratio: float) -> float:
        if what not in self.measured and what not in self._seen:
            self._seen.add(what)
            self.epoch += 1
            return ratio
        return _MEMORY + (1 - _MEMORY) * min(max(ratio, 1 / _FARTHEST), _FARTHEST)
