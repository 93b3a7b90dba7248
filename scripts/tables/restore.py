"""Tables of the section Restore."""

from __future__ import annotations

from tables.forms import MS, S_OF_MS, Column, Figures, Table, form, systems

_BATCHES = "restore-batches-arrivals-host"
_IN_STAGES = {
    "recomputes": {"system": "recompute"},
    "loads": {"system": "load"},
    "restores one stage after the other": {"system": "one stage after the other"},
    "restores its stages at once": {"system": "stages at once"},
}
_FROM_HOST, _FROM_SSD = "host memory, behind a slow link", "a slow SSD"

TABLES: dict[str, Table | Figures] = {
    "restore": Table(
        "restore",
        "4,096 tokens; loading takes as long as computing",
        systems("recompute", "load", "cake", "longest", "shortest"),
        [
            alone := Column(
                "TTFT", "ttft_ms_p50", S_OF_MS,
                {"what": "alone, loading takes 1 of computing", "tokens": 4096},
            ),
            alone._replace(title="TTFT / bound", key="over_bound", form=form(2)),
        ],
    ),
    "restore-long": Table(
        "restore-long",
        "loading 4,096 tokens takes as long as computing",
        systems("recompute", "load", "cake", "shortest"),
        [
            Column(
                f"{tokens:,} tokens: {title}", key, as_,
                {"what": "alone, loading takes 1 of computing", "tokens": tokens},
            )
            for tokens in (16_384, 32_768)
            for title, key, as_ in (
                ("TTFT", "ttft_ms_p50", S_OF_MS), ("TTFT / bound", "over_bound", form(2)),
            )
        ],
    ),
    "restore-batches": Table(
        _BATCHES,
        "mean TTFT",
        systems("recompute", "recompute, 512 at a time", "load", "longest", "cake", "shortest"),
        [
            *(
                Column(f"{size} at once", "mean_ttft_ms", S_OF_MS, {"what": f"batches of {size}"})
                for size in (2, 4, 8, 16)
            ),
            Column("8 at once: p99", "ttft_ms_p99", S_OF_MS, {"what": "batches of 8"}),
        ],
    ),
    "restore-host": Table(
        "restore-host",
        "in host memory",
        {"HiCache": {"system": "stock with hicache"}}
        | systems("recompute", "load from host", "by tokens", "by layers", "either"),
        [
            Column(f"{tokens:,} tokens", "ttft_ms_p50", MS, {"tokens": tokens, "what": _FROM_HOST})
            for tokens in (128, 256, 512, 1024)
        ],
    ),
    "restore-ssd-layers": Table(
        "restore-ssd-layers",
        "on a slow SSD",
        systems("recompute", "load from the SSD", "by tokens", "by layers", "either"),
        [
            Column(f"{tokens:,} tokens", "ttft_ms_p50", MS, {"tokens": tokens, "what": _FROM_SSD})
            for tokens in (256, 512, 1024, 2048)
        ],
    ),
    "restore-arrivals": Table(
        _BATCHES,
        "one after another",
        systems("cake", "shortest"),
        [
            arriving := Column(
                "mean TTFT", "mean_ttft_ms", S_OF_MS,
                {"what": "arrivals at 0.7 of Cake's throughput"},
            ),
            arriving._replace(title="p50", key="ttft_ms_p50"),
            arriving._replace(title="p99", key="ttft_ms_p99"),
        ],
    ),
    "restore-stages": Table(
        "restore",
        "2,048 tokens in two stages; the second one",
        {
            "starts from stored activations": {"what": "2 stages, their input: boundaries"},
            "receives activations as they are computed": {
                "what": "2 stages, their input: as it comes"
            },
            "waits for the first": {"what": "2 stages, their input: in sequence"},
        },
        [Column("restored in", "restored_ms_p50", S_OF_MS)],
    ),
    "restore-served-stages": Table(
        "restore-served-stages",
        "a server of two stages",
        _IN_STAGES,
        [
            Column(f"{tokens:,} tokens: {title}", f"ttft_ms_{key}", S_OF_MS, {"tokens": tokens})
            for tokens in (2048, 4096)
            for title, key in (("TTFT p50", "p50"), ("p90", "p90"))
        ],
    ),
    "restore-three-stages": Table(
        "restore-three-stages",
        "a server of three stages",
        _IN_STAGES,
        [
            Column(f"2,048 tokens: {title}", f"ttft_ms_{key}", S_OF_MS, {"tokens": 2048})
            for title, key in (("TTFT p50", "p50"), ("p90", "p90"))
        ],
    ),
}  # fmt: skip
