"""Tables of the section Peer."""

from __future__ import annotations

from tables.forms import MS, PERCENT, TIMES, Column, Figures, Ratio, Table, form, ranks

_RECORD = "peer-context-resize-interference"

TABLES: dict[str, Table | Figures] = {
    "peer-arrivals": Table(
        "peer-arrivals",
        "256 new tokens after 20,000",
        {"one by one": {"what": "alone"}, "as they arrive": {"what": "arrivals"}},
        [
            column._replace(title=f"{title}, {column.title}", match={"system": system})
            for system, title in (("peer", "peers"), ("hicache", "HiCache"), ("tiers", "`tiers`"))
            for column in ranks("ttft_ms", MS)[::2]
        ],
    ),
    "peer": Table(
        _RECORD,
        "borrowed memory is read",
        {
            "through one layer's buffer; 3.24 times the local memory": {
                "setup": "max_context_ratio"
            },
            "through one layer's buffer; as much as the local memory": {
                "setup": "max_context_ratio_w1"
            },
            "in place; 3 times the local memory": {"setup": "max_context_ratio_tiled"},
        },
        [
            longest := Column("longest request", "longest", form(0), {"what": "context"}),
            stock := longest._replace(title="stock's, same local memory", key="longest_stock"),
            Ratio("ratio", longest, stock),
        ],
    ),
    "peer-ttft": Table(
        "peer-ttft",
        "256 new tokens after KV that local memory does not hold",
        {
            "both links slowed as in the paper's Figure 1; two layers' buffers": {
                "what": "ttft, throttled"
            },
            "links as they are; read in place": {"what": "ttft, native"},
        },
        [
            column._replace(title=f"{title}, {column.title}", match={"system": system})
            for system, title in (("peer", "peers"), ("hicache", "HiCache"))
            for column in ranks("ttft_ms", MS)[::2]
        ],
    ),
    "peer-decode": Table(
        "peer-decode",
        "borrowed memory is read",
        {
            "in place": {"stream": "direct"},
            "through one layer's buffer": {"stream": "layer"},
            "through two layers' buffers": {"stream": "layers"},
        },
        [
            Column(f"{tokens:,} tokens: {title}", key, shown, {"tokens": tokens})
            for tokens in (640, 6144)
            for title, key, shown in (
                ("borrowed", "borrowed_share", PERCENT),
                ("TPOT relative to local memory only", "over_own", TIMES),
            )
        ],
    ),
    "peer-interference": Table(
        _RECORD,
        "meanwhile",
        {
            "its master decodes in the lent memory": {"master": "lent"},
            "an unrelated server decodes": {"master": "own"},
            "no other server computes": {"master": "idle"},
        },
        [
            Column("worker's TTFT, p50", "ttft_ms_p50", MS, {"what": "interference"}),
            Column("TPOT, p50", "tpot_ms_p50", form(1, " ms"), {"what": "interference"}),
        ],
    ),
    "peer-resize": Figures(
        _RECORD,
        "ratio",
        {
            "longest request / bound of Eq. 5 (minimum of the three setups)": (
                "capacity_vs_formula", form(2),
            ),
            "time to lend and reclaim a block, with 100,000 blocks / with 1,000": (
                "resize_us_ratio", TIMES,
            ),
            "worker's TTFT while its master decodes in lent memory / while an unrelated server "
            "decodes": ("worker_ttft_slowdown", TIMES),
            "worker's TPOT, likewise": ("worker_tpot_slowdown", TIMES),
        },
    ),
}  # fmt: skip
