"""Writes the Grafana dashboard of all powers, below ``examples/monitoring``.

Failures come first. Counters of the Prometheus client end in ``_total``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent.parent / "examples/monitoring/grafana/dashboards/sgl_ext.json"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_EVERY = 'instance=~"$instance"'
_FIRST_RANK = f'{_EVERY},tp_rank=~"0?",pp_rank=~"0?"'
"""Selects one rank of each server: all of them count the same tokens and decisions."""


class Panel(NamedTuple):
    """Panel with one line for each expression, whose legend is its key."""

    title: str
    what: str
    unit: str
    lines: Mapping[str, str]


def each(name: str, *by: str, of: str = "sum") -> str:
    """Returns the expression of a metric's value, aggregated over all ranks by some labels.

    Args:
        of: PromQL aggregation operator.
    """
    found = f"sglang_ext:{name}{{{_EVERY}}}"
    return f"{of} by ({', '.join(by)}) ({found})" if by else f"{of}({found})"


def rate(name: str, *by: str) -> str:
    """Returns the expression of a counter's rate, summed over all ranks by some labels."""
    return _rate(name, _EVERY, by)


def once(name: str, *by: str) -> str:
    """Returns the expression of a counter's rate on the first rank of each server.

    It is for counters that have the same value on all ranks.
    """
    return _rate(name, _FIRST_RANK, by)


def _rate(name: str, which: str, by: Sequence[str]) -> str:
    found = f"rate(sglang_ext:{name}_total{{{which}}}[$__rate_interval])"
    return f"sum by ({', '.join(by)}) ({found})" if by else f"sum({found})"


def requests_of(name: str) -> str:
    """Returns the expression of SGLang's number of requests of all priorities."""
    return f'sum(sglang:{name}{{{_FIRST_RANK},priority=""}})'


def quantile(q: float, name: str, *by: str) -> str:
    """Returns the expression of a histogram's quantile, by some labels."""
    labels = ", ".join(("le", *by))
    buckets = f"rate({name}_bucket{{{_EVERY}}}[$__rate_interval])"
    return f"histogram_quantile({q:g}, sum by ({labels}) ({buckets}))"


