"""Steps of a verification: the same prompts with KV from every source that the server has.

Each passage is computed as a prompt that no cache has, and then asked again with its KV from the
device, from lower tiers, and among other requests. Each time a second prompt repeats the passage:
its log-probabilities depend on all of the passage's KV, since a model copies what it has read.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

from sgl_ext.errors import ExtError
from sgl_ext.verify.background import background
from sgl_ext.verify.compare import (
    WINDOW,
    Difference,
    Reply,
    bounds,
    difference,
    diverges_at,
)
from sgl_ext.verify.preemption import ANSWER, FILL_S, Preemption
from sgl_ext.verify.target import Target
from sgl_ext.verify.texts import Texts

Verdict = Literal["same", "differs", "note"]
_SECTIONS = {"tiers", "chunks", "restore", "swap", "peer", "clusters"}
_QUESTION = "\n\nIn short, the text above says that"
_ANSWER = 24
_SHARED = 0.05
"""Largest share of a new prompt that may come from a cache, such as a first page that all have."""


@dataclass(frozen=True)
class Line:
    """Line of the report: ``differs`` means wrong answers, ``note`` what was not verified."""

    step: str
    verdict: Verdict
    found: str
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of all prompts by the source of their KV."""
    seconds: float | None = None
    """Median time to the first token, in seconds."""


class _Passage(NamedTuple):
    ids: list[int]
    prompt: list[int]
    """The passage and a question."""
    reply: Reply
    logprobs: list[float]
    """Log-probabilities of the passage's tokens where a prompt repeats it."""


def not_loaded(info: Mapping[str, Any], tier: str, *, filled: bool) -> str:
    """Returns why no KV was loaded from a tier, as far as the server's ``/server_info`` tells.

    Args:
        filled: whether the device pool was filled with other KV.
    """
    if not filled:
        return "no KV was loaded from it; the device pool was not filled"
    states = info["internal_states"][0].get("sgl_ext", {}).get("tiers", {})
    held = states.get(tier, {}).get("capacity_pages", 0) * int(info.get("page_size", 1))
    pool = int(info["max_total_num_tokens"])
    if not 0 < held < pool:
        return "no KV was loaded from it"
    return (
        f"it holds {held:,} tokens, and what filled the device pool of {pool:,} tokens replaced "
        "the passages; a larger capacity or a smaller --max-total-tokens lets it be verified"
    )


