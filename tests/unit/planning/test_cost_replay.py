"""Replay of requests whose true costs an oracle knows, and the excess costs of the model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from sgl_ext.planning import choices
from sgl_ext.planning.compute_cost import ComputeCost, DecodeCost
from sgl_ext.planning.costs import HOST, Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.tiers.throughput import LoadThroughput

NOISE = 0.2
"""Standard deviation of the logarithm of durations."""
CHUNK = 512


@dataclass
class Truth:
    """Costs of the machine, which the model sees only by measurements."""

    compute: ComputeCost = field(default_factory=lambda: ComputeCost(2e-2, 4e-4, 2e-8))
    decode: DecodeCost = field(default_factory=lambda: DecodeCost(2e-2, 1e-3))
    loads: dict[str, LoadCost] = field(
        default_factory=lambda: {"ssd": LoadCost(2e-3, 4.5e-4), HOST: LoadCost(1e-3, 3e-4)}
    )


class Replay:
    """Stream of requests: forwards and decode steps, and decisions about prefixes and swap-ins.

    Args:
        learns: whether the model sees measurements; without them it keeps its first estimates.
    """

    def __init__(self, seed: int, *, learns: bool = True) -> None:
        self.chance = random.Random(seed)  # noqa: S311
        self.truth = Truth()
        self.costs = Costs(chunk=CHUNK)
        self.now = 0.0
        self.throughput = LoadThroughput(lambda: self.now)
        self.learns = learns
        self.spent = self.least = 0.0
        self.chosen: set[tuple[str, bool]] = set()

    def measured(self, seconds: float) -> float:
        late = self.chance.uniform(2, 8) if self.chance.random() < 0.03 else 1.0
        return seconds * math.exp(NOISE * self.chance.gauss(0, 1)) * late

    def compute(self, parts: list[tuple[int, int]]) -> None:
        true = self.truth.compute
        seconds = true.overhead + sum(true.work(*part) for part in parts)
        self.now += seconds
        if self.learns:
            self.costs.forwarded(parts, self.measured(seconds))

    def load(self, channel: str, tokens: int) -> None:
        seconds = self.truth.loads[channel].seconds(tokens)
        self.now += seconds
        if self.learns:
            self.costs.loaded(channel, tokens, self.measured(seconds))

    def decode(self, requests: int) -> None:
        seconds = self.truth.decode.seconds(requests)
        self.now += seconds
        if self.learns:
            self.costs.decoded(requests, self.measured(seconds))

    def account(self, kind: str, taken: float, other: float, choice: bool) -> None:
        self.spent += taken
        self.least += min(taken, other)
        self.chosen.add((kind, choice))

    def prefix(self) -> None:
        """A prompt whose prefix an SSD has: wait for it, or compute it."""
        tokens, begin = self.chance.randrange(16, 3000), self.chance.randrange(4000)
        loading = self.truth.loads["ssd"].seconds(tokens)
        computing = self.truth.compute.in_chunks(begin, begin + tokens, CHUNK)
        faster = self.costs.worth_loading("ssd", tokens, begin)
        if waits := self.throughput.worthwhile(faster=faster):
            self.throughput.begin(0.0)
            self.load("ssd", tokens)
            self.throughput.end()
        else:
            for at in range(begin, begin + tokens, CHUNK):
                self.compute([(at, min(at + CHUNK, begin + tokens))])
        taken, other = (loading, computing) if waits else (computing, loading)
        self.account("prefix", taken, other, waits)

    def resume(self, number: int) -> None:
        """A swapped request: load it or recompute it; wait for it, or decode meanwhile."""
        tokens, running = self.chance.randrange(16, 3000), self.chance.choice([0, 0, 1, 2, 8])
        loading = self.truth.loads[HOST].seconds(tokens)
        computing = self.truth.compute.in_chunks(0, tokens, CHUNK) * (running + 1)
        iteration = self.truth.decode.seconds(max(running, 1))
        waiting, beside = loading * (running + 1), math.ceil(loading / iteration) * iteration
        short = loading / iteration * running <= math.ceil(loading / iteration)
        swapping = waiting if short else beside
        rid = f"{number}"
        if choices.recomputes(self.costs, 0, tokens, running, "auto", rid):
            for at in range(0, tokens, CHUNK):
                self.compute([(at, min(at + CHUNK, tokens))])
            self.account("resume", computing, swapping, False)
            return
        waits = choices.waits_for_swap_in(self.costs, tokens, running, rid)
        self.load(HOST, tokens)
        self.account("resume", waiting if waits else beside, min(computing, swapping), True)

    def run(self, requests: int) -> float:
        """Returns the seconds that the decisions cost, over those of the oracle."""
        self.spent = self.least = 0.0
        for number in range(requests):
            parts = []
            for _ in range(self.chance.choice([1, 1, 1, 2, 4])):
                begin = self.chance.randrange(0, 4000)
                parts.append((begin, begin + int(self.chance.lognormvariate(4.5, 1.0)) + 1))
            self.compute(parts)
            for _ in range(5):
                self.decode(self.chance.randrange(1, 12))
            self.prefix()
            self.resume(number)
            self.costs.check_integrity()
        return self.spent / self.least


def changed(truth: Truth, what: str, factor: float) -> Truth:
    compute, loads = truth.compute, truth.loads
    if what == "compute":
        compute = ComputeCost(
            compute.overhead * factor, compute.per_token * factor, compute.per_pair * factor
        )
    else:
        loads = {
            name: LoadCost(cost.latency * factor, cost.per_token * factor)
            for name, cost in loads.items()
        }
    return Truth(compute, truth.decode, loads)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", ["compute", "loads"])
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_decisions_cost_little_more_than_those_of_an_oracle(
    what: str, factor: float, seed: int
) -> None:
    replay = Replay(seed)
    assert replay.run(200) <= 1.1
    assert {choice for kind, choice in replay.chosen if kind == "prefix"} == {True, False}
    replay.truth = changed(replay.truth, what, factor)
    assert replay.run(200) <= 1.1


def test_without_measurements_decisions_cost_more() -> None:
    """The bound above distinguishes a model that learns from one that does not."""
    replay = Replay(0, learns=False)
    first = replay.truth
    replay.costs.seed(first.compute, first.loads, first.decode)
    assert replay.run(200) <= 1.01
    replay.truth = changed(first, "loads", 3.0)
    assert replay.run(200) > 1.2
