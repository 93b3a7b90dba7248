"""Whole scenarios of a scheduler on the simulated device: no races, and no wrong KV is read."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from device_faults import FAULTS, LENDING
from device_scenarios import Findings, run
from simulated_device import SimulatedDevice
from simulated_streams import SimulatedStreams
from transfer_kit import fake_cuda

ROUNDS = int(os.environ.get("SGLEXT_ROUNDS", "0")) or 2000
PARTS = 10
LENT = max(ROUNDS // 20, 1)
"""Scenarios in which memory is lent, whose blocks are 5,000 times as large."""
MOST = 4000
"""Scenarios within which each planted fault is found."""
HAPPENS = (
    "load", "fill", "fill tokens", "layers", "tokens", "withdrawn", "deferred",
    "swapped out", "resumed", "landed ahead", "recomputed", "resets",
)  # fmt: skip
"""Events that occur in the scenarios of each part."""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(fake_cuda(tmp_path_factory.mktemp("cuda")))
    yield device
    device.close()


@pytest.fixture(scope="module")
def streams(device: SimulatedDevice) -> SimulatedStreams:
    return SimulatedStreams(device)


def check(found: Findings, seed: int) -> None:
    assert not found.races, (seed, *found.races[:5])
    assert not found.wrong, (seed, *found.wrong[:5])


@pytest.mark.parametrize("part", range(PARTS))
def test_scenarios_have_no_race_and_read_what_was_computed(
    streams: SimulatedStreams, part: int
) -> None:
    counts: Counter[str] = Counter()
    rounds = -(-ROUNDS // PARTS)
    for seed in range(1 + part * rounds, 1 + (part + 1) * rounds):
        found = run(streams, seed)
        check(found, seed)
        counts += found.counts
    if rounds >= 200:
        assert not set(HAPPENS) - counts.keys()


def test_memory_is_lent_without_a_race(streams: SimulatedStreams) -> None:
    counts: Counter[str] = Counter()
    for seed in range(1, 1 + LENT):
        found = run(streams, seed, large=True)
        check(found, seed)
        counts += found.counts
    if LENT >= 20:
        assert not {"lent", "reclaimed", "unmapped"} - counts.keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant, shown = FAULTS[fault]
    streams = SimulatedStreams(device)
    with monkeypatch.context() as patch:
        plant(patch)
        for seed in range(1, MOST):
            found = run(streams, seed, large=fault in LENDING)
            if any(re.search(shown, text) for text in (*found.races, *found.wrong)):
                break
        else:
            pytest.fail(f"{MOST} scenarios do not show it")
    gc.collect()
