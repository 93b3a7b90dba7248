"""Random fault schedules of the planner, with integrity checks after every event."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from planning_schedules import Schedule

ROUNDS = int(os.environ.get("SGLEXT_ROUNDS", "0")) or 1000
PARTS = 4
EVENTS = 60
OCCUR = (
    "aborted", "cleared", "computed", "given up", "linked", "loaded", "no room", "restored",
    "stalls", "waited", "whole",
)  # fmt: skip
"""Events that occur in the schedules of each part."""


@pytest.mark.parametrize("part", range(PARTS))
def test_faults_of_every_source_leave_requests_and_memory_whole(part: int) -> None:
    counts: Counter[str] = Counter()
    rounds = -(-ROUNDS // PARTS)
    for seed in range(part * rounds, (part + 1) * rounds):
        try:
            counts += Schedule(seed).run(EVENTS)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error
    if rounds >= 200:
        assert not set(OCCUR) - counts.keys()
