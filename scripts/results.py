"""Generates the tables and figures of ``sgl_ext/bench/RESULTS.md`` from the committed results.

``scripts/results.py`` rewrites each table between ``<!-- table NAME -->`` and ``<!-- end -->``.
``scripts/results.py figures`` also draws ``examples/figures/*.svg``, and needs matplotlib
(``pip install 'sgl-ext[plot]'``).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sgl_ext.config import Chunks

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "sgl_ext" / "bench" / "RESULTS.md"
RESULTS = ROOT / "sgl_ext" / "bench" / "results"
FIGURES = ROOT / "examples" / "figures"

Match = Mapping[str, object]
"""Keys of a run and their values."""
Form = Callable[[Any], str]


def form(digits: int, unit: str = "", scale: float = 1.0) -> Form:
    """Returns a format: ``digits`` decimals of the value times ``scale``, and the unit."""
    return lambda value: f"{value * scale:,.{digits}f}{unit}"


def each_of(digits: int, unit: str) -> Form:
    """Returns a format of several values."""
    return lambda values: ", ".join(f"{value:,.{digits}f}" for value in values) + unit


MS, S, S_OF_MS = form(0, " ms"), form(2, " s"), form(2, " s", 1e-3)
TIMES, PERCENT = form(2, "\N{MULTIPLICATION SIGN}"), form(0, " %", 100)


class Column(NamedTuple):
    """Column of a table: the value ``key`` of the run that matches the row and ``match``."""

    title: str
    key: str
    form: Form
    match: Match = MappingProxyType({})


class Ratio(NamedTuple):
    """Column of the ratio of two other columns."""

    title: str
    above: Column
    below: Column


class Table(NamedTuple):
    """Table with one row for each label and the runs that it selects."""

    file: str
    """Name of the result, without ``.json``."""
    corner: str
    """Title of the column of labels."""
    rows: Mapping[str, Match]
    columns: Sequence[Column | Ratio]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table in Markdown."""
        yield _line([self.corner, *(column.title for column in self.columns)])
        yield "|---" * (1 + len(self.columns)) + "|"
        for label, row in self.rows.items():
            yield _line([label, *(self._cell(row, column) for column in self.columns)])

    def value(self, row: Match, column: Column) -> float | None:
        """Returns the value of a cell; None if no run has it."""
        wanted = {**row, **column.match}
        found = [
            each for each in result(self.file)["runs"] if wanted.items() <= _plain(each).items()
        ]
        if len(found) > 1:
            raise SystemExit(f"{self.file}.json has {len(found)} runs with {wanted}; expected one")
        value: float | None = found[0].get(column.key) if found else None
        return value

    def _cell(self, row: Match, column: Column | Ratio) -> str:
        if isinstance(column, Column):
            value = self.value(row, column)
            return "" if value is None else column.form(value)
        above, below = (self.value(row, each) for each in column[1:])
        return "" if above is None or below is None else TIMES(above / below)


