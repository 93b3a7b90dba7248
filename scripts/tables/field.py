"""Tables of the section Standard workloads."""

from __future__ import annotations

from tables.forms import MS, PERCENT, Column, Figures, Table, form, ranks

_SYSTEMS = {
    "stock SGLang": {"system": "stock"},
    "HiCache": {"system": "hicache"},
    "`tiers`": {"system": "tiers"},
    "`tiers` and `restore`": {"system": "restore"},
}

TABLES: dict[str, Table | Figures] = {
    "field-shared-prefix": Table(
        "field",
        "shared prefixes",
        _SYSTEMS,
        [
            *ranks("ttft_ms", MS, "TTFT ", what="shared-prefix"),
            Column("cached tokens", "cached_share", PERCENT, {"what": "shared-prefix"}),
            Column("tokens/s", "tokens_per_s", form(0), {"what": "shared-prefix"}),
        ],
    ),
    "field-multiturn": Table(
        "field",
        "turns of chats",
        _SYSTEMS,
        [
            Column("first turns: TTFT p50", "ttft_ms_p50", MS, {"what": "multiturn, first rounds"}),
            *ranks("ttft_ms", MS, "later turns: ", what="multiturn, later rounds"),
            Column("cached tokens", "cached_share", PERCENT, {"what": "multiturn, later rounds"}),
        ],
    ),
    "field-hit-rate": Table(
        "field",
        "TTFT p50 by the share of a prompt that was sent before",
        _SYSTEMS,
        [
            Column(f"{share} %", "ttft_ms_p50", MS, {"what": "hit-rate", "repeated_percent": share})
            for share in (0, 25, 50, 75, 100)
        ],
    ),
    "field-ruler": Table(
        "field",
        "accuracy on tasks like RULER's",
        {"stock SGLang": {"system": "stock"}}
        | {
            f"`{method}`": {"system": method}
            for method in ("lego-16", "blend-15", "primed+offline-16")
        },
        [
            Column(
                kind.replace("all", "all, of 24"), "accuracy", PERCENT, {"what": f"ruler, {kind}"}
            )
            for kind in ("single", "multi-key", "multi-value", "variables", "all")
        ],
    ),
}