ROWS: dict[str, Sequence[Panel]] = {
    "Failures": (
        Panel(
            # A rate would not show a reason's first failures, which begin its series.
            "Tiers: pages that failed since the start", "Computed instead. By tier and reason.",
            "short",
            {"{{tier}} {{reason}}": each("tiers_failures_total", "tier", "reason")},
        ),
        Panel(
            "Tiers: available", "0: the tier is off, see the server's log.", "short",
            {"{{instance}} {{tier}}": each("tiers_available", "instance", "tier", of="min")},
        ),
        Panel(
            "Chunks: missing KV", "Tokens per second that were computed instead.", "short",
            {"missing": once("chunks_missing_tokens")},
        ),
        Panel(
            "Peers: lent memory that was not returned in time", "The worker replaced it.", "short",
            {"replacements": rate("peer_replacements")},
        ),
        Panel(
            "Clusters: failures", "Lost devices; requests per second that were refused or ended.",
            "short",
            {
                "lost devices": each("clusters_lost_devices"),
                "requests": rate("clusters_failed_requests"),
            },
        ),
        Panel(
            "Requests per second that computed KV which existed",
            "Tiers: pages took longer than the configured wait. Swap: preempted requests whose KV "
            "was lost, not kept, or slower to load.",
            "short",
            {"tiers: late": once("tiers_late_loads"), "swap": once("swap_recomputed")},
        ),
        Panel(
            "Error of predictions", "Median relative error of the cost model, by what it predicts.",
            "percentunit", {"{{kind}}": each("planning_error", "kind", of="max")},
        ),
        Panel(
            "Requests", "Of SGLang.", "short",
            {
                "running": requests_of("num_running_reqs"),
                "waiting": requests_of("num_queue_reqs"),
            },
        ),
    ),
    "Latency": (
        Panel(
            "Time to first token", "Of SGLang.", "s",
            {
                f"p{100 * q:g}": quantile(q, "sglang:time_to_first_token_seconds")
                for q in (0.5, 0.95, 0.99)
            },
        ),
        Panel(
            "Time between tokens", "Of SGLang.", "s",
            {
                f"p{100 * q:g}": quantile(q, "sglang:inter_token_latency_seconds")
                for q in (0.5, 0.95, 0.99)
            },
        ),
        Panel(
            "Decisions", "Choices of the cost model per second.", "short",
            {"{{kind}}: {{choice}}": once("planning_decisions", "kind", "choice")},
        ),
    ),
    "Tiers and restoration": (
        Panel(
            "Tokens loaded instead of computed", "Per second, by tier.", "short",
            {"{{tier}}": once("tiers_hit_tokens", "tier")},
        ),
        Panel(
            "Hit rate",
            "Share of the tokens that were looked up in a tier and that it had. Tokens of restored "
            "prefixes count only where they were loaded.",
            "percentunit",
            {
                "{{tier}}": f"{once('tiers_hit_tokens', 'tier')} / "
                f"({once('tiers_hit_tokens', 'tier')} + {once('tiers_missed_tokens', 'tier')})"
            },
        ),
        Panel(
            "Traffic", "Loads and stores, by tier.", "Bps",
            {
                "{{tier}} loaded": rate("tiers_loaded_bytes", "tier"),
                "{{tier}} stored": rate("tiers_stored_bytes", "tier"),
            },
        ),
        Panel(
            "Full", "Pages in use, relative to the capacity.", "percentunit",
            {  # the capacity of a shared store is not known
                "{{tier}}": f"{each('tiers_pages', 'tier')} / "
                f"({each('tiers_capacity_pages', 'tier')} > 0)"
            },
        ),
        Panel(
            "Queue and evictions", "Operations in progress; evicted pages per second.", "short",
            {
                "{{tier}} queue": each("tiers_queue_depth", "tier"),
                "{{tier}} evicted": rate("tiers_evicted_pages", "tier"),
            },
        ),
        Panel(
            "Restored prefixes: tokens", "Per second, by the source of their KV.", "short",
            {"{{source}}": once("restore_tokens", "source")},
        ),
        Panel(
            "Stages of requests: seconds",
            "95th percentile of loads, restorations, swap-ins, and waits for contexts and memory.",
            "s",
            {"{{stage}}": quantile(0.95, "sglang_ext:stage_seconds", "stage")},
        ),
    ),
    "Chunks and clusters": (
        Panel(
            "Prompts with contexts: tokens", "Per second, by what was done for them.", "short",
            {
                name: once(f"chunks_{name}_tokens")
                for name in ("linked", "recomputed", "missing", "computed")
            },
        ),
        Panel(
            "Divergence of linked chunks", "Measured at the server's start.", "short",
            {
                "{{instance}} {{method}}": each(
                    "chunks_divergence_nats", "instance", "method", of="max"
                )
            },
        ),
        Panel(
            "Blocks of stored contexts", "Per second, by where they were when wanted.", "short",
            {"{{source}}": rate("clusters_blocks", "source")},
        ),
        Panel(
            "Stored contexts", "Open contexts, and requests that use one.", "short",
            {"open": each("clusters_open"), "requests": each("clusters_followed")},
        ),
    ),
    "Swapping and peers": (
        Panel(
            "Preempted requests", "Per second.", "short",
            {
                "swapped out": rate("swap_swapped_out"), "swapped in": rate("swap_swapped_in"),
                "recomputed": rate("swap_recomputed"),
                "retracted for a peer": rate("peer_retractions"),
            },
        ),
        Panel(
            "Seconds that the scheduler waited", "Per second, for swapping and for buffers.",
            "percentunit",
            {
                "for KV to resume": rate("swap_loading_seconds"),
                "for blocks still copied": rate("swap_waiting_seconds"),
                "for layer buffers": rate("peer_stream_waited_seconds"),
            },
        ),
        Panel(
            "Lent memory", "By role of the engine.", "bytes",
            {
                "{{role}} borrowed": each("peer_borrowed_bytes", "role"),
                "{{role}} lent": each("peer_lent_bytes", "role"),
                "{{role}} used": each("peer_used_bytes", "role"),
            },
        ),
    ),
}  # fmt: skip
"""Panels by the title of their row."""


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in Grafana's model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        panels.append(
            {"type": "row", "title": title, "id": len(panels) + 1, "gridPos": place, "panels": []}
        )
        top += 1
        for at, panel in enumerate(row):
            x, y = at % _COLUMNS * _WIDTH, top + at // _COLUMNS * _HEIGHT
            panels.append(
                {
                    "type": "timeseries",
                    "title": panel.title,
                    "description": panel.what,
                    "id": len(panels) + 1,
                    "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
                    "datasource": _SOURCE,
                    "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                    "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
                    "targets": [
                        {"refId": chr(65 + number), "expr": expr, "legendFormat": legend}
                        for number, (legend, expr) in enumerate(panel.lines.items())
                    ],
                }
            )
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    instance = {
        "name": "instance", "type": "query", "datasource": _SOURCE, "multi": True,
        "includeAll": True, "refresh": 2,
        "query": "label_values(sglang:num_running_reqs, instance)",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "sgl-ext", "title": "SGLang with sgl_ext", "tags": ["sglang"], "schemaVersion": 39,
        "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, instance]}, "panels": panels,
    }  # fmt: skip


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
