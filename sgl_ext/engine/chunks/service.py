"""Service that creates contexts and links them into prompts, in SGLang's tokenizer process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from sgl_ext.chunks.contexts import Context, Contexts
from sgl_ext.chunks.kept import KeptContexts
from sgl_ext.chunks.methods import (
    BOS_TOKENS,
    PASSAGE_TOKENS,
    PASSAGES,
    LinkMethod,
    Preparation,
    Recompute,
    link_method,
)
from sgl_ext.chunks.split import Split
from sgl_ext.client import ContextInfo
from sgl_ext.config import Chunks, Tiers
from sgl_ext.engine.chunks.changes import KeptChanges
from sgl_ext.engine.chunks.fidelity import SALT
from sgl_ext.engine.chunks.parameters import COMPOSITION, SELECTION, refused
from sgl_ext.engine.chunks.prepare import ChunkPreparation, priming
from sgl_ext.engine.chunks.prompt import PromptLinking
from sgl_ext.engine.chunks.renewal import Renewal
from sgl_ext.engine.chunks.splitting import Splitting
from sgl_ext.engine.core.activation import REPORT_KEY
from sgl_ext.engine.core.own_requests import is_own
from sgl_ext.engine.core.power import Answer, Front, Watch
from sgl_ext.engine.core.sglang_types import GenerateReqInput, TokenizerManager
from sgl_ext.engine.front.custom_params import custom_params
from sgl_ext.engine.front.fronts import fronts_of
from sgl_ext.errors import ExtError

ALONE = "lego-16"
"""Link method of a chunk for which there are no passages to prime it with."""

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.fidelity import Fidelity

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ContextService(Front):
    """Contexts of one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        method: name of the default link method.
        limit: maximum number of contexts.
        page: tokens of a page of KV.
        token_bytes: bytes of the KV of a token.
        pool: tokens that the device's KV pool holds.
        kept: database of the contexts; None if they end with the server.
        room: tokens that the KV pool and the tiers hold; None if that is not known.
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
        kept: KeptContexts | None = None,
        room: int | None = None,
    ) -> None:
        self.fidelity: Fidelity | None = None
        """Measured fidelity of the model; None before it is measured."""
        self._manager = manager
        self._token_bytes = token_bytes
        self.method = method
        """Name of the default link method."""
        self.contexts = Contexts(limit, time.monotonic, kept)
        """Registry of the contexts."""
        self._changes = KeptChanges(self.contexts, kept)
        self._room = room
        self._preparation = ChunkPreparation(manager, page)
        self.renewal = Renewal(
            lambda context: self._preparation.compute(context.before, context.tokens, context.salt),
            lambda context: context.id in self.contexts,
        )
        """Renewal of contexts whose KV was evicted."""
        self._linking = PromptLinking(manager, self.contexts, self.encode)
        self._page = page
        self._most = min(manager.context_len, pool)
        self._longest_passage = min(PASSAGE_TOKENS, self._most // (4 * PASSAGES))
        # A thread of its own: SGLang tokenizes chats in the event loop's default executor.
        self._reading = ThreadPoolExecutor(1, "sgl_ext-contexts")
        longest = self._most - 2 * page - 1  # the longest chunk and prefix that create() accepts
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
            pinned=context.pinned,
        )

    @property
    def warning(self) -> str | None:
        """Warning that the KV of some contexts is evicted; None if there is room for all."""
        if self._room is None or self.contexts.tokens <= self._room:
            return None
        return (
            f"the contexts total more than the {self._room:,} tokens that the KV pool and tiers "
            "hold, so the KV of some is evicted and recomputed on use; delete contexts, or add or "
            "enlarge tiers"
        )

    async def split(
        self,
        chunks: Sequence[str | Sequence[int]],
        how: Split,
        most: int,
        *,
        method: str | None,
        prefix: str | None,
    ) -> list[str | Sequence[int]]:
        """Splits chunks into parts that :meth:`create` accepts; see :meth:`Splitting.parts`."""
        before = BOS_TOKENS
        preparation = link_method(self.method if method is None else method).preparation
        if preparation is Preparation.BARE:
            before = 0
        elif preparation is Preparation.PRIMED and how.tokens is not None:
            before = PASSAGES * self._longest_passage + len(await self._lead(prefix))
        return await self.splitting.parts(chunks, how, most, before)

    async def create(
        self,
        chunks: Sequence[str | Sequence[int]],
        *,
        method: str | None = None,
        prefix: str | None = None,
        ttl: float | None = None,
        salt: str | None = None,
        tell: Callable[[int, int], None] = lambda _done, _of: None,
    ) -> list[Context]:
        """Computes the KV of chunks, and creates and returns their contexts in the same order.

        Args:
            chunks: chunks, each a text or token ids.
            method: name of the link method. If None, the server's default, or :data:`ALONE` for a
                chunk that the default would prime, if there are no other passages to prime it with.
            prefix: text that the prompts that link the contexts begin with, such as the system
                prompt; primed chunks are computed behind it.
            ttl: seconds until the contexts expire; if None, they never expire.
            salt: ``cache_salt`` of the tenant.
            tell: called with the number of chunks that are computed, and of all.

        Raises:
            ExtError: a chunk is empty, too long, or has token ids beyond the vocabulary; there are
                too many chunks; the method does not exist or cannot be used here; the server does
                not compute a chunk; or the contexts cannot be kept.
        """
        self._require_unpinned(len(chunks))
        tokens = [
            await self._read(self._tokens_of, number, chunk) for number, chunk in enumerate(chunks)
        ]
        lead = await self._lead(prefix)
        passages = self._passages(tokens, salt)
        methods = [self._method(method, alone=not priming(ids, passages)) for ids in tokens]
        before = [
            self._preparation.before(how, lead, ids, passages)
            for how, ids in zip(methods, tokens, strict=True)
        ]
        self._require_room(tokens, before)
        if prefix:  # prompts then find the KV of their prefix, whatever their first chunk is
            await self._preparation.prefill(lead, None, salt)
        recompute = await self._preparation.prepare_all(methods, lead, before, tokens, salt, tell)
        async with self._changes.change():
            self._require_unpinned(len(chunks))  # others may have been pinned meanwhile
            made = [
                self.contexts.create(
                    ids,
                    method=str(how),
                    text=chunk if isinstance(chunk, str) else None,
                    before=text,
                    recompute=again,
                    blend=how.amount if how.recompute is Recompute.BLEND else 0,
                    query=how.amount if how.recompute is Recompute.QUERY else 0,
                    salt=salt,
                    ttl=ttl,
                    keep=salt != SALT,
                )
                for chunk, ids, how, text, again in zip(
                    chunks, tokens, methods, before, recompute, strict=True
                )
            ]
        if (warning := self.warning) is not None:
            logger.warning("sgl_ext: %s", warning)
        return made

    async def delete(self, id_: str, salt: str | None) -> None:
        """Deletes a context; see :meth:`Contexts.delete`."""
        async with self._changes.change():
            self.contexts.delete(id_, salt)

    async def pin(self, id_: str, salt: str | None, *, pinned: bool) -> Context:
        """Pins or unpins a context, and returns it; see :meth:`Contexts.pin`.

        The KV of a context that is pinned is computed in the background, unless it is there.
        """
        async with self._changes.change():
            context = self.contexts.pin(id_, salt, pinned=pinned)
        if pinned:
            self.renewal.renew(context)
        return context

    def _passages(self, tokens: Sequence[Sequence[int]], salt: str | None) -> list[tuple[int, ...]]:
        """Returns the passages that chunks are primed with: of these chunks, then of the tenant's.

        They are cut, also so that together they take at most a quarter of the capacity. There is
        one more than a chunk is primed with, because a chunk does not prime itself.
        """
        known = (context.tokens for context in reversed(self.contexts.all(salt)))
        longest = self._longest_passage
        return _different((text[:longest] for text in chain(tokens, known)), PASSAGES + 1)

    async def _lead(self, prefix: str | None) -> list[int]:
        """Returns the token ids that prompts with a prefix begin with."""
        if not prefix:
            return self._preparation.bos()
        return await self._read(self.encode, prefix, True)

    def _method(self, name: str | None, *, alone: bool) -> LinkMethod:
        """Returns the link method of a name; see :meth:`create`.

        Args:
            alone: whether there are no other passages to prime the chunk with.
        """
        how = link_method(self.method if name is None else name)
        layers = self._manager.model_config.num_hidden_layers
        unserved = refused(layers, self._manager.server_args.tp_size)
        if (reason := unserved.get(how.recompute)) is not None:
            raise ExtError(reason)
        if name is None and how.preparation is Preparation.PRIMED and alone:
            return link_method(ALONE)
        return how

    def _require_unpinned(self, count: int) -> None:
        """Checks that ``count`` new contexts can exist at once, beside the pinned ones."""
        pinned = self.contexts.pinned
        if count > (most := self.contexts.limit - pinned):
            beside = f" beside {pinned} pinned contexts" if pinned else ""
            raise ExtError(
                f"{count} chunks were given at once, but the server keeps at most {most}{beside} "
                "(chunks.limit); create fewer"
            )

    def _require_room(
        self, tokens: Sequence[Sequence[int]], before: Sequence[Sequence[int]]
    ) -> None:
        """Checks that the model and the KV pool hold each chunk with the prefix before it."""
        for number, (ids, text) in enumerate(zip(tokens, before, strict=True)):
            # The last page may be partly filled, and SGLang reserves one page.
            if len(ids) + len(text) + 2 * self._page >= self._most:
                raise ExtError(
                    f"chunk {number} has {len(ids)} tokens and a prefix of {len(text)} tokens; "
                    f"the model and the KV pool allow fewer than {self._most} tokens in total: "
                    "split the chunk"
                )

    def accept(self, request: GenerateReqInput) -> Watch | None:
        """Replaces the marks of a prompt by the tokens of its contexts.

        Returns:
            A function that is called with each answer and starts renewals; None without contexts.
        """
        self._own(request)
        if not (named := self.link(request)):
            return None
        told: list[Mapping[str, Any]] = []
        missed = False  # an answer of this request has missed contexts, which counts once
        several = _several(request.sampling_params)

        def watch(answer: Answer) -> None:
            nonlocal missed
            metas = [one["meta_info"] for one in (answer if isinstance(answer, list) else [answer])]
            told.extend(each for meta in metas for each in meta.get("ext", ()))
            # The renewal is scheduled before the client gets the answer and sends its next prompt.
            if told and not missed and metas[-1]["finish_reason"] is not None:
                # SGLang first computes a prompt with several answers for none of them, and that
                # request's report is lost. It may have missed contexts.
                missed = several or any(each.get("missing") for each in told)
                self.renewal.answered(named, missing=missed)

        return watch

    def _own(self, request: GenerateReqInput) -> None:
        """Removes parameters from a user's request that only this service may set."""
        if is_own(self._manager, request):
            return
        params = request.sampling_params
        for each in params if isinstance(params, list) else [params]:
            custom = custom_params(each)
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
            raise ExtError(f"chunk {number} is empty; omit it, or give it at least one token")
        return tokens


