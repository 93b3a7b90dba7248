"""The result of a benchmark: a table for people, a JSON file for programs."""

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
    """Figures and the runs they come from."""

    name: str
    config: Mapping[str, Any]
    figures: dict[str, float] = field(default_factory=dict)
    """What an issue or the README names; dimensionless ratios unless the key says a unit."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """One row per measured system and setting, as printed."""
    machine: Mapping[str, Any] = field(default_factory=machine.describe)
    failed: str = ""
    """Why the command fails although everything was measured."""

    def write(self, directory: Path) -> Path:
        """Writes ``directory/NAME.json`` whole or not at all."""
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
        # A table for each kind of thing: what is measured in one bench may differ widely.
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
    """Percentiles of ``samples`` (times ``scale``) as ``PREFIX_p50`` and so on."""
    scaled = sorted(sample * scale for sample in samples)
    if len(scaled) < 2:
        return {f"{prefix}_p50": scaled[0]} if scaled else {}
    cuts = statistics.quantiles(scaled, n=100, method="inclusive")
    return {f"{prefix}_p{p}": cuts[p - 1] for p in (50, 90, 99)}
