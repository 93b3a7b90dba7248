"""Report of a benchmark, as tables and as a JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from sgl_ext.bench.harness import machine
from sgl_ext.bench.harness.runs import kinds, tables

SCHEMA = 1


@dataclass
class Report:
    """Figures of a benchmark, and the runs that they are calculated from."""

    name: str
    config: Mapping[str, Any]
    figures: dict[str, float] = field(default_factory=dict)
    """Values that an issue or a README quotes; dimensionless ratios unless the key has a unit."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """One row for each measured system and setting, as printed."""
    machine: Mapping[str, Any] = field(default_factory=machine.describe)
    failed: str = ""
    """Reason for which the command fails although everything was measured; empty if it does not."""

    def write(self, directory: Path) -> Path:
        """Writes ``directory/NAME.json`` atomically and returns its path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        content = {
            "schema": SCHEMA,
            "name": self.name,
            "machine": dict(self.machine),
            "config": dict(self.config),
            "figures": self.figures,
            "runs": self.runs,
        }
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.rename(path)
        return path

    def print(self) -> None:
        """Prints the runs as tables and the figures below them."""
        console = Console()
        for kind in kinds(self.runs):
            title = f"bench {self.name}: {kind.name}".rstrip(": ")
            for table in tables(kind, title, console.width):
                console.print(table)
        for key, value in self.figures.items():
            console.print(f"figures.{key} = {value:.3f}", highlight=False)


def summary(samples: Sequence[float], prefix: str, scale: float = 1.0) -> dict[str, float]:
    """Returns percentiles of ``samples`` times ``scale``: ``PREFIX_p50``, ``_p90`` and ``_p99``.

    A single sample has ``PREFIX_p50`` only.
    """
    scaled = sorted(sample * scale for sample in samples)
    if len(scaled) < 2:
        return {f"{prefix}_p50": scaled[0]} if scaled else {}
    cuts = statistics.quantiles(scaled, n=100, method="inclusive")
    return {f"{prefix}_p{p}": cuts[p - 1] for p in (50, 90, 99)}