class Verification:
    """Verification of one server, which must have no other requests meanwhile.

    Args:
        passages: Number of passages.
        length: Tokens of each; fewer if the server's pool or the model's context are small.
        against: Server of the same model whose answers are the reference, if any.
        flush: False to neither flush nor fill the server's caches.

    Raises:
        ExtError: The server does not answer, or its pool is too small.
    """

    def __init__(
        self, target: Target, *, passages: int, length: int, against: Target | None, flush: bool
    ) -> None:
        self._target, self._against, self._flush = target, against, flush
        self._info = target.info()
        self._ext: dict[str, Any] = self._info.get("sgl_ext") or {}
        self._config: dict[str, Any] = self._ext.get("config", {})
        self._pool = int(self._info["max_total_num_tokens"])
        self._longest = int(self._info["max_req_input_len"])
        dtypes = [_dtype(each) for each in (self._info, *([against.info()] if against else []))]
        self._bounds = bounds(*dtypes)
        # All passages fit the pool, each with its repetition, and again as another tenant's.
        room = min(self._pool // (4 * passages), (self._longest - ANSWER) // 2) - WINDOW
        self._count, self._length = passages, min(length, room)
        if self._length < 4 * WINDOW:
            raise ExtError(
                f"{passages} passages do not fit a pool of {self._pool} tokens and prompts of "
                f"{self._longest}; ask for fewer --passages, or raise --max-total-tokens"
            )
        self._texts = Texts(target)
        self._seen: Counter[str] = Counter()
        self._powers: set[str] = set()
        self._per_token = 0.0
        """Seconds in which the server computes a token of a prompt."""
        self._filled = False

    def run(self, tell: Callable[..., None]) -> Iterator[Line]:
        """Yields the lines of the report as they are found.

        Args:
            tell: called with the step that begins and, if these are known, with what is done and
                how much there is to do.
        """
        yield self._server()
        if self._flush:
            # Fails at once if it is not allowed, or if the server has requests of others.
            self._target.flush()
        tell("computing the passages")
        passages, cold = self._cold()
        yield cold
        yield from self._control(passages[0])
        if self._against is not None:
            tell("asking the other server")
            yield self._again(f"against {self._against.url}", self._against, passages)
        tell("asking again")
        yield self._again("warm", self._target, passages)
        if self._flush and (seconds := self._pool * self._per_token) <= FILL_S:
            tell("waiting until pages are stored")
            self._target.settle()
            self._texts.fill_pool(self._info, tell)
            self._filled = True
            yield self._again("evicted", self._target, passages)
        elif self._flush:
            yield Line(
                "evicted", "note", f"not verified: filling the device pool of {self._pool:,} "
                f"tokens takes about {seconds:,.0f} s; a smaller --max-total-tokens lets it be "
                "verified",
            )  # fmt: skip
        if self._flush:
            tell("flushing the caches")
            self._target.settle()
            self._target.flush()
            yield self._again("flushed", self._target, passages)
        tell("asking all at once")
        yield self._at_once(passages)
        if self._flush and "swap" in self._config:
            tell("preempting requests")
            yield self._preempted(passages)
        yield from self._not_told()

    def _server(self) -> Line:
        version = f"SGLang {self._info.get('version', 'of an unknown version')}"
        if not self._ext:
            return Line(
                "server", "note", f"{version} without sgl_ext: only its radix cache is verified; "
                "--enable-ext enables sgl_ext",
            )  # fmt: skip
        on = ", ".join(sorted(self._config.keys() & _SECTIONS)) or "no section"
        return Line("server", "same", f"{version} with sgl_ext {self._ext['version']}: {on}")

    def _cold(self) -> tuple[list[_Passage], Line]:
        question = self._target.tokens(_QUESTION)
        passages = []
        for ids in self._texts.draw(self._count, self._length):
            prompt = [*ids, *question]
            reply = self._target.answer(prompt, _ANSWER, likeliest=True)
            # Another tenant's KV is not read: the reference is computed as a whole.
            right = self._repeated(self._target, ids, salt=secrets.token_hex(8))
            passages.append(_Passage(ids, prompt, reply, right))
        sources = _sources(each.reply for each in passages)
        seconds = median(each.reply.seconds for each in passages)
        tokens = sum(each.reply.prompt for each in passages)
        self._per_token = sum(each.reply.seconds for each in passages) / tokens
        if (cached := tokens - sources["computed"]) > _SHARED * tokens:
            found = f"{cached} tokens of new prompts came from a cache"
            return passages, Line("cold", "differs", found, sources, seconds)
        found = f"{self._count} passages of {self._length} tokens, computed"
        return passages, Line("cold", "same", found, sources, seconds)

    def _control(self, passage: _Passage) -> Iterator[Line]:
        """Yields a note if the model would answer the same with a page of wrong KV."""
        ids, middle = passage.ids, len(passage.ids) // 2
        wrong = [*ids[:middle], *ids[:WINDOW], *ids[middle + WINDOW :]]
        found = self._target.logprobs([*wrong, *ids[1:]], len(wrong), salt=secrets.token_hex(8))
        if difference(passage.logprobs, found).within(self._bounds):
            yield Line(
                "model",
                "note",
                "copies too little of its prompt for wrong KV to show in log-probabilities",
            )

    def _again(self, step: str, of: Target, passages: Sequence[_Passage]) -> Line:
        # All before the first repetition, which takes room that may evict others.
        replies = [of.answer(each.prompt, _ANSWER, likeliest=True) for each in passages]
        return self._line(step, of, passages, replies)

    def _at_once(self, passages: Sequence[_Passage]) -> Line:
        def ask(each: _Passage) -> tuple[Reply, list[float]]:
            reply = self._target.answer(each.prompt, _ANSWER, likeliest=True)
            return reply, self._repeated(self._target, each.ids)

        asked = [background(partial(ask, each)) for each in passages]
        found = [each.result() for each in asked]
        replies, logprobs = [each for each, _ in found], [each for _, each in found]
        return self._line("all at once", self._target, passages, replies, logprobs)

    def _preempted(self, passages: Sequence[_Passage]) -> Line:
        prompts = [each.prompt for each in passages]
        provoked = Preemption(self._target, self._info, prompts, self._per_token)
        if provoked.why_not:
            return Line("preempted", "note", f"not verified: {provoked.why_not}")
        answer = partial(self._target.answer, tokens=ANSWER, likeliest=True)
        asked = [background(partial(answer, each.prompt)) for each in passages]
        calm = [
            each._replace(reply=one.result()) for each, one in zip(passages, asked, strict=True)
        ]
        replies = provoked.answers(self._texts)
        line = self._line("preempted", self._target, calm, replies)
        resumed = sum(any(one["power"] == "swap" for one in each.entries) for each in replies)
        if line.verdict == "differs":
            return line
        if not resumed:
            return replace(line, verdict="note", found="same answers, but no request was resumed")
        return replace(line, found=f"{line.found}; {resumed} of {len(replies)} were resumed")

    def _line(
        self,
        step: str,
        of: Target,
        passages: Sequence[_Passage],
        replies: Sequence[Reply],
        logprobs: Sequence[Sequence[float]] | None = None,
    ) -> Line:
        sources, mine = _sources(replies), of is self._target
        if mine:
            self._seen.update(sources)
            # An entry of a prefix of which nothing was loaded says that all of it was computed.
            self._powers |= {
                entry["power"]
                for each in replies
                for entry in each.entries
                if entry.get("loaded", True)
            }
        worst, wrong = Difference(0.0, 0, 0.0), []
        for number, (each, reply) in enumerate(zip(passages, replies, strict=True)):
            found = self._repeated(of, each.ids) if logprobs is None else logprobs[number]
            apart = difference(each.logprobs, found)
            worst = max(worst, apart)
            if not apart.within(self._bounds):
                wrong.append(
                    f"passage {number}: log-probabilities differ by {apart.mean:.3g} nats around "
                    f"token {apart.position + 1}"
                )
            elif (at := diverges_at(each.reply, reply, self._bounds.single)) is not None:
                wrong.append(f"passage {number}: another answer from its token {at} on")
        seconds = median(each.seconds for each in replies)
        if wrong:
            return Line(step, "differs", "; ".join(wrong), sources, seconds)
        tokens = sum(sources.values())
        if mine and sources["computed"] > (1 - _SHARED) * tokens:
            return Line(step, "note", "same answers, but all KV was computed", sources, seconds)
        if step == "evicted" and sources.get("device", 0) + sources["computed"] == tokens:
            found_ = "same answers, but the device pool still had the KV"
            return Line(step, "note", found_, sources, seconds)
        same = f"same answers; log-probabilities differ by up to {worst.mean:.2g} nats"
        return Line(step, "same", same, sources, seconds)

    def _repeated(self, target: Target, ids: Sequence[int], salt: str | None = None) -> list[float]:
        return target.logprobs([*ids, *ids[1:]], len(ids), salt=salt)

    def _not_told(self) -> Iterator[Line]:
        """Yields what this verification cannot tell."""
        for tier in self._config.get("tiers", {}).keys() & {"host", "ssd", "remote"}:
            if not self._seen[tier]:
                why = not_loaded(self._info, tier, filled=self._filled)
                yield Line(tier, "note", f"not verified: {why}")
        for power, what in (
            ("restore", "no prefix was restored"),
            ("swap", "no request was preempted"),
        ):
            if power in self._config and power not in self._powers:
                yield Line(power, "note", f"not verified: {what}")
        if "peer" in self._config:
            yield Line(
                "peer", "note", "not verified separately: borrowed memory is reported as device KV"
            )  # fmt: skip
        if "clusters" in self._config:
            yield Line("clusters", "note", "not verified: answers are approximate")
        if "chunks" in self._config:
            found = self._target.fidelity()
            nats = found["nats"]
            measured = "" if nats is None else (
                f"; the server has measured {nats['divergence']:.3g} nats for {found['method']}"
            )  # fmt: skip
            yield Line("chunks", "note", f"not verified: answers are approximate{measured}")
        if self._against is None:
            yield Line(
                "reference", "note", "the server's own answers; --against URL compares with those "
                "of another server, such as stock SGLang",
            )  # fmt: skip


def _dtype(info: dict[str, Any]) -> str:
    """Returns the dtype of a server's KV or, for stock SGLang, the one that was asked for."""
    if info.get("kv_cache_dtype", "auto") not in ("auto", "float32"):
        return str(info["kv_cache_dtype"])
    memory = (info.get("sgl_ext") or {}).get("memory") or {}
    return str(memory.get("dtype") or info.get("dtype", "auto"))


def _sources(replies: Iterable[Reply]) -> dict[str, int]:
    """Returns the tokens of all prompts by the source of their KV."""
    found: Counter[str] = Counter()
    for reply in replies:
        found.update(reply.sources)
        found["computed"] += reply.prompt - sum(reply.sources.values())
    return dict(found)
