"""Tables of the section Swap."""

from __future__ import annotations

from tables.forms import MS, PERCENT, Column, Figures, S, Table, each_of, form

TABLES: dict[str, Table | Figures] = {
    "swap": Table(
        "swap-link",
        "preempted requests are",
        {
            "recomputed, without `tiers`": {"system": "recompute"},
            "recomputed, with `tiers`": {"system": "recompute beside a tier"},
            "swapped page by page, all wait (vLLM's way, FastSwitch §2.2)": {
                "system": "per page, waiting"
            },
            "swapped by sgl_ext `swap`": {"system": "ours"},
        },
        [
            link := Column("TTFT, p95", "ttft_p95_s", S, {"what": "link"}),
            link._replace(title="p99 of all turns", key="ttft_p99_of_all_s"),
            link._replace(title="tokens/s", key="tokens_per_s", form=form(0)),
            link._replace(title="between tokens, p99.9", key="tbt_p99.9_ms", form=MS),
            link._replace(title="recomputed", key="recomputed_share", form=PERCENT),
        ],
    ),
    "swap-speeds": Table(
        "swap-speeds",
        "a copy takes, times that on the link above",
        {
            f"{times}" if times != "0" else "as on this machine": {"what": f"speeds {times}"}
            for times in ("0", "0.01", "0.03", "0.1", "0.3", "1", "3", "10")
        },
        [
            Column(f"{title}: {name}", key, shown, {"system": system})
            for title, key, shown in (
                ("TTFT, p95", "ttft_p95_s", S), ("tokens/s", "tokens_per_s", form(0)),
            )
            for name, system in (
                ("recomputed, with `tiers`", "recompute beside a tier"),
                ("page by page", "per page, waiting"),
                ("sgl_ext `swap`", "ours"), ("sgl_ext `swap`, second server", "ours, again"),
            )
        ],
    ),
    "swap-efficiency": Table(
        "swap-efficiency",
        "tokens per second of 5 iterations, over the slowed link",
        {
            "swapped page by page, all wait": {"system": "per page, waiting"},
            "sgl_ext `swap`, all swaps wait": {"system": "ours, all swaps wait"},
            "sgl_ext `swap`": {"system": "ours"},
        },
        [
            Column(rank, rank, form(0), {"what": "efficiency, quantiles"})
            for rank in ("p5", "p50", "p95", "p99", "p99.9")
        ],
    ),
    "swap-sweeps": Table(
        "swap-sweeps",
        "over the slowed link",
        {
            label: {"what": f"sweep, {what}"}
            for label, what in (
                ("0.7 of the capacity", "load 0.7"), ("1 of the capacity", "load 1"),
                ("1.3 of the capacity", "load 1.3"), ("1.6 of the capacity", "load 1.6"),
                ("1.3; priorities drawn every 100 iterations", "random 100"),
                ("1.3; drawn every 25 iterations", "random 25"),
                ("1.3; drawn as a Markov chain", "markov 50"),
                ("1.3; 8 MiB of host memory", "host 8MiB"),
                ("1.3; 32 MiB of host memory", "host 32MiB"),
            )
        },
        [
            Column(f"{title}: {name}", key, shown, {"system": system})
            for title, key, shown in (
                ("TTFT, p95 of each seed", "ttft_p95_s_of_seeds", each_of(2, " s")),
                ("p99 of all turns", "ttft_p99_of_all_s", S), ("tokens/s", "tokens_per_s", form(0)),
                ("between tokens, p99.9", "tbt_p99.9_ms", MS),
            )
            for name, system in (
                ("page by page", "per page, waiting"), ("sgl_ext `swap`", "ours"),
            )
        ],
    ),
    "swap-without": Table(
        "swap-sweeps",
        "1.3 of the capacity, over the slowed link",
        {
            "sgl_ext `swap`": {"system": "ours"},
            "copies page by page": {"system": "ours, page by page"},
            "swap-out waits for its copies": {"system": "ours, swap-out waits"},
            "swap-in always waits": {"system": "ours, swap-in waits"},
            "swap-in never waits": {"system": "ours, swap-in never waits"},
            "also swaps out pages that host memory has": {"system": "ours, no reuse"},
        },
        [
            Column(title, key, shown, {"what": "sweep, without"})
            for title, key, shown in (
                ("TTFT, p95", "ttft_p95_s", S), ("p99 of all turns", "ttft_p99_of_all_s", S),
                ("tokens/s", "tokens_per_s", form(0)),
                ("between tokens, p99.9", "tbt_p99.9_ms", MS),
                ("pages copied per swap-out", "pages_out_each", form(0)),
            )
        ],
    ),
    "swap-groups": Table(
        "memory-groups",
        "size of a new group",
        {f"{size:,} tokens": {"first_group": size} for size in (64, 250, 1000, 3000)},
        [
            Column(f"{way}, drawn every {every} iterations", key, form(1), {"every": every})
            for every in (100, 50, 25)
            for way, key in (("out", "out"), ("back in", "back"))
        ],
    ),
    "swap-long": Table(
        "swap-long",
        "conversations of up to 2,048 tokens",
        {
            "swapped page by page": {"system": "per page, waiting"},
            "sgl_ext `swap`": {"system": "ours"},
        },
        [
            Column(title, key, shown, {"what": "long"})
            for title, key, shown in (
                ("TTFT, p50", "ttft_p50_s", S), ("p95", "ttft_p95_s", S),
                ("p99 of all turns", "ttft_p99_of_all_s", S), ("tokens/s", "tokens_per_s", form(0)),
                ("between tokens, p99.9", "tbt_p99.9_ms", MS),
                ("pages copied per swap-out", "pages_out_each", form(0)),
            )
        ],
    ),
}  # fmt: skip
