"""Page of benchmark records, with tables and plots, which ``sgl-ext report`` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sgl_ext.bench.harness.runs import cell, kinds
from sgl_ext.bench.plots import HEIGHT, WIDTH, plots
from sgl_ext.errors import ExtError

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>sgl_ext: benchmarks</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .7rem .15rem 0; text-align: right; border-bottom: 1px solid #ddd }
th.name, td.name { text-align: left }
.plot td { border: 0 } .plot caption { text-align: left; font-weight: 600 }
.plot, .bar { width: 100% } .plot .name { white-space: nowrap }
.bar div { background: #2b7bba; height: 1em; min-width: 1px }
figure { margin: .5rem 0 1.5rem; max-width: 50rem } figcaption { font-weight: 600 }
svg { width: 100%; height: auto; font-size: 12px; fill: currentColor }
polyline, .axis { fill: none; stroke-width: 2 } .axis { stroke: #999; stroke-width: 1 }
.quiet { color: #666 } div.wide { overflow-x: auto }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd } th, td { border-color: #444 } .quiet { color: #999 } }
</style></head><body>
{%- for record in records %}
<h1 id="{{ record.name }}">{{ record.name }}</h1>
<p class="quiet">{{ record.machine }}<br>{{ record.config }}</p>
{%- for kind in record.kinds %}
<h2>{{ kind.of.name or record.name }}</h2>
{%- for plot in kind.plots %}
{%- if plot.lines %}
<figure><figcaption>{{ plot.title }}</figcaption>
<svg viewBox="-70 -10 {{ width + 110 }} {{ height + 50 }}" role="img" aria-label="{{ plot.title }}">
<path class="axis" d="M0 0V{{ height }}H{{ width }}"/>
<text x="-6" y="5" text-anchor="end">{{ plot.highest | cell }}</text>
<text x="-6" y="{{ height }}" text-anchor="end">0</text>
{%- for x, text in plot.ticks %}
<text x="{{ x | round(1) }}" y="{{ height + 18 }}" text-anchor="middle">{{ text }}</text>
{%- endfor %}
<text x="{{ width / 2 }}" y="{{ height + 36 }}" text-anchor="middle">{{ plot.over }}</text>
{%- for line in plot.lines %}
<polyline stroke="{{ line.colour }}" points="
{%- for x, y in line.points %}{{ x | round(1) }},{{ y | round(1) }} {% endfor %}"/>
{%- for x, y in line.points %}
<circle fill="{{ line.colour }}" r="3" cx="{{ x | round(1) }}" cy="{{ y | round(1) }}"/>
{%- endfor %}
{%- endfor %}
</svg>
<p>{% for line in plot.lines %}<span style="color: {{ line.colour }}">&#9632;</span>
 {{ line.label }} &nbsp; {% endfor %}</p></figure>
{%- else %}
<table class="plot"><caption>{{ plot.title }}</caption>
{%- for bar in plot.bars %}
<tr><td class="name">{{ bar.label }}</td>
<td class="bar"><div style="width: {{ bar.length | round(1) }}%"></div></td>
<td>{{ bar.value | cell }}</td><td class="quiet name">{{ bar.spread }}</td></tr>
{%- endfor %}</table>
{%- endif %}
{%- endfor %}
<div class="wide"><table><tr>
{%- for key in kind.of.keys %}<th class="name">{{ key }}</th>{% endfor %}
{%- for value in kind.of.values %}<th>{{ value }}</th>{% endfor %}</tr>
{%- for run in kind.of.runs %}
<tr>{% for key in kind.of.keys %}<td class="name">{{ run.get(key) | cell }}</td>{% endfor %}
{%- for value in kind.of.values %}<td>{{ run.get(value) | cell }}</td>{% endfor %}</tr>
{%- endfor %}</table></div>
<p class="quiet">{{ kind.of.caption }}</p>
{%- endfor %}
<h2>Figures</h2>
<table>{% for name, value in record.figures.items() %}
<tr><td class="name">{{ name }}</td><td>{{ value | cell }}</td></tr>{% endfor %}</table>
{%- endfor %}
</body></html>
"""


class Record(msgspec.Struct):
    """Record of a benchmark, as :class:`~sgl_ext.bench.harness.report.Report` writes it."""

    name: str
    machine: dict[str, Any]
    config: dict[str, Any]
    figures: dict[str, float]
    runs: list[dict[str, Any]]


def page(records: Sequence[Record]) -> str:
    """Returns the page of some records."""
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters["cell"] = cell
    shown = [
        {
            "name": record.name,
            "machine": _text(record.machine),
            "config": _text(record.config),
            "kinds": [{"of": each, "plots": [*plots(each)]} for each in kinds(record.runs)],
            "figures": record.figures,
        }
        for record in records
    ]
    return environment.from_string(_PAGE).render(records=shown, width=WIDTH, height=HEIGHT)


def _text(of: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {cell(value)}" for name, value in of.items())


def read(path: Path) -> Record:
    """Reads a record.

    Raises:
        OSError: the file cannot be read.
        ExtError: the file is not a record.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.MsgspecError as error:
        raise ExtError(f"{path} is not a record of a benchmark: {error}") from None
