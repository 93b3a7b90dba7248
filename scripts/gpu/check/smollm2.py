"""Answers of SmolLM2-135M under some of the systems of :mod:`.equal`."""

from __future__ import annotations

from gpu.check import equal, models
from gpu.check.outcome import Outcome
from gpu.check.setup import Setup

SYSTEMS = ("stock", "slab", "tiers", "restore-tokens", "swap", "chunks")


def run(setup: Setup, outcome: Outcome) -> None:
    """Compares the systems, if the model is there."""
    model = models.smollm2()
    if model is None:
        outcome.lack("SmolLM2", "it was not carried; see scripts/gpu/carry.sh")
        return
    compared = [each for each in equal.systems(setup) if each.name in SYSTEMS]
    equal.compare(setup, outcome, model, compared)
