"""Splitting of the texts of several clients at a time, with equal shares and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from sgl_ext.chunks.split import Split, Tokenizer, split
from sgl_ext.errors import ExtError

LIMIT_S = 60.0
"""Deadline for splitting the chunks of a request, in seconds, waiting included."""
_AT_ONCE = 16
"""Maximum number of requests that are split at the same time; others wait."""


class StoppedError(Exception):
    """Error that ends the splitting of a text whose request has ended."""


class _Turns:
    """Tokenizer whose calls one thread makes, in the order in which they come.

    Splitting spends nearly all of its time in many short calls, so the requests take turns. After
    ``stopped`` is set, the next call ends the splitting by an exception, which is not awaited any
    more.
    """

    def __init__(self, tokenizer: Tokenizer, thread: Executor) -> None:
        self._tokenizer = tokenizer
        self._thread = thread
        self.stopped = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> object:
        return self._thread.submit(self._encode, text, add_special_tokens).result()

    def _encode(self, text: str, add_special_tokens: bool) -> object:
        if self.stopped.is_set():
            raise StoppedError("the request has ended")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


class Splitting:
    """Splitter of texts, which works outside of the event loop.

    Args:
        tokenizer: tokenizer of the model.
        tokenizing: executor of one thread, which tokenizes the texts of all requests.
        longest: maximum tokens of a part and its prefix; larger requested sizes are reduced.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizing: Executor, longest: int) -> None:
        self._tokenizer = tokenizer
        self._tokenizing = tokenizing
        self._longest = longest
        self._threads = ThreadPoolExecutor(_AT_ONCE, "sgl_ext-splitting")

    async def parts(
        self, chunks: Sequence[str | Sequence[int]], how: Split, most: int, before: int = 0
    ) -> list[str | Sequence[int]]:
        """Splits chunks, and returns their parts in order.

        Args:
            how: parameters of the split; without a split, the chunks are returned unchecked.
            most: maximum number of parts.
            before: maximum tokens of the prefix that a part is computed with.

        Raises:
            ExtError: a chunk cannot be split this way, there are more than ``most`` parts, or
                splitting takes too long.
        """
        if how == Split():
            return list(chunks)
        if how.tokens is not None:
            longest = max(self._longest - before, 1)
            how = how.model_copy(update={"tokens": min(how.tokens, longest)})
        loop = asyncio.get_running_loop()
        turns = _Turns(self._tokenizer, self._tokenizing)
        found: list[str | Sequence[int]] = []
        try:
            async with asyncio.timeout(LIMIT_S):
                for chunk in chunks:
                    steps = split(chunk, how, turns)
                    while (
                        parts := await loop.run_in_executor(self._threads, next, steps, None)
                    ) is not None:
                        found += parts
                        if len(found) > most:
                            raise ExtError(
                                f"the texts split into more than {most} chunks (at least "
                                f"{len(found)}); create at most {most} at once"
                            )
        except TimeoutError:
            raise ExtError(
                f"splitting took more than {LIMIT_S:g} s; give less text at once, or split it in "
                "advance"
            ) from None
        finally:
            turns.stopped.set()
        return found
