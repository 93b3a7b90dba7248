"""Service that creates contexts and links them into prompts, in SGLang's tokenizer process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from sgl_ext.engine.core.sglang_types import GenerateReqInput, TokenizerManager
from sgl_ext.errors import ExtError

ALONE = "lego-16"
"""Link method of a chunk for which there are no passages to prime it with."""

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.fidelity import Fidelity

T = TypeVar("T")


class ContextService(Front):
    """Contexts of one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        method: name of the default link method.
        limit: maximum number of contexts.
        page: tokens of a page of KV.
        token_bytes: bytes of the KV of a token.
        pool: tokens that the device's KV pool holds.
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
        """Measured fidelity of the model; None before it is measured."""
        self._manager = manager
        self._token_bytes = token_bytes
        self.method = method
        """Name of the default link method."""
        self.contexts = Contexts(limit, time.monotonic)
        """Registry of the contexts."""
        self._preparation = ChunkPreparation(manager, page)
        self.renewal = Renewal(
            lambda context: self._preparation.compute(context.before, context.tokens, context.salt),
            lambda context: context.id in self.contexts,
        )
        """Renewal of contexts whose KV was evicted."""
        self._linking = PromptLinking(manager, self.contexts, self.encode)
        self._page = page
        self._most = min(manager.context_len, pool)
        # A thread of its own: SGLang tokenizes chats in the event loop's default executor.
        self._reading = ThreadPoolExecutor(1, "sgl_ext-contexts")
        longest = max(self._most - 2 * page - 1, 1)  # the longest chunk that create() accepts
        self.splitting = Splitting(manager.tokenizer, self._reading, longest)
        """Splitter of long texts into chunks."""

    def describe(self, context: Context) -> ContextInfo:
        """Returns the description of a context for users."""
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
        """Computes the KV of chunks, and creates and returns their contexts in the same order.

        Args:
            chunks: chunks, each a text or token ids.
            method: name of the link method. If None, the server's default, or :data:`ALONE` if the
                default primes chunks and there are no other passages to prime them with.
            prefix: text that the prompts that link the contexts begin with, such as the system
                prompt; primed chunks are computed behind it.
            ttl: seconds until the contexts expire; if None, they never expire.
            salt: ``cache_salt`` of the tenant.

        Raises:
            ExtError: a chunk is empty, too long, or has token ids beyond the vocabulary; there are
                too many chunks; the method does not exist or cannot be used here; or the server
                does not compute a chunk.
        """
        if len(chunks) > self.contexts.limit:
            raise ExtError(
                f"{len(chunks)} chunks were given at once, but the server keeps at most "
                f"{self.contexts.limit} (chunks.limit); create fewer"
            )
        tokens = [
            await self._read(self._tokens_of, number, chunk) for number, chunk in enumerate(chunks)
        ]
        lead = self._preparation.bos()
        if prefix:
            lead = await self._read(self.encode, prefix, True)
        known = (context.tokens for context in reversed(self.contexts.all(salt)))
        # Cut, so that all passages together take at most a quarter of the capacity.
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
            # The last page may be partly filled, and SGLang reserves one page.
            if len(ids) + len(text) + 2 * self._page >= self._most:
                raise ExtError(
                    f"chunk {number} has {len(ids)} tokens and a prefix of {len(text)} tokens; "
                    f"the model and the KV pool allow fewer than {self._most} tokens in total: "
                    "split the chunk"
                )
        if prefix:  # prompts then find the KV of their prefix, whatever their first chunk is
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

    def accept(self, request: GenerateReqInput) -> Watch | None:
        """Replaces the marks of a prompt by the tokens of its contexts.

        Returns:
            A function that is called with each answer and starts renewals; None without contexts.
        """
        self._own(request)
        if not (named := self.link(request)):
            return None
        told: list[Mapping[str, Any]] = []

        def watch(answer: Answer) -> None:
            metas = [one["meta_info"] for one in (answer if isinstance(answer, list) else [answer])]
            told.extend(each for meta in metas for each in meta.get("ext", ()))
            # The renewal is scheduled before the client gets the answer and sends its next prompt.
            if told and metas[-1]["finish_reason"] is not None:
                self.renewal.answered(named, missing=any(each.get("missing") for each in told))

        return watch

    def _own(self, request: GenerateReqInput) -> None:
        """Removes parameters from a user's request that only this service may set."""
        if request in self._preparation.requests:
            return
        params = request.sampling_params
        for each in params if isinstance(params, list) else [params]:
            custom = each.get("custom_params") if isinstance(each, dict) else None
            if isinstance(custom, dict):
                for name in (COMPOSITION, SELECTION):
                    custom.pop(name, None)

    def link(self, request: GenerateReqInput) -> list[Context]:
        """Links the contexts of a request; see :meth:`PromptLinking.link`."""
        return self._linking.link(request)

    def encode(self, text: str, first: bool) -> list[int]:
        """Returns the token ids of a text, with special tokens if it is ``first`` in its prompt."""
        ids: list[int] = self._manager.tokenizer.encode(text, add_special_tokens=first)
        return ids

    async def _read(self, function: Callable[..., T], *args: object) -> T:
        """Runs ``function`` in the thread for texts, because they may be very long."""
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
                    f"chunk {number} has the token ids {wrong[:3]}; expected ids below the "
                    f"vocabulary size {size}, and not negative"
                )
        if not tokens:
            raise ExtError(f"chunk {number} is empty")
        return tokens


def _different(texts: Iterable[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Returns the first ``count`` distinct texts, in order."""
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        found[tuple(text)] = None
        if len(found) == count:
            break
    return list(found)
