"""Runs of a report, arranged for people: what they share, what names them, what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

Run = Mapping[str, Any]
_WHAT = "what"
_PADDING = 2
"""Cells between two columns of a table."""


@dataclass(frozen=True)
class Kind:
    """Runs of one kind of measurement.

    Attributes:
        name: first word of the runs' ``what``.
        shared: columns with the same value in all runs, if there are several runs.
        keys: columns whose values together name a run.
        values: the other columns.
        runs: one row for each.
    """

    name: str
    shared: Mapping[str, Any]
    keys: Sequence[str]
    values: Sequence[str]
    runs: Sequence[Run]

    @property
    def caption(self) -> str:
        """Text of the shared columns."""
        return ", ".join(f"{name} {cell(value)}" for name, value in self.shared.items())

    def label(self, run: Run) -> str:
        """Returns the name of a run within its kind."""
        return ", ".join(cell(run.get(key)) for key in self.keys if key in run)


def kinds(runs: Sequence[Run]) -> Iterator[Kind]:
    """Yields the kinds of measurement, whose columns differ, in the order of their first runs."""
    names = [str(run.get(_WHAT, "")).partition(" ")[0].rstrip(",") for run in runs]
    for name in dict.fromkeys(names):
        yield _kind(name, [run for run, of in zip(runs, names, strict=True) if of == name])


def _kind(name: str, runs: Sequence[Run]) -> Kind:
    columns = list(dict.fromkeys(key for run in runs for key in run))
    shared = {
        column: runs[0][column]
        for column in columns
        if len(runs) > 1 and all(column in run and run[column] == runs[0][column] for run in runs)
    }
    left = [column for column in columns if column not in shared]
    texts = [column for column in left if any(isinstance(run.get(column), str) for run in runs)]
    keys: list[str] = []
    # Texts name a run, and numbers where texts do not suffice: a length, a number of requests.
    for column in (*texts, *(each for each in left if each not in texts)):
        if column not in texts and len({_key(run, keys) for run in runs}) == len(runs):
            break
        keys.append(column)
    return Kind(name, shared, keys, [each for each in left if each not in keys], runs)


def _key(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell(run.get(key)) for key in keys)


def cell(value: Any) -> str:
    """Returns the text of a value: numbers with four digits at most, or without decimals."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def tables(of: Kind, title: str, width: int) -> Iterator[Table]:
    """Yields tables of a kind that are at most ``width`` characters wide if its columns allow it.

    The columns that name a run are in each table.
    """
    widths = {
        column: max(len(column), *(len(cell(run.get(column))) for run in of.runs)) + _PADDING
        for column in (*of.keys, *of.values)
    }
    room = width - sum(widths[key] for key in of.keys)
    first = True
    values = [*of.values]
    while values or first:
        shown = [values.pop(0)] if values else []
        while values and sum(widths[each] for each in (*shown, values[0])) <= room:
            shown.append(values.pop(0))
        table = Table(
            title=title if first else None, caption=of.caption if not values else None,
            box=SIMPLE, pad_edge=False, padding=(0, _PADDING - 1, 0, 0), title_justify="left",
            caption_justify="left",
        )  # fmt: skip
        for column in (*of.keys, *shown):
            numbers = column in shown
            table.add_column(
                column, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold"
            )
        for run in of.runs:
            table.add_row(*(cell(run.get(column)) for column in (*of.keys, *shown)))
        yield table
        first = False