class Figures(NamedTuple):
    """Table with one row for each figure of a result."""

    file: str
    """Name of the result, without ``.json``."""
    corner: str
    """Title of the column of labels."""
    rows: Mapping[str, tuple[str, Form]]
    """Name in the result and format of each labelled figure."""

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table in Markdown."""
        yield from (_line([self.corner, ""]), "|---|---|")
        figures = result(self.file)["figures"]
        for label, (name, as_) in self.rows.items():
            yield _line([label, as_(figures[name])])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(run: Match) -> Match:
    """Returns the part of a run that a match can name."""
    return {key: value for key, value in run.items() if isinstance(value, str | int | float)}


@cache
def result(file: str) -> Mapping[str, Any]:
    """Returns a committed result."""
    found: Mapping[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def systems(*names: str) -> dict[str, Match]:
    """Returns one row for each system, labelled with its name in the result."""
    return {f"`{name}`" if name in CODE else name: {"system": name} for name in names}


def ranks(prefix: str, as_: Form, title: str = "", **match: object) -> list[Column]:
    """Returns the columns of the percentiles of ``prefix``."""
    return [Column(f"{title}p{rank}", f"{prefix}_p{rank}", as_, match) for rank in (50, 90, 99)]


def compared(column: Column, system: str, title: str, other: str) -> list[Column | Ratio]:
    """Returns ``column`` for two systems, and the ratio of its values.

    Args:
        column: column of ``system``.
        title: title of the column of the system ``other``.
    """
    ours = column._replace(match={"system": system})
    theirs = column._replace(title=title, match={"system": other})
    return [ours, theirs, Ratio("ratio", ours, theirs)]


LINKED = Chunks().method
CODE = {"blend-15", "lego-16", "query-5", "query-15", LINKED, "cake", "longest", "shortest"}
_DOCUMENTS = "divergence, documents as they are"
BATCHES = "restore-batches-arrivals-host"
_FROM_HOST, _FROM_SSD = "host memory, behind a slow link", "a slow SSD"
PEER = "peer-context-resize-interference"
RATE = Column("transfer engine", "GB/s", form(2, " GB/s"))


def _chunks(tokens: int, chunk: int = 512) -> Column:
    what = f"ttft, chunks of {chunk}, {tokens} tokens"
    return Column(f"{tokens:,} tokens", "ttft_ms_p50", S_OF_MS, {"what": what})


def _divergence(title: str, key: str, as_: Form) -> Column:
    return Column(title, key, as_, {"what": _DOCUMENTS})


TABLES: dict[str, Table] = {
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
        compared(Column("stock", "ms_p50", form(2, " ms")), "stock", "ours", "ours"),
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
        compared(RATE, "engine", "memcpy, same threads", "memcpy"),
    ),
    "reads": Table(
        "memory",
        "random reads of",
        {f"{size:,} KiB": {"what": f"random reads of {size} KiB"} for size in (4, 64, 1024)},
        compared(RATE, "engine", "fio, same depth", "fio"),
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
            Column("to stock SGLang", "over_stock", TIMES, {"what": "creation"}),
        ],
    ),
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
    "restore-batches": Table(
        BATCHES,
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
        BATCHES,
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
        {
            "recomputes": {"system": "recompute"},
            "loads": {"system": "load"},
            "restores one stage after the other": {"system": "one stage after the other"},
            "restores its stages at once": {"system": "stages at once"},
        },
        [
            Column(f"{tokens:,} tokens: {title}", f"ttft_ms_{key}", S_OF_MS, {"tokens": tokens})
            for tokens in (2048, 4096)
            for title, key in (("TTFT p50", "p50"), ("p90", "p90"))
        ],
    ),
    "swap": Table(
        "swap-link",
        "preempted requests are",
        {
            "recomputed": {"system": "recompute"},
            "swapped page by page, all wait (vLLM's way, FastSwitch §2.2)": {
                "system": "per page, waiting"
            },
            "swapped by this section": {"system": "ours"},
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
            for times in ("0", "0.03", "0.3", "1", "3", "10")
        },
        [
            Column(f"{title}: {name}", key, shown, {"system": system})
            for title, key, shown in (
                ("TTFT, p95", "ttft_p95_s", S), ("tokens/s", "tokens_per_s", form(0)),
            )
            for name, system in (
                ("recomputed beside a tier", "recompute beside a tier"),
                ("page by page", "per page, waiting"),
                ("this section", "ours"), ("the same again", "ours, again"),
            )
        ],
    ),
    "swap-sweeps": Table(
        "swap-sweeps",
        "behind the link",
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
                ("page by page", "per page, waiting"), ("this section", "ours"),
            )
        ],
    ),
    "swap-without": Table(
        "swap-sweeps",
        "1.3 of the capacity, behind the link",
        {
            "this section": {"system": "ours"},
            "copies page by page": {"system": "ours, page by page"},
            "swap-out waits for its copies": {"system": "ours, swap-out waits"},
            "swap-in always waits": {"system": "ours, swap-in waits"},
            "swap-in never waits": {"system": "ours, swap-in never waits"},
            "swaps pages out again that host memory has": {"system": "ours, no reuse"},
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
            "this section": {"system": "ours"},
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
    "peer-arrivals": Table(
        "peer-arrivals",
        "256 new tokens behind 20,000",
        {"one by one": {"what": "alone"}, "as they arrive": {"what": "arrivals"}},
        [
            column._replace(title=f"{title}, {column.title}", match={"system": system})
            for system, title in (("peer", "peers"), ("hicache", "HiCache"), ("tiers", "`tiers`"))
            for column in ranks("ttft_ms", MS)[::2]
        ],
    ),
    "peer": Table(
        PEER,
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
        "256 new tokens behind KV that local memory does not hold",
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
                ("TPOT to own memory's", "over_own", TIMES),
            )
        ],
    ),
    "peer-interference": Table(
        PEER,
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
    "clusters": Table(
        "clusters",
        "a tenth of the entries, selected by",
        systems("ours", "ours, entry by entry", "ours, by position", "Swarm as written"),
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
            "four contexts, of which the last is followed": {
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
        {
            "16 consecutive tokens": {"system": "pages"},
            "consecutive tokens, of our size": {"system": "position"},
            "none": {"system": "entry"},
            "similar ones (ours)": {"system": "ours"},
        },
        [
            *(
                Column(
                    f"KL, {title}", "kl", form(3),
                    {"what": "selections, answers", "sparsity": share},
                )
                for title, share in (("a twentieth", 0.05), ("a tenth", 0.1), ("a quarter", 0.25))
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
    "demo": Table(
        "demo",
        "`sgl-ext demo`",
        {
            f"`{power}`": {"system": power}
            for power in ("tiers", "chunks", "restore", "swap", "clusters")
        },
        [
            before := Column("before", "seconds_p50", S, {"column": 0}),
            before._replace(title="with the power", match={"column": 1}),
            before._replace(title="another way of it", match={"column": 2}),
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
}  # fmt: skip

RATIOS: dict[str, Figures] = {
    "memory": Figures(
        "memory",
        "ratio",
        {
            "decode over 4,096 tokens: gathering them first to reading them in place": (
                "decode_4096_speedup_vs_gather", TIMES,
            ),
            "… bandwidth of attention in place to that of a plain read": (
                "decode_fraction_of_memory_bandwidth", TIMES,
            ),
            "… time on the slab to time on a layer-major pool": (
                "decode_ratio_vs_layer_major", TIMES,
            ),
            "prefill of 4,096 tokens: time on the slab to time on a layer-major pool": (
                "prefill_ratio_vs_layer_major", TIMES,
            ),
        },
    ),
    "together-ratios": Figures(
        "together",
        "ratio",
        {
            "TTFT p50 of the trace, all sections to the best single system": (
                "mixed_trace_ttft_p50_ratio_vs_best_single", TIMES,
            ),
            "TTFT p95, likewise": (
                "mixed_trace_ttft_p95_ratio_vs_best_single", TIMES,
            ),
            "TTFT p50, all sections to all that decide alone": (
                "mixed_trace_ttft_p50_ratio_vs_all_independent", TIMES,
            ),
            "TTFT p95, all sections to all that decide alone": (
                "mixed_trace_ttft_p95_ratio_vs_all_independent", TIMES,
            ),
            "TTFT of linked prompts, restored from an SSD to staged": (
                "linked_from_ssd_ttft_ratio_vs_staged", TIMES,
            ),
            "time to resume a preempted request, from an SSD to recomputed": (
                "swap_to_ssd_ttft_ratio_vs_recompute", TIMES,
            ),
            "tokens recomputed after a peer reclaims memory, with tiers to without": (
                "reclaim_tokens_recomputed_ratio", form(3),
            ),
        },
    ),
    "peer-resize": Figures(
        PEER,
        "ratio",
        {
            "longest request, of Eq. 5 (the least of the three)": ("capacity_vs_formula", form(2)),
            "time to lend and reclaim a block, 100,000 blocks to 1,000": ("resize_us_ratio", TIMES),
            "worker's TTFT, its master's decoding in lent memory to an unrelated server's": (
                "worker_ttft_slowdown", TIMES,
            ),
            "worker's TPOT, likewise": ("worker_tpot_slowdown", TIMES),
        },
    ),
}  # fmt: skip


def rendered(page: str) -> str:
    """Returns the page with every table generated again.

    Raises:
        KeyError: the page has a table that is not in :data:`TABLES` or :data:`RATIOS`.
    """

    def table(found: re.Match[str]) -> str:
        lines = "\n".join({**TABLES, **RATIOS}[found[1]].lines())
        return f"<!-- table {found[1]} -->\n{lines}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, page, flags=re.S)


def draw() -> None:
    """Draws one figure of bars for each table in :data:`BARS`."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    for name, (at, title) in BARS.items():
        table = TABLES[name]
        column = [each for each in table.columns if isinstance(each, Column)][at]
        bars = {
            label.replace("`", ""): value
            for label, row in table.rows.items()
            if (value := table.value(row, column)) is not None
        }
        with plt.rc_context({"svg.hashsalt": "sgl_ext", "axes.spines.top": False}):
            size = (8, 0.5 + 0.4 * len(bars))
            drawing, axes = plt.subplots(figsize=size, layout="constrained")
            drawn = axes.barh([*bars], [*bars.values()], color="tab:blue")
            axes.bar_label(drawn, [column.form(value) for value in bars.values()], padding=3)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.spines["right"].set_visible(False)
            axes.xaxis.set_visible(False)
            axes.set_title(title, loc="left", fontsize=10)
            drawing.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
            plt.close(drawing)


BARS = {
    "tiers": (0, "Median TTFT of later turns"),
    "chunks": (1, "Median TTFT of prompts of 4,096 tokens"),
    "restore": (0, "TTFT of a stored prefix of 4,096 tokens"),
    "swap": (1, "TTFT, 99th percentile, under overload"),
    "peer": (0, "Longest request, in tokens"),
    "clusters": (0, "Attention mass of a tenth of the entries, relative to the best tenth"),
}
"""Shown column and title of each figure, by table."""


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
    if sys.argv[1:] == ["figures"]:
        draw()
