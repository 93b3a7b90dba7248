"""Plots of a kind of measurement: bars by run, or lines over a number that names the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sgl_ext.bench.harness.runs import Kind, cell

WIDTH, HEIGHT = 640, 220
"""Size of the area of lines, in pixels."""
_PLOTS = 3
"""Most plots of a kind."""
_SERIES = 8
"""Most lines of a plot."""
_POINTS = 3
"""Fewest values of a number that lines are drawn over."""
_MEDIAN = "_p50"
_SPREADS = ("_low", "_high", "_min", "_max", "_p10", "_p90", "_p95", "_p99")
_NOT_PLOTTED = {"samples", "rounds", "seeds", "column", "low", "high"}
_LOW_HIGH = (("_low", "_high"), ("_min", "_max"))


class Bar(NamedTuple):
    """Value of a run."""

    label: str
    value: float
    length: float
    """Length of the bar, in per cent of the longest one."""
    spread: str
    """Text of the lowest and the highest value; empty if they are not known."""


class Line(NamedTuple):
    """Values of runs that differ in one number only."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    """Positions in pixels, by increasing number."""


class Plot(NamedTuple):
    """Plot of a column: bars, or lines over :attr:`over`."""

    title: str
    bars: Sequence[Bar] = ()
    over: str = ""
    lines: Sequence[Line] = ()
    ticks: Sequence[tuple[float, str]] = ()
    """Positions and texts of the numbers on the horizontal axis."""
    highest: float = 0.0
    """Value at the upper end of the vertical axis, which begins at 0."""


_COLOURS = (
    "#2b7bba", "#d1495b", "#3a8f5c", "#e09f3e", "#7b5ea7", "#4aa3a2", "#8d6e63", "#607d8b",
)  # fmt: skip


def plots(kind: Kind) -> Iterator[Plot]:
    """Yields plots of the columns of a kind that has several runs: medians before others."""
    columns = [
        column
        for column in kind.values
        if column not in _NOT_PLOTTED
        and not column.endswith(_SPREADS)
        and any(_number(run.get(column)) for run in kind.runs)
    ]
    columns.sort(key=lambda column: not column.endswith(_MEDIAN))
    if len(kind.runs) < 2:
        return
    for column in columns[:_PLOTS]:
        over = _over(kind, column)
        yield _bars(kind, column) if over is None else _lines(kind, column, over)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _over(kind: Kind, column: str) -> str | None:
    """Returns what lines of a column are drawn over: the last number that names runs, if any."""
    runs = [run for run in kind.runs if _number(run.get(column))]
    for key in reversed(kind.keys):
        values = [run.get(key) for run in runs]
        if all(map(_number, values)) and len({*values}) >= _POINTS:
            series = {_rest(kind, run, key) for run in runs}
            return key if len(series) <= _SERIES else None
    return None


def _rest(kind: Kind, run: Mapping[str, Any], but: str) -> str:
    return ", ".join(cell(run.get(key)) for key in kind.keys if key != but and key in run)


def _bars(kind: Kind, column: str) -> Plot:
    runs = [run for run in kind.runs if _number(run.get(column))]
    largest = max((float(run[column]) for run in runs), default=0.0)
    bars = [
        Bar(
            kind.label(run), float(run[column]),
            100 * max(float(run[column]) / largest, 0) if largest > 0 else 0.0,
            _spread(run, column),
        )
        for run in runs
    ]  # fmt: skip
    return Plot(column, bars)


def _spread(run: Mapping[str, Any], column: str) -> str:
    for low, high in _LOW_HIGH:
        if _number(run.get(column + low)) and _number(run.get(column + high)):
            return f"{cell(run[column + low])} to {cell(run[column + high])}"
    if _number(run.get("low")) and _number(run.get("high")):
        return f"{cell(run['low'])} to {cell(run['high'])}"
    stem = column.removesuffix(_MEDIAN)
    if stem != column and _number(run.get(f"{stem}_p99")):
        return f"p99 {cell(run[f'{stem}_p99'])}"
    return ""


def _lines(kind: Kind, column: str, over: str) -> Plot:
    series: dict[str, list[tuple[float, float]]] = {}
    for run in kind.runs:
        if _number(run.get(column)):
            at = float(run[over]), float(run[column])
            series.setdefault(_rest(kind, run, over), []).append(at)
    numbers = sorted({x for points in series.values() for x, _ in points})
    highest = max((y for points in series.values() for _, y in points), default=0.0)
    place = _places(numbers)
    lines = [
        Line(
            label or column, _COLOURS[at % len(_COLOURS)],
            [(place[x], HEIGHT * (1 - max(y, 0) / highest) if highest > 0 else HEIGHT)
             for x, y in sorted(points)],
        )
        for at, (label, points) in enumerate(series.items())
    ]  # fmt: skip
    ticks = [(place[x], cell(x)) for x in numbers]
    return Plot(f"{column} over {over}", over=over, lines=lines, ticks=ticks, highest=highest)


def _places(numbers: Sequence[float]) -> dict[float, float]:
    """Returns the horizontal positions of ascending numbers, on a logarithmic axis if they grow by
    factors."""
    growing = numbers[0] > 0 and numbers[-1] / numbers[0] >= 8
    scaled = [math.log(x) if growing else x for x in numbers]
    extent = scaled[-1] - scaled[0]
    return {x: WIDTH * (at - scaled[0]) / extent for x, at in zip(numbers, scaled, strict=True)}
