"""Computes the KV of chunks, each behind what its link method wants it to be behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from sgl_ext.chunks.compose import NAMESPACE
from sgl_ext.chunks.composition import Selection, path_of
from sgl_ext.chunks.methods import BOS_TOKENS, PASSAGES, LinkMethod, Preparation, Recompute
from sgl_ext.engine.chunks.parameters import SELECTION
from sgl_ext.engine.core.own_requests import OwnRequests
from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.errors import ExtError

_AT_ONCE = 4
"""Chunks that are prepared at the same time."""
_ATTEMPTS = 3


class ChunkPreparation:
    """By requests to one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        page: tokens of a page of KV.
    """

    def __init__(self, manager: TokenizerManager, page: int) -> None:
        self._manager = manager
        self._page = page
        self.requests = OwnRequests(manager, "a chunk")
        """By which chunks are computed."""

    def bos(self) -> list[int]:
        """The begin-of-sequence token, if the model has one."""
        bos = self._manager.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def before(
        self,
        method: LinkMethod,
        lead: Sequence[int],
        tokens: Sequence[int],
        passages: Sequence[tuple[int, ...]],
    ) -> list[int]:
        """What a chunk of ``tokens`` is computed behind.

        Args:
            lead: what the prompts that link it begin with.
            passages: that a chunk may be primed with.

        Raises:
            ExtError: there is nothing to compute it behind.
        """
        if method.preparation is Preparation.BARE:
            return []
        if method.preparation is Preparation.BOS:
            if not (bos := self.bos()):
                raise ExtError("lego-0 needs a begin-of-sequence token, which this model has not")
            return bos * BOS_TOKENS
        # The first of them for all: chunks then share what they are computed behind.
        others = [each for each in passages if each != tuple(tokens[: len(each)])][:PASSAGES]
        if not others:
            raise ExtError(
                "a primed chunk is computed behind others of its kind: create several at once, or "
                "the first ones with another method"
            )
        return [*lead, *chain.from_iterable(others)]

    async def prepare_all(
        self,
        method: LinkMethod,
        lead: Sequence[int],
        before: Sequence[Sequence[int]],
        chunks: Sequence[Sequence[int]],
        salt: str | None,
    ) -> list[Sequence[int]]:
        """As :meth:`prepare`; a few at a time, for what is looked at must still be there.

        Raises:
            ExtError: the server does not compute one of them; the others are given up.
        """
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(behind: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
            async with turns:
                return await self.prepare(method, lead, behind, tokens, salt)

        tasks = [asyncio.create_task(one(*each)) for each in zip(before, chunks, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def prepare(
        self,
        method: LinkMethod,
        lead: Sequence[int],
        before: Sequence[int],
        tokens: Sequence[int],
        salt: str | None,
    ) -> Sequence[int]:
        """Computes a chunk's KV; which of its tokens are to be computed again.

        Raises:
            ExtError: the server does not compute it.
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
                f"the KV of a chunk of {len(tokens)} tokens had to go before it was looked at, "
                f"{_ATTEMPTS} times: the server's KV is too small for it; split it, or try again"
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
        """Puts a chunk's KV into the tree, if it is not there.

        Args:
            selection: what is asked of it then.

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
        custom: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Puts the KV of a text into a namespace of the tree.

        Raises:
            ExtError: the server does not compute it.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=list(tokens),
            sampling_params={"max_new_tokens": 0, "custom_params": custom},
            extra_key=namespace,
            cache_salt=salt,
        )
        return await self.requests.answer(request)
