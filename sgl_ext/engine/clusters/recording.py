"""Recording of a context by requests of SGLang's tokenizer process to its own server.

The context is computed as one prompt, or, if it is larger than a part of the KV pool, as several
prompts one after the other. Each of them follows what is recorded already. Behind the last one come
general questions, whose queries profile the context as those of its last tokens do. A context that
continues a stored one follows it, too, and is profiled by its own last tokens only.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sgl_ext.clusters.paths import RESERVED, failed_file, part_file, reserve_file
from sgl_ext.engine.clusters.parameters import RECORDED, IsRecorded
from sgl_ext.engine.core.own_requests import OwnRequests, all_of
from sgl_ext.engine.core.requests import ONCE
from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.errors import ExtError

QUERIES = 512
"""Number of last tokens of a context whose queries profile it."""
ROOM = 2 * QUERIES
"""Number of tokens beyond a context that the requests which record it may need."""
_ASKED = (
    "\n\nSummarize the text above.",
    "\n\nWhat is the main point of this text?",
    "\n\nWho is mentioned in the text, and what did they do?",
    "\n\nList the places and dates in the text.",
    "\n\nWhy did this happen?",
    "\n\nExplain the most important details.",
)
"""General questions. The queries of their tokens and answers profile the context as well."""
_ANSWER = 24
_WRITE_DEADLINE_S = 120.0


def part_size(tokens: int, largest: int) -> int:
    """Returns the tokens of each prompt of a context, of which the last one may have fewer.

    Args:
        tokens: number of tokens of the context.
        largest: maximum number of tokens of a prompt.
    """
    return math.ceil(tokens / math.ceil(tokens / largest))


class Recording:
    """Recording of one context.

    Args:
        manager: SGLang's ``TokenizerManager``.
        requests: requests in progress that compute contexts.
        folder: folder of the record, which exists.
        id_: id of the context.
        salt: ``cache_salt`` of the tenant.
        largest: maximum number of tokens of a prompt.
        reached: called with the number of tokens that are recorded.
        base: id of the stored context that this one continues, if any.
        behind: number of its tokens.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        requests: OwnRequests,
        folder: Path,
        id_: str,
        salt: str | None,
        largest: int,
        reached: Callable[[int], None],
        base: str | None = None,
        behind: int = 0,
    ) -> None:
        self._manager, self._requests, self._folder = manager, requests, folder
        self._id, self._salt, self._largest, self._reached = id_, salt, largest, reached
        self._base, self._behind = base, behind
        # A part that is computed again must not find its KV: its queries are computed, too.
        self._once = secrets.token_hex(8)

    async def record(self, tokens: Sequence[int]) -> None:
        """Has the scheduler compute and record the context and the answers to the questions.

        Parts that the record has already are not computed again.

        Args:
            tokens: token ids of the context, without those of ``base``.

        Raises:
            ExtError: a request is rejected, aborted or preempted, or a part cannot be written.
            OSError: the folder has no room.
        """
        reserve_file(self._folder).write_bytes(bytes(RESERVED))
        count, each = len(tokens), part_size(len(tokens), self._largest)
        for start in range(0, count, each):
            last, first = start + each >= count, self._behind + start
            part = IsRecorded(
                self._id, f"kv-{first:010d}", first, self._behind + count, kv=True,
                queries=min(QUERIES, count), keep=last and self._base is None, salt=self._salt,
                base=self._base,
            )  # fmt: skip
            if not self._path(part).exists():
                self._reached(start)
                await self._ask(tokens[start : start + each], part, 0)
        self._reached(count)
        if self._base is None:
            await self._ask_questions(tokens[start:], part)
        reserve_file(self._folder).unlink(missing_ok=True)

    async def _ask_questions(self, tokens: Sequence[int], part: IsRecorded) -> None:
        """Has the scheduler record the queries of answers to the questions.

        Args:
            tokens: token ids of the last part of the context.
            part: what is recorded of it.
        """
        asked = msgspec.structs.replace(part, kv=False, queries=0)
        # A server with a short queue would reject some of them.
        queue = self._manager.server_args.max_queued_requests
        room = asyncio.Semaphore(max(min(queue or len(_ASKED), len(_ASKED)), 1))

        async def ask(number: int, question: str) -> None:
            end = self._manager.tokenizer.encode(question, add_special_tokens=False)
            async with room:
                how = msgspec.structs.replace(asked, part=f"asked-{number}")
                await self._ask([*tokens, *end], how, _ANSWER)

        await all_of(ask(number, question) for number, question in enumerate(_ASKED))

    async def _ask(self, tokens: Sequence[int], how: IsRecorded, answer: int) -> None:
        """Has the scheduler compute a prompt and its answer, and write a part of the record."""
        if (path := self._path(how)).exists():  # the record was interrupted
            return
        failed_file(path).unlink(missing_ok=True)
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=[*tokens],
            sampling_params={
                "max_new_tokens": answer, "temperature": 0,
                "custom_params": {RECORDED: msgspec.to_builtins(how)},
            },
            # A new key, under which only the KV of the same part of this context is cached.
            extra_key=f"{ONCE}recorded:{how.id}:{how.start}:{self._once}",
            cache_salt=how.salt,
        )  # fmt: skip
        found = await self._requests.answer(request)
        if not any(entry.get("recorded") for entry in found["meta_info"].get("ext", ())):
            raise ExtError(
                "the context was preempted by other requests while it was computed; try again "
                "when the server has less load, or give it more KV memory"
            )
        await self._written(path)

    def _path(self, how: IsRecorded) -> Path:
        return part_file(self._folder, how.part)

    async def _written(self, part: Path) -> None:
        """Waits for a part, which the scheduler writes in a thread.

        Raises:
            ExtError: the part cannot be written, or is late.
        """
        end = time.monotonic() + _WRITE_DEADLINE_S
        failed = failed_file(part)
        while not part.exists():
            if failed.exists():
                raise ExtError(f"cannot store the context: {failed.read_text(errors='replace')}")
            if os.statvfs(self._folder.parent).f_flag & os.ST_RDONLY:  # nothing can be written
                raise ExtError(
                    "cannot store the context: the file system of device 0 is read-only; check the "
                    "device"
                )
            if not self._folder.exists():
                raise ExtError(
                    "the record of the context was removed while it was computed; store it again"
                )
            if time.monotonic() > end:
                raise ExtError(
                    f"{part.name} was not written within {_WRITE_DEADLINE_S:g} s; try again"
                )
            await asyncio.sleep(0.02)
