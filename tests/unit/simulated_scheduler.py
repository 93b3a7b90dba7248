"""Scheduler on the simulated device that plans random steps, with SGLang's two loops.

With overlap scheduling, a step is prepared while the forward of the last one runs, and results are
processed after the next forward was launched: requests end, are preempted and give their blocks to
others while forwards still use them.
"""

from __future__ import annotations

import random
from collections import Counter

from simulated_engine import LARGE, PAGE, SimulatedEngine, key
from simulated_forwards import Batch, Part, prefill
from simulated_lending import SimulatedLending
from simulated_requests import NO_PAGES, Request, Rows, page_number
from simulated_swap import Swaps
from transfer_kit import wait_until


class Scheduler:
    """Scheduler that plans random steps; see the module."""

    def __init__(self, engine: SimulatedEngine, chance: random.Random) -> None:
        self.engine, self.chance = engine, chance
        self.stack, self.streams = engine.stack, engine.streams
        self.counts: Counter[str] = Counter()
        self.rows = Rows(engine)
        self.swaps = Swaps(engine, self.rows, chance, self.counts)
        self.tree = self.rows.tree
        self.overlap = chance.random() < 0.8
        self.barrier = chance.random() < 0.2
        """Whether the schedule stream waits for each forward, as SGLang may have it."""
        self.chunk = chance.choice([4, 6, 1000])
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.last: Batch | None = None
        """Forward whose results are not processed yet."""
        self.done: list[Request] = []
        self.wrong: list[str] = []
        self._came = 0
        self.lending: SimulatedLending | None = None
        if engine.layout is LARGE and chance.random() < 0.7:
            self.lending = SimulatedLending(
                engine, self._held, lambda: self.tree.evict(engine.blocks)
            )

    # --- the loop -------------------------------------------------------------------------------

    def step(self) -> None:
        self.engine.planner.advance()
        self.stack.poll()
        self.engine.manager.advance()
        self.tree.commit(self.stack.stores.completed())
        batch = self.plan()
        if batch is not None:
            self.launch(batch)
            if self.barrier:
                self.streams.join(self.streams.schedule, self.streams.forward)
        if not self.overlap:
            self.last, batch = batch, None
        if self.last is not None:
            self.process(self.last)
        self.last = batch

    def plan(self) -> Batch | None:
        chance = self.chance
        if self.chunked is not None and not self.chunked.loading:
            self.rows.keep(self.chunked, self.chunked.done)  # their forward may still run
        self.swaps.land()
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            self._come()
        for request in [*self.waiting]:
            if chance.random() < 0.05:
                self._abort_waiting(request)
        for request in self.running:
            request.aborted |= chance.random() < 0.03
        if self.running and chance.random() < 0.2:
            self._preempt(chance.choice(self.running))
        if chance.random() < 0.4:
            self.tree.evict(self.engine.blocks)
        if chance.random() < 0.2 and self.engine.layout is LARGE:
            self._lend()
        for request in self.swaps.resume(self.waiting):
            self.waiting.remove(request)
            self.running.append(request)
        return self._extend() or self._decode()

    def launch(self, batch: Batch) -> None:
        engine = self.engine
        with self.streams.forwarding():
            if batch.parts:
                prefill(engine, batch.parts, self.chance)
            else:
                self.stack.loads.layers.set_consumer(-1)
                spans = [one.span(one.done - 1, one.done) for one, _ in batch.decoded]
                for layer in range(engine.layout.layers):
                    engine.compute(spans, layer)
            batch.event = self.streams.record()
        batch.reads, engine.reads = engine.reads, []
        for part in batch.parts:
            if len(part.held):  # the forward has what it needs; copies may still read the pages
                self.stack.holds.let_go(part.held)

    def process(self, batch: Batch) -> None:
        """Processes the results of a forward, as SGLang does one step later."""
        self.streams.await_event(batch.event)
        if batch.load >= 0 and not self.stack.loads.finish(batch.load):
            self.wrong.append("a load has failed")
        self.wrong += self.engine.wrong_reads(batch.reads)
        for part in batch.parts:
            if part.request.row == part.row:
                part.request.loading = False
        for request, row in batch.decoded:
            if request.row != row:
                continue
            request.answer += 1
            if request.answer >= request.most or request.aborted:
                self.running.remove(request)
                self.rows.release(request, request.tokens - 1)
                self.done.append(request)
            elif batch.parts and self.chance.random() < 0.5:
                self.rows.keep(request, request.tokens - 1)

    # --- prompts --------------------------------------------------------------------------------

    def _come(self) -> None:
        chance = self.chance
        self._came += 1
        rid = f"r{self._came}"
        prefix: list[int] = []
        if chance.random() < 0.75:
            family = chance.randrange(4 if self.engine.lower else 2)
            prefix = [page_number(f"f{family}", at) for at in range(chance.randint(2, 5))]
        elif self.done and chance.random() < 0.5:
            before = chance.choice(self.done)
            prefix = before.pages((before.tokens - 1) // PAGE)[:6]
        prompt = len(prefix) * PAGE + chance.randint(1, 5)
        request = Request(rid, prefix, prompt, chance.randint(1, 6))
        self.waiting.append(request)
        self.engine.prefixes.lookup(
            rid, [key(page) for page in request.pages((prompt - 1) // PAGE)]
        )

    def _extend(self) -> Batch | None:
        """Returns a forward over parts of prompts; None if there is none."""
        parts = []
        if self.chunked is not None:
            request, self.chunked = self.chunked, None
            parts.append(self._part(request, request.done, request.done, "load"))
            if parts[0].end == parts[0].start:
                parts.clear()
        for request in [*self.waiting]:
            if self.chunked is not None or len(parts) == 3:
                break
            if request.rid in self.engine.manager or self.chance.random() < 0.2:
                continue
            if not self.engine.prefixes.ready(request.rid):
                self.counts["deferred"] += 1
                continue
            part = self._admit(request)
            if part is None:
                planned = [part.request for part in parts]
                able = [one for one in self.running if one not in planned]
                if able and self.chance.random() < 0.3:
                    self._preempt(able[-1])
                break
            parts.append(part)
        for part in [*parts]:
            queued = part.way == "load" and part.start > part.prefix
            if queued and self.chance.random() < 0.15:
                self._withdraw(part)
                parts.remove(part)
        if not parts:
            return None
        ended = [part.request for part in parts if part.end == part.request.tokens]
        return Batch(parts, [(one, one.row) for one in ended], self.stack.loads.start())

    def _admit(self, request: Request) -> Part | None:
        total = request.tokens
        most = (total - 1) // PAGE
        pages = request.pages(-(-total // PAGE))
        cached = len(self.tree.match(pages[:most]))
        way = self.chance.choice([*["load"] * 4, *["layers"] * 3, "fill", "fill tokens", "tokens"])
        keys = [key(page) for page in pages[cached:most]]
        held = NO_PAGES
        if way == "load":
            coming = self.engine.prefixes.lookup(request.rid, keys)
        else:
            self.engine.prefixes.forget(request.rid)
            held = self.stack.holds.hold(keys)
            coming = len(held)
        self.rows.begin(request, pages[:cached])
        end = min(total, (cached + coming) * PAGE + self.chunk)
        queued = False
        if self.rows.take(request, (cached + coming) * PAGE):
            queued = way == "load" and coming > 0
            if queued:
                blocks = request.blocks[cached:]
                assert self.engine.prefixes.load(request.rid, keys[:coming], blocks)
            if self.rows.take(request, end):
                self.waiting.remove(request)
                request.loading = queued
                part = self._part(request, cached * PAGE, (cached + coming) * PAGE, way)
                part.held = held
                if coming:
                    self.counts[way] += 1
                return part
        if queued:
            self.engine.prefixes.cancel(request.rid)
        self.stack.holds.let_go(held)
        self.rows.give_back(request)
        return None

    def _part(self, request: Request, prefix: int, start: int, way: str) -> Part:
        end = min(request.tokens, start + self.chunk)
        if len(request.slots) < end and not self.rows.take(request, end):
            end = len(request.slots)
        if end < request.tokens:
            self.chunked = request
        else:
            self.running.append(request)
        request.done = end
        return Part(request, prefix, start, end, request.row, way)

    def _withdraw(self, part: Part) -> None:
        """Gives up a request whose load is queued."""
        request = part.request
        assert self.engine.prefixes.cancel(request.rid)
        if self.chunked is request:
            self.chunked = None
        else:
            self.running.remove(request)
        self.rows.give_back(request)
        self.counts["withdrawn"] += 1

    # --- decoding, preemption and resumption ----------------------------------------------------

    def _decode(self) -> Batch | None:
        for request in [*self.running]:
            if not self.rows.take(request, request.done + 1):
                self._preempt(request)
        if not self.running:
            return None
        for request in self.running:
            request.done += 1
        return Batch([], [(request, request.row) for request in self.running])

    def _preempt(self, request: Request, *, keep: bool = True) -> None:
        """Preempts a request, whose KV is swapped out unless it is computed again."""
        self.running.remove(request)
        if request.loading or not keep:
            self.rows.give_back(request)  # the forward that needs the load was not processed
        else:
            self.swaps.out(request)
        self.waiting.append(request)

    def _lend(self) -> None:
        """Lends what no request holds, or reclaims it; or replaces a piece, as a master does."""
        while self.running and self.chance.random() < 0.8:
            self._preempt(self.running[-1], keep=self.lending is None)
        if self.lending is None:
            self.tree.evict(self.engine.blocks)
            self.counts["unmapped"] += self.engine.replace(self.chance.randrange(1, 4))
            return
        worker = self.lending.worker
        lent, reclaimed = worker.counts.lent, worker.counts.reclaimed
        self.lending.step(self.chance.choice([0, 0, self.engine.blocks * PAGE]))
        self.counts["lent"] += worker.counts.lent > lent
        self.counts["reclaimed"] += worker.counts.reclaimed > reclaimed

    def _held(self) -> int:
        """Returns the end of the blocks that requests hold."""
        requests = [*self.running, *filter(None, [self.chunked])]
        return max((int(request.blocks.max()) + 1 for request in requests), default=1)

    def _abort_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self.swaps.forget(request)
        self.engine.prefixes.forget(request.rid)

    # --- ends -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ends all requests; copies may be in progress afterwards."""
        if self.last is not None:
            self.process(self.last)
            self.last = None
        for request in [*self.waiting]:
            self._abort_waiting(request)
        for request in [*self.running]:
            self.running.remove(request)
            self.rows.release(request, request.tokens - 1)
        if self.chunked is not None:
            self.rows.give_back(self.chunked)
            self.chunked = None

    def reset(self) -> None:
        """Forgets all KV, as SGLang does when its cache is flushed."""
        self.drain()
        self.swaps.clear()
        self.tree.clear()
        self.engine.planner.clear()
        self.stack.clear()
        self.engine.allocator.clear()
        self.done.clear()
        self.counts["resets"] += 1

    def wrong_at_end(self) -> list[str]:
        """Waits for all copies, and returns what the pool and host memory have wrong."""
        self.streams.synchronize()
        wait_until(lambda: self.stack.poll() or not self.stack.stores.in_progress)
        blocks = [
            f"block {block} does not hold page {page}"
            for page, block in self.tree.blocks.items()
            if self.engine.wrong_block(page, block)
        ]
        pages = [f"host memory has another page {page}" for page in self.engine.wrong_pages()]
        return blocks + pages

    def check(self) -> None:
        if self.lending is not None:
            self.lending.check_integrity()
        self.engine.check_integrity()
        self.tree.check_integrity()
