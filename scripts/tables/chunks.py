"""Tables of the section Chunks."""

from __future__ import annotations

from tables.forms import (
    LINKED,
    PERCENT,
    S_OF_MS,
    TIMES,
    Column,
    Figures,
    Form,
    S,
    Table,
    form,
    ranks,
    systems,
)

_DOCUMENTS = "divergence, documents as they are"


def _chunks(tokens: int, chunk: int = 512) -> Column:
    what = f"ttft, chunks of {chunk}, {tokens} tokens"
    return Column(f"{tokens:,} tokens", "ttft_ms_p50", S_OF_MS, {"what": what})


def _divergence(title: str, key: str, as_: Form) -> Column:
    return Column(title, key, as_, {"what": _DOCUMENTS})


TABLES: dict[str, Table | Figures] = {
    "chunks": Table(
        "chunks",
        "TTFT",
        systems("stock", "blend-15", "lego-16", LINKED),
        [
            _chunks(1024),
            _chunks(4096),
            Column("answers/s at most", "answers_per_s_at_most", form(3), {"what": "load"}),
            *ranks("ttft_ms", S_OF_MS, "at stock's rate: ", what="load")[::2],
        ],
    ),
    "chunks-divergence": Table(
        "chunks-documents",
        "KL, nats",
        systems("blend-15", "lego-16", "query-5", "query-15", LINKED),
        [
            _divergence("all", "klt", form(3)),
            _divergence("95 % interval from", "klt_low", form(3)),
            _divergence("to", "klt_high", form(3)),
            *(
                Column(name, "klt", form(3), {"what": f"{_DOCUMENTS}, {name.lower()}"})
                for name in ("HotpotQA", "2WikiMultihopQA", "MuSiQue")
            ),
            _divergence("computed", "cost", PERCENT),
        ],
    ),
    "chunks-speed": Table(
        "chunks-speed",
        "TTFT",
        systems("stock", "blend-15", "lego-16", "query-15", LINKED),
        [_chunks(1024), _chunks(4096)],
    ),
    "chunks-lengths": Table(
        "chunks-lengths",
        "TTFT",
        systems("stock", "blend-15", "lego-16", LINKED),
        [_chunks(tokens) for tokens in (1024, 4096, 7936, 32_768)],
    ),
    "chunks-large": Table(
        "chunks-large",
        "TTFT with chunks of 1,024 tokens",
        systems("blend-15", "lego-16", LINKED),
        [_chunks(tokens, 1024) for tokens in (4096, 7936)],
    ),
    "chunks-answers": Table(
        "chunks_answers",
        "F1 of 102 questions",
        systems("full", "blend-15", "lego-16", LINKED),
        [
            answers := Column("F1", "f1", form(2), {"what": "answers"}),
            answers._replace(title="lost", key="lost"),
            answers._replace(title="95 % interval from", key="lost_low"),
            answers._replace(title="to", key="lost_high"),
            answers._replace(title="computed", key="cost", form=PERCENT),
        ],
    ),
    "chunks-needles": Table(
        "chunks-needles",
        "needles in 2,048 tokens",
        systems("stock", "blend-15", "lego-16", "query-5", "query-15", LINKED),
        [
            needle := Column("found", "found", PERCENT, {"what": "needle"}),
            needle._replace(title="95 % interval from", key="low"),
            needle._replace(title="to", key="high"),
        ],
    ),
    "chunks-answers-needles": Table(
        "chunks_answers-needles",
        "needles, a larger model",
        systems("full", "blend-15", "lego-16", LINKED),
        [
            Column("found", "found", PERCENT, {"what": "answers"}),
            Column("F1", "f1", form(2), {"what": "answers"}),
            Column("computed", "cost", PERCENT, {"what": "answers"}),
        ],
    ),
    "chunks-creation": Table(
        "chunks-creation",
        "900 tokens",
        {
            "computed by stock SGLang": {"system": "stock"},
            "context of `lego-16`": {"system": "lego-16"},
            "context of `primed`": {"system": "primed"},
            f"context of `{LINKED}`": {"system": LINKED},
        },
        [
            Column("seconds each, p50", "context_s_p50", S, {"what": "creation"}),
            Column("relative to stock SGLang", "over_stock", TIMES, {"what": "creation"}),
        ],
    ),
}  # fmt: skip
