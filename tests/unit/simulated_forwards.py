"""Forwards of a simulated scheduler, which restore prefixes as SGLang's planned forwards do."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from simulated_engine import LAYERS, PAGE, Read, SimulatedEngine, Span
from simulated_requests import NO_PAGES, Request, slots_of

from sgl_ext.engine.restore import by_layers, by_tokens
from sgl_ext.engine.restore.by_layers import Coming
from sgl_ext.engine.step.rows import Row
from sgl_ext.tiers.arena import Pages


@dataclass
class Part:
    """Part of a prompt in a forward: pages from host memory, then tokens to compute."""

    request: Request
    prefix: int
    """Tokens whose KV is in the pool already"""
    start: int
    """First token that is computed in any case"""
    end: int
    row: int
    way: str = "load"
    """How tokens ``prefix .. start - 1`` come: load, fill, fill tokens, layers or tokens"""
    held: Pages = field(default_factory=lambda: NO_PAGES)


@dataclass
class Batch:
    """Forward, whose results are processed later."""

    parts: list[Part]
    decoded: list[tuple[Request, int]]
    """Requests that get a token, and their rows; another row shows that one was preempted since"""
    load: int = -1
    event: int = 0
    reads: list[Read] = field(default_factory=list)


class _Planned:
    """Stand-in for SGLang's runner and ``PlannedForward``, whose layers launch kernels."""

    def __init__(self, engine: SimulatedEngine, parts: Sequence[Part]) -> None:
        self.engine, self.parts = engine, parts
        self.instead: Any = None
        prefixes = [part.prefix for part in parts]
        lengths = [part.end - part.prefix for part in parts]
        total, ends = sum(lengths), torch.tensor([part.end for part in parts])
        self.batch: Any = SimpleNamespace(
            rids=[part.request.rid for part in parts],
            extend_prefix_lens_cpu=prefixes, extend_prefix_lens=torch.tensor(prefixes),
            extend_seq_lens_cpu=lengths, extend_seq_lens=torch.tensor(lengths),
            extend_start_loc=torch.zeros(len(parts), dtype=torch.int64),
            input_ids=torch.arange(total), positions=torch.arange(total),
            out_cache_loc=torch.arange(total), seq_lens=ends, orig_seq_lens=None,
            req_pool_indices=torch.arange(len(parts)), req_pool_indices_cpu=None,
            replace_positions=None, lora_ids=None, num_token_non_padded=None,
        )  # fmt: skip

    @property
    def runner(self) -> Any:
        return SimpleNamespace(model=self)

    def spans(self, rows: Sequence[Row]) -> list[Span]:
        return [self.parts[row.request].request.span(row.start, row.end) for row in rows]

    def run(self, part: Any) -> None:
        starts, lengths = part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu
        rows = [
            Row(self.batch.rids.index(rid), start, start + length)
            for rid, start, length in zip(part.rids, starts, lengths, strict=True)
        ]
        self.forward(rows)

    def forward(self, rows: Sequence[Row]) -> None:
        batch = SimpleNamespace(rows=rows, input_ids=None, positions=None)
        if self.instead is not None:
            self.instead(None, None, batch, None)
        else:
            self.forward_split_prefill(None, None, batch, (0, LAYERS), None)

    def forward_split_prefill(
        self, _ids: object, _positions: object, batch: Any, layers: tuple[int, int], _: object
    ) -> None:
        for layer in range(*layers):
            self.engine.compute(self.spans(batch.rows), layer)

    @contextmanager
    def replaced(self, forward: Any) -> Iterator[None]:
        self.instead = forward
        try:
            yield
        finally:
            self.instead = None

    @contextmanager
    def cutting_over(self, _before: object, after: Sequence[Row], _first: object) -> Iterator[Any]:
        yield SimpleNamespace(rows=after, input_ids=None, positions=None)


def prefill(engine: SimulatedEngine, parts: Sequence[Part], chance: random.Random) -> None:
    """Launches a forward over parts of prompts, on the current stream."""
    holds = engine.stack.holds
    planned = _Planned(engine, parts)
    rows = [Row(at, part.start, part.end) for at, part in enumerate(parts)]
    rows = [row for row in rows if row.start < row.end]
    coming: dict[str, dict[int, list[Coming]]] = {"layers": {}, "tokens": {}}
    for at, part in enumerate(parts):
        blocks = part.request.blocks[part.prefix // PAGE : part.start // PAGE]
        if len(part.held) and part.way == "fill":
            holds.fill(part.held, blocks)
        elif len(part.held) and part.way == "fill tokens":
            places = slots_of(part.held)
            some = chance.randint(1, len(places))  # the others with a second copy
            slots = part.request.slots[part.prefix : part.start]
            holds.fill_tokens(places[:some], slots[:some])
            if some < len(places):
                holds.fill_tokens(places[some:], slots[some:])
        elif len(part.held):
            coming[part.way][at] = [Coming(part.prefix, part.held, blocks)]
    if tokens := coming["tokens"]:
        by_tokens.restore(engine.stack, planned, tokens, 4, lambda *_: chance.random())  # type: ignore[arg-type]
    if layers := coming["layers"]:
        held = SimpleNamespace(computed=lambda *_: None)
        loads = by_layers.from_host(engine.stack, layers)
        with by_layers.restoring(engine.stack, held, planned, rows, layers, loads) as begin:  # type: ignore[arg-type]
            planned.forward(begin)
    else:
        planned.forward(rows)
