"""Tables of ``RESULTS.md``: their columns and rows, and the committed results behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sgl_ext.config import Chunks

_RESULTS = Path(__file__).parents[2] / "sgl_ext" / "bench" / "results"

Match = Mapping[str, object]
"""Keys of a run and their values."""
Form = Callable[[Any], str]


def form(digits: int, unit: str = "", scale: float = 1.0) -> Form:
    """Returns a format: ``digits`` decimals of the value times ``scale``, and the unit."""
    return lambda value: f"{value * scale:,.{digits}f}{unit}"


def each_of(digits: int, unit: str) -> Form:
    """Returns a format of several values."""
    return lambda values: ", ".join(f"{value:,.{digits}f}" for value in values) + unit


MS, S, S_OF_MS = form(0, " ms"), form(2, " s"), form(2, " s", 1e-3)
TIMES, PERCENT = form(2, "\N{MULTIPLICATION SIGN}"), form(0, " %", 100)


class Column(NamedTuple):
    """Column of a table: the value ``key`` of the run that matches the row and ``match``."""

    title: str
    key: str
    form: Form
    match: Match = MappingProxyType({})


class Ratio(NamedTuple):
    """Column of the ratio of two other columns."""

    title: str
    above: Column
    below: Column


class Table(NamedTuple):
    """Table with one row for each label and the runs that it selects."""

    file: str
    """Name of the result, without ``.json``."""
    corner: str
    """Title of the column of labels."""
    rows: Mapping[str, Match]
    columns: Sequence[Column | Ratio]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table in Markdown."""
        yield _line([self.corner, *(column.title for column in self.columns)])
        yield "|---" * (1 + len(self.columns)) + "|"
        for label, row in self.rows.items():
            yield _line([label, *(self._cell(row, column) for column in self.columns)])

    def value(self, row: Match, column: Column) -> float | None:
        """Returns the value of a cell; None if no run has it."""
        wanted = {**row, **column.match}
        found = [
            each for each in result(self.file)["runs"] if wanted.items() <= _plain(each).items()
        ]
        if len(found) > 1:
            raise SystemExit(f"{self.file}.json has {len(found)} runs with {wanted}; expected one")
        value: float | None = found[0].get(column.key) if found else None
        return value

    def _cell(self, row: Match, column: Column | Ratio) -> str:
        if isinstance(column, Column):
            value = self.value(row, column)
            return "" if value is None else column.form(value)
        above, below = (self.value(row, each) for each in column[1:])
        return "" if above is None or below is None else TIMES(above / below)


class Figures(NamedTuple):
    """Table with one row for each figure of a result."""

    file: str
    """Name of the result, without ``.json``."""
    corner: str
    """Title of the column of labels."""
    rows: Mapping[str, tuple[str, Form]]
    """Name in the result and format of each labelled figure."""

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table in Markdown."""
        yield from (_line([self.corner, ""]), "|---|---|")
        figures = result(self.file)["figures"]
        for label, (name, as_) in self.rows.items():
            yield _line([label, as_(figures[name])])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(run: Match) -> Match:
    """Returns the part of a run that a match can name."""
    return {key: value for key, value in run.items() if isinstance(value, str | int | float)}


@cache
def result(file: str) -> Mapping[str, Any]:
    """Returns a committed result."""
    found: Mapping[str, Any] = json.loads((_RESULTS / f"{file}.json").read_text())
    return found


def systems(*names: str) -> dict[str, Match]:
    """Returns one row for each system, labelled with its name in the result."""
    return {f"`{name}`" if name in CODE else name: {"system": name} for name in names}


def ranks(prefix: str, as_: Form, title: str = "", **match: object) -> list[Column]:
    """Returns the columns of the percentiles of ``prefix``."""
    return [Column(f"{title}p{rank}", f"{prefix}_p{rank}", as_, match) for rank in (50, 90, 99)]


def compared(column: Column, system: str, title: str, other: str) -> list[Column | Ratio]:
    """Returns ``column`` for two systems, and the ratio of its values.

    Args:
        column: column of ``system``.
        title: title of the column of the system ``other``.
    """
    ours = column._replace(match={"system": system})
    theirs = column._replace(title=title, match={"system": other})
    return [ours, theirs, Ratio("ratio", ours, theirs)]


LINKED = Chunks().method
CODE = {"blend-15", "lego-16", "query-5", "query-15", LINKED, "cake", "longest", "shortest"}
