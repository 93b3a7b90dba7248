"""Random scenarios of a whole scheduler on the simulated device, and what is wrong about them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

from simulated_engine import LARGE, PAGE, SMALL, SimulatedEngine, resources
from simulated_scheduler import Scheduler
from simulated_streams import SimulatedStreams

from sgl_ext.engine.restore import by_tokens


@dataclass
class Findings:
    races: list[str]
    """Reports of the race checker."""
    wrong: list[str]
    """Forwards that read wrong KV, and errors in the final state."""
    counts: Counter[str]


def run(streams: SimulatedStreams, seed: int, *, large: bool = False, steps: int = 20) -> Findings:
    """Runs one scenario on the device of ``streams``, which has nothing else to do."""
    device, before = streams.device, resources(streams.device)
    with patch.object(by_tokens, "LOAD_TOKENS", PAGE):
        wrong, counts = _scenario(streams, random.Random(seed), seed, large, steps)  # noqa: S311
    if count := device.pageable_copies:
        wrong.append(f"{count} copies of pageable memory")
    wrong += [f"{name}: {n}" for name, n in resources(device).items() if n != before[name]]
    found = Findings(device.races, wrong, counts)
    device.reset()
    return found


def _scenario(
    streams: SimulatedStreams, chance: random.Random, seed: int, large: bool, steps: int
) -> tuple[list[str], Counter[str]]:
    streams.device.seed(seed if chance.random() < 0.7 else 0)
    holding = chance.choice([0.0, 0.5, 1.0])
    blocks = 16 if large else chance.randint(14, 28)
    lower = chance.random() < 0.6
    host = chance.randint(6, 10 if lower or large else 20)
    engine = SimulatedEngine(
        streams, blocks, host, chance.randint(2, 4), lower=lower,
        emulated=chance.random() < 0.1, layout=LARGE if large else SMALL,
    )  # fmt: skip
    scheduler = Scheduler(engine, chance)
    for _ in range(chance.randint(steps // 2, steps)):
        if chance.random() < holding:
            streams.hold()
        scheduler.step()
        if chance.random() < 0.2:
            streams.release()
        if chance.random() < 0.03:
            scheduler.reset()
        scheduler.check()
    wrong = scheduler.wrong
    if chance.random() < 0.5:  # otherwise it is closed in the middle of everything
        scheduler.drain()
        wrong += scheduler.wrong_at_end()
    if scheduler.last is not None:
        engine.device.destroy_event(scheduler.last.event)
    if scheduler.lending is not None:
        scheduler.lending.close()
    engine.close()
    if scheduler.last is not None:
        wrong += engine.wrong_reads(scheduler.last.reads)
    return wrong, scheduler.counts
