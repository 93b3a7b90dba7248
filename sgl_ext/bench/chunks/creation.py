"""Time of creating contexts, relative to computing their texts as prompts.

Both servers are given the same new texts at once. A text is computed once by SGLang; how often a
context is computed depends on its link method.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests

from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.data.needles import essays
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio
from sgl_ext.client import ContextCache
from sgl_ext.errors import ExtError
from sgl_ext.progress import steps
from sgl_ext.serving import server

_TOKENS = 900
_AT_ONCE = 8
_DEADLINE_S = 900.0


@dataclass(frozen=True)
class CreationSizes:
    """Number of rounds, and the link methods that are measured."""

    rounds: int
    methods: Sequence[str]


class Creation:
    """Measurement on two servers.

    Args:
        stock: server that computes the texts as prompts.
        ours: server that creates contexts of them.
    """

    def __init__(
        self, stock: server.Server, ours: server.Server, template: Template, sizes: CreationSizes
    ) -> None:
        self._stock, self._ours, self._sizes = stock, ours, sizes
        tokens = template.encode(essays())
        self._texts = [tokens[at : at + _TOKENS] for at in range(0, len(tokens), _TOKENS)][:-1]

    def report(self, report: Report) -> None:
        """Adds the runs and figures of creation."""
        seconds: dict[str, list[float]] = {name: [] for name in ("stock", *self._sizes.methods)}
        for _ in steps(range(self._sizes.rounds), "rounds of contexts"):
            for name, into in seconds.items():
                begin = time.perf_counter()
                texts = [self._texts.pop() for _ in range(_AT_ONCE)]
                self._compute(texts) if name == "stock" else self._create(texts, name)
                into.append((time.perf_counter() - begin) / _AT_ONCE)
        for name, each in seconds.items():
            over = ratio(each, seconds["stock"])
            row = {"what": "creation", "system": name, "over_stock": over}
            report.runs.append(row | {"samples": len(each)} | summary(each, "context_s"))
            if name != "stock":
                report.figures[f"create_over_prefill_{name}"] = over

    def _compute(self, texts: Sequence[Sequence[int]]) -> None:
        def compute(tokens: Sequence[int]) -> None:
            body = {
                "input_ids": [*tokens],
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            }
            url = f"{self._stock.url}/generate"
            answer = requests.post(url, json=body, timeout=_DEADLINE_S)
            if not answer.ok:
                raise ExtError(f"{url} did not compute a prompt: {answer.text[:300]}")

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            [*threads.map(compute, texts)]

    def _create(self, texts: Sequence[Sequence[int]], method: str) -> None:
        ContextCache(self._ours.url, timeout=_DEADLINE_S).create(
            [[*each] for each in texts], method
        )
