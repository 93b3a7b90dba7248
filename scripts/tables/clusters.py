"""Tables of the section Clusters."""

from __future__ import annotations

from tables.forms import MS, PERCENT, Column, Figures, Table, form

_ARRANGEMENTS = {
    "16 consecutive tokens": {"system": "pages"},
    "consecutive tokens, block size of sgl_ext": {"system": "position"},
    "none (single entries)": {"system": "entry"},
    "similar entries (sgl_ext default)": {"system": "ours"},
}
_SHARES = (("a twentieth", 0.05), ("a tenth", 0.1), ("a quarter", 0.25))

TABLES: dict[str, Table | Figures] = {
    "clusters": Table(
        "clusters",
        "a tenth of the entries, selected by",
        {
            name.replace("ours", "sgl_ext"): {"system": name}
            for name in ("ours", "ours, entry by entry", "ours, by position", "Swarm as written")
        },
        [
            mass := Column("relative mass", "mass", form(3), {"what": "mass of 10%"}),
            mass._replace(title="worst layer", key="worst_layer"),
            mass._replace(title="index, of the KV", key="index", form=PERCENT),
        ],
    ),
    "clusters-answers": Table(
        "clusters",
        "reads",
        {
            "a tenth": {"what": "answers with 10%"},
            "a fifth": {"what": "answers with 20%"},
            "everything (bfloat16)": {"what": "answers with 100%"},
        },
        [
            Column("KL from dense attention, nats", "kl", form(4)),
            Column("p95", "kl_p95", form(3)),
            Column("top-1 agreement", "top1", form(1, " %", 100)),
        ],
    ),
    "clusters-storing": Table(
        "clusters-storing",
        "7,000 tokens",
        {
            "one prompt": {"system": "prefill"},
            "stored; the KV pool holds the context": {"system": "pool of the whole context"},
            "stored; the KV pool holds a tenth of it": {"system": "pool of a tenth"},
        },
        [
            Column("computing the KV, p50", "computed_s_p50", form(1, " s")),
            Column("questions", "asked_s_p50", form(1, " s")),
            Column("all", "stored_s_p50", form(1, " s")),
        ],
    ),
    "clusters-continuing": Table(
        "clusters-continuing",
        "reads a tenth",
        {
            "the text stored at once": {"what": "stored at once, 10%"},
            "its second half stored in turns": {"what": "stored in turns, 10%"},
        },
        [
            Column("KL from dense attention, nats", "kl", form(4)),
            Column("top-1 agreement", "top1", form(1, " %", 100)),
        ],
    ),
    "clusters-joined": Table(
        "clusters-heads-joined",
        "the text is stored as",
        {
            "one context": {"what": "joined 1, 10%"},
            "two contexts": {"what": "joined 2, 10%"},
            "four contexts": {"what": "joined 4, 10%"},
            "four contexts, of which only the last is used": {
                "what": "joined the last part alone, 10%"
            },
        },
        [
            Column("KL from dense attention, nats", "kl", form(3)),
            Column("top-1 agreement", "top1", form(1, " %", 100)),
        ],
    ),
    "clusters-heads": Table(
        "clusters-heads-joined",
        "attention that is covered",
        {f"{share} % of the bytes": {"what": f"selection of {share}%"} for share in (5, 10, 20)},
        [
            Column(f"by a selection for {name}", "covered", form(2, " %", 100), {"system": name})
            for name in ("all KV heads", "each KV head")
        ],
    ),
    "clusters-serving": Table(
        "clusters-serving",
        "devices",
        {
            "as they are": {"system": "as it is"},
            "slowed down": {"system": "slow devices"},
            "slowed down; `prefetch: 2`": {"system": "slow devices, read ahead"},
        },
        [
            Column("time per token, p50", "token_ms_p50", MS, {"what": "serving"}),
            Column("selecting", "select", PERCENT, {"what": "serving"}),
            Column("reading", "fetch", PERCENT, {"what": "serving"}),
            Column("slots", "assemble", PERCENT, {"what": "serving"}),
            Column("prefetching", "prefetch", PERCENT, {"what": "serving"}),
            Column(
                "prefetched, of blocks not in memory", "coverage", form(1, " %", 100),
                {"what": "serving"},
            ),
        ],
    ),
    "clusters-against": Table(
        "clusters-against",
        "attention",
        {
            "dense, KV in the device pool": {"system": "dense, KV in the device pool"},
            "dense, KV from host memory": {"system": "dense, KV from host memory"},
            "stored, reads a twentieth": {"system": "stored, 5%"},
            "stored, reads a tenth": {"system": "stored, 10%"},
            "stored, reads a quarter": {"system": "stored, 25%"},
        },
        [
            Column(f"{title} {batch}", key, shown, {"what": "against", "batch": batch})
            for title, key, shown in (
                ("TTFT of", "ttft_ms_p50", MS), ("tokens/s of", "tokens_per_s", form(1)),
            )
            for batch in (1, 4, 8)
        ],
    ),
    "clusters-selections": Table(
        "clusters-selections",
        "entries that share a block",
        _ARRANGEMENTS,
        [
            *(
                Column(
                    f"KL, {title}", "kl", form(3),
                    {"what": "selections, answers", "sparsity": share},
                )
                for title, share in _SHARES
            ),
            tenth := Column(
                "read for a token", "read_bytes", form(2, " MB", 1e-6),
                {"what": "selections", "sparsity": 0.1, "batch": 1},
            ),
            tenth._replace(title="tokens/s of 1", key="tokens_per_s", form=form(1)),
            tenth._replace(
                title="of 8", key="tokens_per_s", form=form(1), match={**tenth.match, "batch": 8}
            ),
            tenth._replace(
                title="TTFT of 8", key="ttft_ms_p50", form=MS, match={**tenth.match, "batch": 8}
            ),
        ],
    ),
    "clusters-texts": Table(
        "clusters-texts",
        "entries that share a block",
        _ARRANGEMENTS,
        [
            *(
                Column(
                    f"{title} {name}".strip(), key, form(3),
                    {"what": "selections, all texts", "sparsity": share},
                )
                for name, share in _SHARES
                for title, key in (("KL,", "kl"), ("from,", "kl_low"), ("to,", "kl_high"))
            ),
            Column(
                "code, a twentieth", "kl", form(3), {"what": "selections, code", "sparsity": 0.05}
            ),
        ],
    ),
    "clusters-long": Table(
        "clusters-long",
        "attention",
        {
            "dense, KV in the device pool": {"system": "dense, KV in the device pool"},
            "stored, reads a twentieth": {"system": "stored, 5%"},
            "stored, reads a tenth": {"system": "stored, 10%"},
        },
        [
            Column(
                f"{tokens:,} tokens: of {batch}" if batch == 1 else f"of {batch}", "tokens_per_s",
                form(1), {"what": "long", "batch": batch, "tokens": tokens},
            )
            for tokens in (8192, 16_384, 32_768)
            for batch in (1, 8, 16)
        ],
    ),
    "clusters-devices": Table(
        "clusters-devices-entries",
        "emulated devices",
        {f"{devices}": {"devices": devices} for devices in (1, 2, 4, 8)},
        [
            Column(f"{title} {batch}", key, shown, {"what": "devices", "batch": batch})
            for title, key, shown in (
                ("tokens/s of", "tokens_per_s", form(1)), ("TTFT of", "ttft_ms_p50", MS),
            )
            for batch in (1, 8, 16)
        ],
    ),
    "clusters-entries": Table(
        "clusters-devices-entries",
        "size of an entry; entries that share a block",
        {
            f"{size:,} B; {name}": {"entry_bytes": size, "system": system}
            for size in (768, 2304, 4608, 18_432)
            for name, system in (
                ("16 consecutive tokens", "pages"), ("none (single entries)", "entry"),
                ("similar entries (sgl_ext default)", "ours"),
            )
        },
        [
            *(
                Column(f"tokens/s of {batch}", "tokens_per_s", form(1), {"batch": batch})
                for batch in (1, 8, 16)
            ),
            Column("read for a token of 1", "read_bytes", form(2, " MB", 1e-6), {"batch": 1}),
            Column("of 16", "read_bytes", form(2, " MB", 1e-6), {"batch": 16}),
        ],
    ),
    "clusters-quality": Table(
        "clusters-quality",
        "attention",
        {
            "dense": {"system": "dense"},
            "stored, reads a twentieth": {"system": "0.05"},
            "stored, reads a tenth": {"system": "0.1"},
            "stored, reads a quarter": {"system": "0.25"},
        },
        [
            *(
                Column(
                    f"{title} {length:,} tokens".strip(), key, form(0, " %", 100),
                    {"what": f"quality, needle in {length} tokens"},
                )
                for length in (2048, 4096)
                for title, key in (("found in", "score"), ("from, in", "low"), ("to, in", "high"))
            ),
            Column(
                "F1 of questions", "score", form(3), {"what": "quality, questions about documents"}
            ),
        ],
    ),
}  # fmt: skip
