"""Outcome of a part, in a JSON file that is rewritten with every finding."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Outcome:
    """Findings of a part. What a part has found before it is stopped stays in the file.

    Args:
        file: path of the JSON file.
        thresholds: whether a figure beyond its bound is a failure.
    """

    def __init__(self, file: Path | None = None, *, thresholds: bool = True) -> None:
        self._file, self._thresholds = file, thresholds
        self.figures: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.refused: dict[str, str] = {}
        """Reasons of refused starts, by system."""
        self.lacking: dict[str, str] = {}
        """Steps that were skipped because the machine lacks something, with the reason."""
        self.seconds: dict[str, float] = {}
        """Durations of the steps of the part."""

    def row(self, **found: Any) -> None:
        """Adds a row of a table."""
        self.rows.append(found)
        self._save()

    def figure(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Adds a figure; beyond a bound it is a failure."""
        self.figures[name] = value
        bound = f"at most {at_most:g}" if at_most is not None else f"at least {at_least}"
        beyond = (at_most is not None and value > at_most) or (
            at_least is not None and value < at_least
        )
        expected = "" if at_most is None and at_least is None else f" (expected {bound})"
        print(f"  {name} = {value:.4g}{expected}", flush=True)
        if beyond and self._thresholds:
            self.fail(f"{name} is {value:.4g}, expected {bound}")
        self._save()

    def fail(self, what: str) -> None:
        print(f"  FAILED: {what}", flush=True)
        self.failed.append(what)
        self._save()

    def refuse(self, system: str, reason: str) -> None:
        """Records that the extension refused to start a system."""
        print(f"  {system} refused: {reason}", flush=True)
        self.refused[system] = reason
        self._save()

    def lack(self, what: str, reason: str) -> None:
        """Records what is left out on this machine."""
        print(f"  {what} left out: {reason}", flush=True)
        self.lacking[what] = reason
        self._save()

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Records and prints the duration of a step; an error in it is a failure of the part."""
        begin = time.monotonic()
        try:
            yield
        except Exception as error:
            self.fail(f"{what}: {type(error).__name__}: {str(error)[:2000]}")
        finally:
            self.seconds[what] = round(time.monotonic() - begin, 1)
            print(f"  {what}: {self.seconds[what]} s", flush=True)
            self._save()

    @property
    def status(self) -> str:
        """``failed``, ``refused``, ``left out`` (nothing was found), or ``passed``."""
        if self.failed:
            return "failed"
        if self.refused:
            return "refused"
        return "passed" if self.rows or self.figures or not self.lacking else "left out"

    def content(self) -> dict[str, Any]:
        """Returns the findings in JSON types."""
        return {
            "status": self.status,
            "failed": self.failed,
            "refused": self.refused,
            "lacking": self.lacking,
            "figures": self.figures,
            "rows": self.rows,
            "seconds": self.seconds,
        }

    def _save(self) -> None:
        if self._file is not None:
            write_json(self._file, self.content())


def write_json(file: Path, content: object) -> None:
    """Replaces a JSON file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(file)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Returns median, smallest and largest of samples, and their number."""
    import statistics

    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "count": len(samples),
    }
