"""Tables of ``sgl-ext top``: every power, at 80 columns."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from sgl_ext.cli.tables import Scheduler, tables


def tier(**changes: Any) -> dict[str, Any]:
    return {
        "pages": 50, "capacity_pages": 100, "hit_tokens": 12_000, "missed_tokens": 4000,
        "loaded_bytes": 0, "loading_seconds": 2.0,
        "stored_bytes": 5_000_000, "storing_seconds": 1.0,
        "evicted_pages": 0, "queue_depth": 0, "available": True, "failures": {}, **changes,
    }  # fmt: skip


def state(**changes: Any) -> dict[str, Any]:
    compute = {"overhead": 0.01, "per_token": 1e-3, "per_pair": 0.0}
    decision = {"wait": {"count": 2, "predicted_seconds": 1.0, "measured_seconds": 0.5, "ended": 1}}
    return {
        "tiers": {"host": tier(), "ssd": tier(available=False, failures={"checksum": 3})},
        "chunks": {"requests": 7, "linked": 9000, "recomputed": 80, "missing": 0, "computed": 5},
        "restore": {"interrupted": 4, "prompts": 3, "tokens": {"ssd": 5000, "computed": 1200}},
        "swap": {
            "swapped_out": 9, "swapped_in": 8, "swapped": 1, "recomputed": 2,
            "recomputed_tokens": 500, "stored_bytes": 12_300_000,
        },
        "clusters": {
            "followed": 3,
            "open": {"stx": {"fetched": 20, "prefetched": 0, "in_memory": 60, "lost": ["d1"]}},
        },
        "peer": {
            "role": "master",
            "workers": [
                {
                    "pid": 71, "lent_bytes": 1 << 26, "used_bytes": 1 << 20, "blocks": 40,
                    "refused": "",
                }
            ],
        },
        "planning": {
            "costs": {"known": ["compute"], "compute": compute},
            "decisions": {"wait_for_tier": {"choices": decision, "error": 0.25}},
        },
        **changes,
    }  # fmt: skip


def text(now: dict[str, Any], before: dict[str, Any], width: int) -> str:
    console = Console(width=width, record=True, file=StringIO())
    name = ":30000"
    console.print(tables([Scheduler(name, now, before, 2.0)]))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 160])
def test_every_power_is_shown_within_the_width(width: int) -> None:
    shown = text(state(), state(tiers={"host": tier(stored_bytes=1_000_000)}), width)
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    rows = [line.split() for line in shown.splitlines()]
    # 12,000 tokens would take 12 s to compute; 4 MB came in 2 s.
    assert [":30000", "host", "50%", "12,000", "75%", "12.0", "0", "2"] in rows
    for words in ("(off)", "checksum 3", "40 blocks", "wait 2", "500.0 ms", "25%"):
        assert words in shown
    flat = " ".join(shown.split())
    for words in (
        "7 prompts, 9,000 tokens linked (100%, 9.0 s saved), 80 recomputed",
        "2 recomputed (500 tokens); 12 MB copied to host memory",
        "3 prompts restored: 5,000 from ssd, 1,200 computed during loading (tokens); "
        "4 preempted by other restorations",
        "8 resumed, 1 currently swapped out; ", "requests using them",
        "9 requests swapped out, 8 resumed", "1 contexts open", "75% in memory", "1 devices lost",
    ):  # fmt: skip
        assert words in flat


def test_powers_that_are_off_have_no_table() -> None:
    assert text({}, {}, 80).strip() == ""
    only = text({"tiers": {"host": tier()}}, {}, 80)
    assert "power" not in only and "peer" not in only and "saved" in only
