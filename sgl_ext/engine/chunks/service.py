"""Creates contexts and puts them into prompts, in the process of SGLang's tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from sgl_ext.chunks.contexts import Context, Contexts
from sgl_ext.chunks.methods import PASSAGES, Preparation, Recompute, link_method
from sgl_ext.client import ContextInfo
from sgl_ext.engine.chunks.parameters import COMPOSITION, NO_BLEND, SELECTION
from sgl_ext.engine.chunks.prepare import ChunkPreparation
from sgl_ext.engine.chunks.prompt import PromptLinking
from sgl_ext.engine.chunks.renewal import Renewal
from sgl_ext.engine.chunks.splitting import Splitting
from sgl_ext.engine.core.power import Answer, Front, Watch
from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.errors import ExtError

ALONE = "lego-16"
"""The link method of a chunk that there is nothing to prime with."""

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.fidelity import Fidelity

T = TypeVar("T")


class ContextService(Front):
    """Contexts of one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        method: how contexts are linked that do not say it.
        limit: contexts that are kept.
        page: tokens of a page of KV.
        token_bytes: of a token's KV.
        pool: tokens that the device's KV holds.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        *,
        method: str,
        limit: int,
        page: int,
        token_bytes: int,
        pool: int,
    ) -> None:
        self.fidelity: Fidelity | None = None
        """What the server has found of itself before it was ready."""
        self._manager = manager
        self._token_bytes = token_bytes
        self.method = method
        """How contexts are linked that do not say it."""
        self.contexts = Contexts(limit, time.monotonic)
        """Contexts by their id."""
        self._preparation = ChunkPreparation(manager, page)
        self.renewal = Renewal(
            lambda context: self._preparation.compute(context.before, context.tokens, context.salt),
            lambda context: context.id in self.contexts,
        )
        """Of contexts whose KV has gone."""
        self._linking = PromptLinking(manager, self.contexts, self.encode)
        self._page = page
        self._most = min(manager.context_len, pool)
        # SGLang reads its chats in the event loop's own threads.
        self._reading = ThreadPoolExecutor(1, "sgl_ext-contexts")
        longest = max(self._most - 2 * page - 1, 1)  # that create() takes
        self.splitting = Splitting(manager.tokenizer, self._reading, longest)
        """Splits long texts into chunks."""

    def describe(self, context: Context) -> ContextInfo:
        """What users are told of a context."""
        expires = context.expires
        return ContextInfo(
            id=context.id,
            tokens=len(context.tokens),
            bytes=len(context.tokens) * self._token_bytes,
            method=context.method,
            expires_in=None if expires is None else expires - time.monotonic(),
        )

    async def create(
        self,
        chunks: Sequence[str | Sequence[int]],
        *,
        method: str | None = None,
        prefix: str | None = None,
        ttl: float | None = None,
        salt: str | None = None,
    ) -> list[Context]:
        """Computes the KV of chunks, each text or token ids, and names them.

        Args:
            method: name of the link method; without it the server's, or, if that primes chunks and
                there is none to prime the first one with, :data:`ALONE`.
            prefix: what prompts that link them begin with, such as the system prompt; primed
                chunks are computed behind it.

        Raises:
            ExtError: an empty chunk, one that is too long, ids beyond the vocabulary, no such
                method.
        """
        if len(chunks) > self.contexts.limit:
            raise ExtError(
                f"{len(chunks)} chunks at once, and the server keeps {self.contexts.limit} "
                "(chunks.limit)"
            )
        tokens = [
            await self._read(self._tokens_of, number, chunk) for number, chunk in enumerate(chunks)
        ]
        lead = self._preparation.bos()
        if prefix:
            lead = await self._read(self.encode, prefix, True)
        known = (context.tokens for context in reversed(self.contexts.all(salt)))
        # Cut, so that all of them together take a quarter of what there is room for.
        longest = self._most // (4 * PASSAGES)
        cut = (text[:longest] for text in chain(tokens, known))
        passages = _different(cut, PASSAGES + 1)
        how = link_method(self.method if method is None else method)
        if how.recompute is Recompute.BLEND and self._manager.server_args.tp_size > 1:
            raise ExtError(NO_BLEND)
        if method is None and how.preparation is Preparation.PRIMED and len(passages) == 1:
            how = link_method(ALONE)
        before = [self._preparation.before(how, lead, ids, passages) for ids in tokens]
        for number, (ids, text) in enumerate(zip(tokens, before, strict=True)):
            # The last page may be begun, and SGLang keeps one for itself.
            if len(ids) + len(text) + 2 * self._page >= self._most:
                raise ExtError(
                    f"chunk {number} has {len(ids)} tokens, and is computed behind {len(text)}; "
                    f"model and KV pool take less than {self._most} in all: split it"
                )
        if prefix:  # behind it prompts find their beginning, whatever their first chunk is
            await self._preparation.prefill(lead, None, salt)
        recompute = await self._preparation.prepare_all(how, lead, before, tokens, salt)
        return [
            self.contexts.create(
                ids,
                method=str(how),
                text=chunk if isinstance(chunk, str) else None,
                before=text,
                recompute=again,
                blend=how.amount if how.recompute is Recompute.BLEND else 0,
                salt=salt,
                ttl=ttl,
            )
            for chunk, ids, text, again in zip(chunks, tokens, before, recompute, strict=True)
        ]

    def accept(self, request: Any) -> Watch | None:
        """Replaces the marks of a prompt by the tokens of its contexts."""
        self._own(request)
        if not (named := self.link(request)):
            return None
        told: list[Any] = []

        def watch(answer: Answer) -> None:
            metas = [one["meta_info"] for one in (answer if isinstance(answer, list) else [answer])]
            told.extend(each for meta in metas for each in meta.get("ext", ()))
            # Before the client has it: who waits for one answer does not ask for a second.
            if told and metas[-1]["finish_reason"] is not None:
                self.renewal.answered(named, missing=any(each.get("missing") for each in told))

        return watch

    def _own(self, request: Any) -> None:
        """Takes out of a user's request what only this service says to schedulers."""
        if request in self._preparation.requests:
            return
        params = request.sampling_params
        for each in params if isinstance(params, list) else [params]:
            custom = each.get("custom_params") if isinstance(each, dict) else None
            if isinstance(custom, dict):
                for name in (COMPOSITION, SELECTION):
                    custom.pop(name, None)

    def link(self, request: Any) -> list[Context]:
        """See :meth:`PromptLinking.link`."""
        return self._linking.link(request)

    def encode(self, text: str, first: bool) -> list[int]:
        """Token ids of a text; special ones are added if it is the ``first`` of a prompt."""
        ids: list[int] = self._manager.tokenizer.encode(text, add_special_tokens=first)
        return ids

    async def _read(self, function: Callable[..., T], *args: object) -> T:
        """What ``function`` makes of texts, which may be as long as books."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, function, *args)

    def _tokens_of(self, number: int, chunk: str | Sequence[int]) -> list[int]:
        if isinstance(chunk, str):
            tokens = self.encode(chunk, False)
        else:
            tokens = list(chunk)
            size = self._manager.model_config.vocab_size
            wrong = [token for token in tokens if not 0 <= token < size]
            if wrong:
                raise ExtError(
                    f"chunk {number} has the token ids {wrong[:3]}; the vocabulary ends at {size}"
                )
        if not tokens:
            raise ExtError(f"chunk {number} is empty")
        return tokens


def _different(texts: Iterable[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """The first ``count`` that differ."""
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        found[tuple(text)] = None
        if len(found) == count:
            break
    return list(found)
