"""Preparation of chunks: computes their KV behind the prefix that the link method requires."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from sgl_ext.chunks.compose import NAMESPACE
from sgl_ext.chunks.composition import Selection, path_of
from sgl_ext.chunks.methods import BOS_TOKENS, PASSAGES, LinkMethod, Preparation, Recompute
from sgl_ext.engine.chunks.parameters import SELECTION
from sgl_ext.engine.core.own_requests import OverloadedError, OwnRequests, all_of
from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.errors import ExtError

_AT_ONCE = 4
"""Maximum number of chunks that are prepared at the same time."""
_ATTEMPTS = 3
_BUSY_S = 60.0
"""Seconds for which a request of which the server's queue is full is sent again."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
"""First and longest pause before it is sent again."""


class ChunkPreparation:
    """Preparation of chunks by requests to one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        page: tokens of a page of KV.
    """

    def __init__(self, manager: TokenizerManager, page: int) -> None:
        self._manager = manager
        self._page = page
        self.requests = OwnRequests(manager, "a chunk")
        """Requests in progress that compute chunks."""

    def bos(self) -> list[int]:
        """Returns the begin-of-sequence token in a list, which is empty if the model has none."""
        bos = self._manager.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def before(
        self,
        method: LinkMethod,
        lead: Sequence[int],
        tokens: Sequence[int],
        passages: Sequence[tuple[int, ...]],
    ) -> list[int]:
        """Returns the token ids of the prefix that a chunk of ``tokens`` is computed with.

        Args:
            lead: token ids that the prompts that link the chunk begin with.
            passages: passages that chunks are primed with.

        Raises:
            ExtError: the method needs a begin-of-sequence token or passages, and there are none.
        """
        if method.preparation is Preparation.BARE:
            return []
        if method.preparation is Preparation.BOS:
            if not (bos := self.bos()):
                raise ExtError(
                    "lego-0 requires a begin-of-sequence token, which this model does not have; "
                    "choose another method"
                )
            return bos * BOS_TOKENS
        if not (others := priming(tokens, passages)):
            raise ExtError(
                "a primed chunk is computed after other chunks of its kind, and there are none; "
                "create several at once, or the first ones with another method"
            )
        return [*lead, *chain.from_iterable(others)]

    async def prepare_all(
        self,
        methods: Sequence[LinkMethod],
        lead: Sequence[int],
        before: Sequence[Sequence[int]],
        chunks: Sequence[Sequence[int]],
        salt: str | None,
        tell: Callable[[int, int], None],
    ) -> list[Sequence[int]]:
        """Prepares several chunks as :meth:`prepare` does.

        The number of chunks at a time is limited, because the KV of a chunk must not be evicted
        before its tokens are selected.

        Args:
            tell: called with the number of prepared chunks, and of all.

        Raises:
            ExtError: the server does not compute a chunk; the others are cancelled.
        """
        turns = asyncio.Semaphore(_AT_ONCE)
        done = 0

        async def one(
            method: LinkMethod, behind: Sequence[int], tokens: Sequence[int]
        ) -> Sequence[int]:
            nonlocal done
            async with turns:
                found = await self.prepare(method, lead, behind, tokens, salt)
            done += 1
            tell(done, len(chunks))
            return found

        return await all_of(one(*each) for each in zip(methods, before, chunks, strict=True))

    async def prepare(
        self,
        method: LinkMethod,
        lead: Sequence[int],
        before: Sequence[int],
        tokens: Sequence[int],
        salt: str | None,
    ) -> Sequence[int]:
        """Computes the KV of a chunk, and returns the offsets of its tokens to recompute.

        Args:
            lead: token ids that the prompts that link the chunk begin with.
            before: token ids of the prefix that the chunk is computed with.
            tokens: token ids of the chunk.
            salt: ``cache_salt`` of the tenant.

        Raises:
            ExtError: the server does not compute it, or evicts its KV before it can select tokens.
        """
        if method.recompute is Recompute.OFFLINE:
            amount = method.amount
            selection = Selection(NAMESPACE, len(tokens), tuple(before), tuple(lead), amount)
            for _ in range(_ATTEMPTS):
                await self.compute(lead, tokens, salt)
                answer = await self.compute(before, tokens, salt, selection)
                for entry in answer["meta_info"].get("ext", ()):
                    if entry.get("selected") is not None:
                        selected: list[int] = entry["selected"]
                        return selected
            raise ExtError(
                f"the KV of a chunk of {len(tokens)} tokens was evicted {_ATTEMPTS} times before "
                "it was read, because the server's KV pool is too small for it; split the chunk, "
                "or try again"
            )
        await self.compute(before, tokens, salt)
        if method.recompute is Recompute.ALL:
            return range(len(tokens))
        if method.recompute is Recompute.HEAD:
            return range(min(method.amount, len(tokens)))
        return ()

    async def compute(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        salt: str | None,
        selection: Selection | None = None,
    ) -> dict[str, Any]:
        """Computes the KV of a chunk into the radix tree, if it is missing; returns the answer.

        Args:
            before: token ids of the prefix that the chunk is computed with.
            selection: selection of tokens that is requested for the chunk; None for none.

        Raises:
            ExtError: the server does not compute it.
        """
        custom = None if selection is None else {SELECTION: msgspec.to_builtins(selection)}
        return await self.prefill(path_of(before, tokens, self._page), NAMESPACE, salt, custom)

    async def prefill(
        self,
        tokens: Sequence[int],
        namespace: str | None,
        salt: str | None,
        custom: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Computes the KV of token ids into a namespace of the radix tree, and returns the answer.

        Raises:
            OverloadedError: the server's queue was full for :data:`_BUSY_S`.
            ExtError: the server does not compute it.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        give_up, pause = time.monotonic() + _BUSY_S, _PAUSE_S
        while True:
            request = GenerateReqInput(
                input_ids=list(tokens),
                sampling_params={"max_new_tokens": 0, "custom_params": custom},
                extra_key=namespace,
                cache_salt=salt,
            )
            try:
                return await self.requests.answer(request)
            except OverloadedError:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def priming(tokens: Sequence[int], passages: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the passages that a chunk of ``tokens`` is primed with: not those it begins with.

    All chunks take the first passages, so that they share the KV of their prefix.
    """
    return [each for each in passages if each != tuple(tokens[: len(each)])][:PASSAGES]
