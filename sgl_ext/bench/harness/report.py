"""Report of a benchmark, as tables and as a JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sgl_ext.bench.harness import machine

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
        # One table for each kind of measurement, because their columns differ.
        kinds = [str(run.get("what", "")).partition(" ")[0] for run in self.runs]
        for kind in dict.fromkeys(kinds):
            runs = [run for run, of in zip(self.runs, kinds, strict=True) if of == kind]
            columns = list(dict.fromkeys(key for run in runs for key in run))
            table = Table(*columns, title=f"bench {self.name}")
            for run in runs:
                table.add_row(*(_cell(run.get(column)) for column in columns))
            console.print(table)
        for key, value in self.figures.items():
            console.print(f"figures.{key} = {value:.3f}", highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "" if value is None else str(value)


def summary(samples: Sequence[float], prefix: str, scale: float = 1.0) -> dict[str, float]:
    """Returns percentiles of ``samples`` times ``scale``: ``PREFIX_p50``, ``_p90`` and ``_p99``.

    A single sample has ``PREFIX_p50`` only.
    """
    scaled = sorted(sample * scale for sample in samples)
    if len(scaled) < 2:
        return {f"{prefix}_p50": scaled[0]} if scaled else {}
    cuts = statistics.quantiles(scaled, n=100, method="inclusive")
    return {f"{prefix}_p{p}": cuts[p - 1] for p in (50, 90, 99)}
