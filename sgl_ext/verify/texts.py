"""Texts that no prompt before them has begun with, and what fills a server's device pool."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import cycle, islice
from typing import Any

from sgl_ext.verify.target import Target

_FILLER = 4096


class Texts:
    """English text that every Python has, the reference of its language, as prompts of a server."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def draw(self, number: int, length: int) -> Iterator[list[int]]:
        """Yields ``number`` prompts of ``length`` token ids, none of which begins as another."""
        text = self._reference
        for _ in range(number):
            begin = self._target.tokens(f"{secrets.token_hex(8)}\n\n", first=True)
            first = secrets.randbelow(len(text))
            yield [*begin, *islice(cycle(text), first, first + length)][:length]

    def fill_pool(
        self, info: Mapping[str, Any], tell: Callable[[str, int, int], None] | None = None
    ) -> None:
        """Has the server compute as many tokens as its device pool holds.

        Args:
            info: the server's ``/server_info``.
            tell: called with what is done, and with the tokens computed so far and in all.
        """
        pool = int(info["max_total_num_tokens"])
        length = min(_FILLER, pool // 2, int(info["max_req_input_len"]) - 2)
        count = -(-pool // length) + 1
        for done, ids in enumerate(self.draw(count, length)):
            if tell is not None:
                tell("filling the device pool", done * length, count * length)
            self._target.answer(ids, 1)

    @cached_property
    def _reference(self) -> list[int]:
        from pydoc_data.topics import topics

        whole = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)
        return self._target.tokens(whole)