def _several(params: object) -> bool:
    """Returns whether sampling parameters ask for several answers to a prompt."""
    each = params if isinstance(params, list) else [params]
    return any(isinstance(one, dict) and one.get("n") not in (None, 1) for one in each)


def context_service(
    manager: TokenizerManager, config: Chunks, tiers: Tiers | None, info: Mapping[str, Any]
) -> ContextService:
    """Creates the context service of SGLang's ``TokenizerManager``.

    Args:
        tiers: section of the tiers that hold KV of contexts, too.
        info: ready message of the first scheduler.

    Raises:
        ExtError: contexts cannot be kept in ``config.directory``.
    """
    memory, kept = info[REPORT_KEY]["memory"], None
    token_bytes, room = memory["block_bytes"] // memory["page"], info["max_total_num_tokens"]
    if tiers is not None and tiers.remote is not None:
        room = None
    elif tiers is not None:
        ssd = tiers.ssd
        below = 0 if tiers.host is None else tiers.host.capacity
        below += 0 if ssd is None else ssd.capacity * len(ssd.directories)
        room += below // token_bytes
    if config.directory is not None:
        kept = KeptContexts(config.directory, memory["fingerprint"])
        if others := kept.others():
            logger.warning(
                "sgl_ext: %s has %d contexts of other models, or of this one with other weights or "
                "another --dtype, --quantization or --tp-size; prompts cannot name them here",
                config.directory, others,
            )  # fmt: skip
    return ContextService(
        manager,
        method=config.method,
        limit=config.limit,
        page=memory["page"],
        token_bytes=token_bytes,
        pool=info["max_total_num_tokens"],
        kept=kept,
        room=room,
    )


def attached_contexts(manager: TokenizerManager) -> ContextService | None:
    """Returns the context service of a ``TokenizerManager``; None if it has none."""
    return next((each for each in fronts_of(manager) if isinstance(each, ContextService)), None)


def _different(texts: Iterable[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Returns the first ``count`` distinct texts, in order."""
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        found[tuple(text)] = None
        if len(found) == count:
            break
    return list(found)
