"""Splits the texts of several clients at once; each gets an equal share, and can be stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from sgl_ext.chunks.split import Split, Tokenizer, split
from sgl_ext.errors import ExtError

LIMIT_S = 60.0
"""Seconds in which the chunks of a request must be split, waiting included."""
_AT_ONCE = 16
"""Requests that are split at once; others wait."""


class StoppedError(Exception):
    """Nobody waits for the parts of a text any more."""


class _Turns:
    """A tokenizer whose calls are made by one thread, in the order in which they come.

    Nearly all of the time of splitting is in its many calls, which are short. Once ``stopped``, the
    next one ends the splitting by an exception, which nobody waits for any more.
    """

    def __init__(self, tokenizer: Tokenizer, thread: Executor) -> None:
        self._tokenizer = tokenizer
        self._thread = thread
        self.stopped = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        return self._thread.submit(self._encode, text, add_special_tokens).result()

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        if self.stopped.is_set():
            raise StoppedError("the request has ended")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


class Splitting:
    """Splits texts outside of the event loop.

    Args:
        tokenizing: one thread, in which everybody's texts are tokenized.
        longest: tokens that no part need exceed.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizing: Executor, longest: int) -> None:
        self._tokenizer = tokenizer
        self._tokenizing = tokenizing
        self._longest = longest
        self._threads = ThreadPoolExecutor(_AT_ONCE, "sgl_ext-splitting")

    async def parts(
        self, chunks: Sequence[str | Sequence[int]], how: Split, most: int
    ) -> list[str | Sequence[int]]:
        """Chunks of a size from larger ones.

        Raises:
            ExtError: they cannot be split so, are more than ``most``, or take too long.
        """
        if how == Split():
            return list(chunks)
        if how.tokens is not None:
            how = how.model_copy(update={"tokens": min(how.tokens, self._longest)})
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
                                f"these are more than {most} chunks, {len(found)} at least; "
                                f"create at most {most} at once"
                            )
        except TimeoutError:
            raise ExtError(
                f"splitting has taken more than {LIMIT_S:g} s; give less text at once, or "
                "split it yourself"
            ) from None
        finally:
            turns.stopped.set()
        return found
