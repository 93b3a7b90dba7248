"""Tables of the sections without a module of their own."""

from __future__ import annotations

from tables.forms import (
    MS,
    PERCENT,
    S_OF_MS,
    TIMES,
    Column,
    Figures,
    S,
    Table,
    compared,
    form,
    ranks,
    systems,
)

_RATE = Column("transfer engine", "GB/s", form(2, " GB/s"))

TABLES: dict[str, Table | Figures] = {
    "attention": Table(
        "attention",
        "16 new tokens, or decode",
        {
            **{
                f"attention, {what} over {context:,}": {
                    "what": f"operator {what}",
                    "context": context,
                }
                for what in ("extend", "decode")
                for context in (256, 4096, 8192)
            },
            "TTFT, 4,096 new tokens": {"what": "server cold"},
            "TTFT, 16 new tokens over 4,096 cached": {"what": "server hot TTFT"},
        },
        compared(Column("stock", "ms_p50", form(2, " ms")), "stock", "sgl_ext", "ours"),
    ),
    "decode": Table(
        "memory",
        "decode over 4,096 tokens",
        systems(
            "in place, block-major", "in place, layer-major", "gather, block-major",
            "plain read, block-major",
        ),
        [
            Column("p50", "ms_p50", form(3, " ms"), {"what": "attention decode"}),
            Column("rate", "GB/s", form(1, " GB/s"), {"what": "attention decode"}),
        ],
    ),
    "copies": Table(
        "memory",
        "20 blocks of",
        {
            name: {"what": f"copy 20 blocks {name}"}
            for name in ("SmolLM2-135M", "Llama-3-8B")
        },
        compared(_RATE, "engine", "memcpy, same threads", "memcpy"),
    ),
    "reads": Table(
        "memory",
        "random reads of",
        {f"{size:,} KiB": {"what": f"random reads of {size} KiB"} for size in (4, 64, 1024)},
        compared(_RATE, "engine", "fio, same depth", "fio"),
    ),
    "overhead": Table(
        "overhead",
        "system",
        {"stock SGLang": {"system": "stock"}, "with the extension": {"system": "extension"}},
        [*ranks("ttft_ms", form(1, " ms"), "TTFT "), *ranks("tpot_ms", form(1, " ms"), "TPOT ")],
    ),
    "tiers": Table(
        "tiers",
        "TTFT of later turns",
        {
            "stock SGLang, recomputed": {"system": "recompute"},
            "stock HiCache, host memory": {"system": "hicache-host"},
            "stock HiCache, small host pool and files": {"system": "hicache-file"},
            "`tiers`: `host`": {"system": "host"},
            "`tiers`: `ssd` (`keep_after: 1`)": {"system": "ssd"},
            "`tiers`: `host` and `ssd`": {"system": "host+ssd"},
        },
        [
            *ranks("ttft_ms", MS, what="turns after the first"),
            Column("cached tokens", "hit_rate", PERCENT, {"what": "turns after the first"}),
        ],
    ),
    "demo": Table(
        "demo",
        "`sgl-ext demo`",
        {
            f"`{power}`": {"system": power}
            for power in ("tiers", "chunks", "restore", "clusters")
        },
        [
            first := Column("first column", "seconds_p50", S, {"column": 0}),
            first._replace(title="second", match={"column": 1}),
            first._replace(title="third", match={"column": 2}),
        ],
    ),
    "demo-swap": Table(
        "demo-swap",
        "`sgl-ext demo swap`",
        {
            "recomputed": {"column": 0},
            "swapped out and resumed": {"column": 1},
        },
        [
            Column("six requests", "seconds_p50", S, {"system": "swap"}),
            Column("fastest", "low_s", S, {"system": "swap"}),
            Column("slowest", "high_s", S, {"system": "swap"}),
        ],
    ),
    "together": Table(
        "together",
        "TTFT of a mixed trace",
        {
            "stock SGLang": {"system": "stock"},
            "stock HiCache": {"system": "hicache"},
            "`tiers`": {"system": "tiers"},
            "`chunks`": {"system": "chunks"},
            "`tiers` and `restore`": {"system": "restore"},
            "`tiers` and `swap`": {"system": "swap"},
            "all sections": {"system": "all"},
            "all sections, each decides alone": {"system": "all, independent"},
        },
        [
            mixed := Column("p50", "ttft_ms_p50", S_OF_MS, {"what": "mixed, all"}),
            mixed._replace(title="p95", key="ttft_ms_p95"),
            *(
                Column(f"{title}, p50", "ttft_ms_p50", S_OF_MS, {"what": f"mixed, {kind}"})
                for title, kind in (
                    ("later turns", "later turns of chats"), ("documents", "documents"),
                    ("batch jobs", "batch"), ("urgent calls", "urgent"),
                )
            ),
        ],
    ),
    "memory": Figures(
        "memory",
        "ratio",
        {
            "decode over 4,096 tokens: time with a gather / time in place": (
                "decode_4096_speedup_vs_gather", TIMES,
            ),
            "… bandwidth of attention in place / of a plain read": (
                "decode_fraction_of_memory_bandwidth", TIMES,
            ),
            "… time on the slab / on a layer-major pool": (
                "decode_ratio_vs_layer_major", TIMES,
            ),
            "prefill of 4,096 tokens: time on the slab / on a layer-major pool": (
                "prefill_ratio_vs_layer_major", TIMES,
            ),
        },
    ),
    "together-ratios": Figures(
        "together",
        "ratio",
        {
            "TTFT p50 of the trace: all sections / best single system": (
                "mixed_trace_ttft_p50_ratio_vs_best_single", TIMES,
            ),
            "TTFT p95, likewise": (
                "mixed_trace_ttft_p95_ratio_vs_best_single", TIMES,
            ),
            "TTFT p50: all sections / all sections, each decides alone": (
                "mixed_trace_ttft_p50_ratio_vs_all_independent", TIMES,
            ),
            "TTFT p95: all sections / all sections, each decides alone": (
                "mixed_trace_ttft_p95_ratio_vs_all_independent", TIMES,
            ),
            "TTFT of linked prompts: restored from an SSD / staged": (
                "linked_from_ssd_ttft_ratio_vs_staged", TIMES,
            ),
            "time to resume a preempted request: from an SSD / recomputed": (
                "swap_to_ssd_ttft_ratio_vs_recompute", TIMES,
            ),
            "tokens recomputed after a peer reclaims memory: with tiers / without": (
                "reclaim_tokens_recomputed_ratio", form(3),
            ),
        },
    ),
}  # fmt: skip
