"""Cost model of one scheduler: what computing, decoding and moving KV takes.

All powers record what they measure here, and take their estimates from here. Sizes are in tokens,
times in seconds. The position where computing and loading meet is that of CacheFlow §3.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from sgl_ext.planning.compute_cost import ComputeCost, DecodeCost, features_of
from sgl_ext.planning.decisions import Decisions
from sgl_ext.planning.learner import Features, Learner
from sgl_ext.planning.load_cost import LoadCost

COMPUTE = "compute"
"""Name of the cost of computing."""
DECODE = "decode"
"""Name of the cost of decode steps."""
HOST = "host"
"""Channel from host memory to the device; a lower tier is the channel of its own name."""
HOST_OUT = "host-out"
"""Channel from the device to host memory."""
MOVE = "move"
"""Channel within one memory: copies of KV to other positions."""
_OBSERVED = 512
"""Recent forwards, and recent loads of each channel, that are kept."""


@dataclass
class Costs:
    """Estimated costs of one process, corrected by observations while it serves.

    The scheduler's thread records forwards and decode steps; one thread for each channel records
    its loads. Any thread reads the estimates.

    Attributes:
        compute: cost of a forward of prompts.
        loads: cost of a load, by the name of the channel.
        chunk: tokens of a forward that restores.
        measured: names of the costs that come from a profile: :data:`COMPUTE`, :data:`DECODE` and
            channels. The first observation replaces the default of any other cost.
    """

    compute: ComputeCost = field(default_factory=ComputeCost)
    loads: dict[str, LoadCost] = field(default_factory=dict)
    chunk: int = 512
    measured: frozenset[str] = frozenset()
    unit: int | None = None
    """Maximum tokens of one load of a restoration, each of which has the latency of its channel;
    None if a restoration is one load."""
    decode: DecodeCost = field(default_factory=DecodeCost)
    decisions: Decisions = field(default_factory=Decisions, repr=False)
    forwards: deque[tuple[int, int, float]] = field(
        default_factory=lambda: deque(maxlen=_OBSERVED), repr=False
    )
    """Recent forwards of one prompt: ``(begin, end, seconds)``."""
    loaded_lately: dict[str, deque[tuple[int, float]]] = field(default_factory=dict, repr=False)
    """Recent loads by channel: ``(tokens, seconds)``."""
    _learners: dict[str, Learner] = field(default_factory=dict, repr=False)
    """Estimates by the name of their cost, since its first observation."""

    @property
    def epoch(self) -> int:
        """Number of costs without a profile that were observed. Each change invalidates all earlier
        estimates."""
        return len({*self._learners} - self.measured)

    def open(self, channel: str) -> None:
        """Adds a channel, unless it is known already, with a default cost."""
        self.loads.setdefault(channel, LoadCost())

    def known(self, name: str, times: int = 1) -> bool:
        """Returns whether a cost is measured: by a profile, or ``times`` while serving."""
        if name in self.measured:
            return True
        learner = self._learners.get(name)
        return learner is not None and learner.count >= times

    def seed(
        self, compute: ComputeCost, loads: Mapping[str, LoadCost], decode: DecodeCost | None
    ) -> None:
        """Takes over the costs of a profile, before the first observation."""
        self.compute = compute
        self.loads |= loads
        self.measured |= {COMPUTE, *loads}
        if decode is not None:
            self.decode = decode
            self.measured |= {DECODE}

    # --- observations -----------------------------------------------------------------------------

    def computed(self, begin: int, end: int, seconds: float) -> None:
        """Records a forward over tokens ``begin .. end - 1`` of one prompt."""
        self.forwarded([(begin, end)], seconds)

    def forwarded(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Records a forward that computes only these parts of prompts.

        Args:
            parts: tokens ``begin .. end - 1`` of each prompt.
        """
        if len(parts) == 1:
            self.forwards.append((*parts[0], seconds))
        believed = self.compute.overhead, self.compute.per_token, self.compute.per_pair
        if costs := self._learn(COMPUTE, "forward", features_of(parts), seconds, believed):
            self.compute = ComputeCost(*costs)

    def decoded(self, requests: int, seconds: float) -> None:
        """Records a decode step of some requests."""
        believed = self.decode.overhead, self.decode.per_request
        if costs := self._learn(DECODE, DECODE, (1.0, requests), seconds, believed):
            self.decode = DecodeCost(*costs)

    def loaded(self, channel: str, tokens: int, seconds: float) -> None:
        """Records a load of ``tokens`` tokens through a channel."""
        lately = self.loaded_lately.setdefault(channel, deque(maxlen=_OBSERVED))
        lately.append((tokens, seconds))
        cost = self.loads.get(channel, LoadCost())
        believed = cost.latency, cost.per_token
        if costs := self._learn(channel, channel, (1.0, tokens), seconds, believed):
            self.loads[channel] = LoadCost(*costs)

    def _learn(
        self, name: str, kind: str, features: Features, seconds: float, believed: Features
    ) -> Features | None:
        """Records an operation and the error of its prediction.

        Returns:
            The new costs; None if the operation says nothing.
        """
        if seconds <= 0 or features[1] <= 0:
            return None  # nothing was done, or the clock did not see it
        if self.known(name):
            predicted = sum(cost * each for cost, each in zip(believed, features, strict=True))
            self.decisions.observed(kind, predicted, seconds)
        if (learner := self._learners.get(name)) is None:
            # A decode step reads all weights, whatever its number of requests.
            learner = self._learners[name] = Learner(
                believed if name in self.measured else None, main=0 if name == DECODE else 1
            )
        return learner.observe(features, seconds)

    # --- estimates --------------------------------------------------------------------------------

    def computing(self, begin: int, end: int) -> float:
        """Returns the seconds of computing tokens ``begin .. end - 1`` of a prompt in chunks."""
        return self.compute.in_chunks(begin, end, self.chunk)

    def worth_loading(self, channel: str, tokens: int, begin: int, key: str | None = None) -> bool:
        """Returns whether loading is expected to be faster than computing.

        True as long as one of both costs is unknown.

        Args:
            tokens: tokens to load.
            begin: position of the first of them in the prompt.
            key: key of the decision, under which :meth:`Decisions.ended` finds it.
        """
        if not (self.known(channel) and self.known(COMPUTE)):
            return True
        seconds = {
            "wait": self.loads[channel].seconds(tokens),
            "compute": self.computing(begin, begin + tokens),
        }
        return self.decisions.least("wait_for_tier", seconds, key) == "wait"

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
        half, per_load = self.compute.per_pair / 2, self.per_loaded(tier)
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
            seconds += self.per_loaded(tier) * (back - meeting)
        return seconds

    def recomputing(self, front: int, back: int) -> float:
        """Returns the seconds of computing what is not loaded (remaining work of Algorithm 1)."""
        return self.compute.in_chunks(front, back, self.chunk) if front < back else 0.0

    def per_loaded(self, channel: str) -> float:
        """Returns the seconds per token of a restoration's loads."""
        cost = self.loads[channel]
        return cost.per_token + (cost.latency / self.unit if self.unit else 0.0)

    # --- state ------------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """Returns the estimates and recent observations, for ``/server_info``."""
        return {
            "measured": sorted(self.measured),
            "known": sorted(self.measured | {*self._learners}),
            "compute": asdict(self.compute),
            "decode": asdict(self.decode),
            "loads": {name: asdict(cost) for name, cost in [*self.loads.items()]},
            "forwards": [*self.forwards],
            "loaded": {name: [*each] for name, each in [*self.loaded_lately.items()]},
        }

    def check_integrity(self) -> None:
        """Checks that all estimates are usable, and the decisions.

        Raises:
            AssertionError: a cost is negative or not a number, or a token costs nothing.
        """
        costs = {name: (cost.latency, cost.per_token, 0.0) for name, cost in self.loads.items()}
        costs[DECODE] = self.decode.overhead, self.decode.per_request, 0.0
        costs[COMPUTE] = self.compute.overhead, self.compute.per_token, self.compute.per_pair
        for name, (fixed, each, pair) in costs.items():
            if not (0 <= fixed < math.inf and 0 < each < math.inf and 0 <= pair < math.inf):
                raise AssertionError(f"the cost of {name} is {fixed}, {each} and {pair}")
        self.decisions.check_integrity()
