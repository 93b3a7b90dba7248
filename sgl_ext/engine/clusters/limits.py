"""Limits of the contexts that a server stores: their length, and the free space of its devices."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options
from sgl_ext.clusters.records import KEPT_S, expire
from sgl_ext.clusters.stored import About
from sgl_ext.engine.clusters.recording import ROOM
from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.errors import ExtError

_WIDEST_TOKEN = 64
"""Maximum number of characters per token, averaged over a text."""


class Limits:
    """Limits of one server's contexts.

    Args:
        manager: SGLang's ``TokenizerManager``.
        folders: folder of contexts in each directory.
        most: maximum number of tokens of a context.
        copies: copies of each block of new contexts.
        layers: number of layers of the model.
        entry_bytes: bytes of K and V of a token in one layer.
        query_bytes: bytes of the queries of a token in one layer, in float32.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        folders: Sequence[Path],
        *,
        most: int,
        copies: int,
        layers: int,
        entry_bytes: int,
        query_bytes: int,
    ) -> None:
        self._manager, self._folders, self._most = manager, folders, most
        self._copies, self._layers = copies, layers
        self._entry_bytes, self._query_bytes = entry_bytes, query_bytes

    def tokens_of(self, text: str | Sequence[int], base: About | None) -> list[int]:
        """Returns the token ids of a text that can be stored.

        Args:
            text: text, or token ids.
            base: description of the stored context that the text continues, if any.

        Raises:
            ExtError: there are too many tokens, too few, or some beyond the vocabulary, or the
                devices have no room.
        """
        behind = 0 if base is None else base.tokens
        if len(text) > self._most * (_WIDEST_TOKEN if isinstance(text, str) else 1):
            what = "characters" if isinstance(text, str) else "tokens"
            raise self._too_long(f"the context has {len(text)} {what}")
        if isinstance(text, str):
            encode = self._manager.tokenizer.encode
            tokens: list[int] = encode(text, add_special_tokens=base is None)
        else:
            tokens = list(text)
            size = self._manager.model_config.vocab_size
            if wrong := [token for token in tokens if not 0 <= token < size]:
                raise ExtError(
                    f"the token ids {wrong[:3]} are outside the vocabulary of {size} tokens; use "
                    "the tokenizer of the served model"
                )
        if behind + len(tokens) > self._most:
            raise self._too_long(f"the context has {behind + len(tokens)} tokens")
        if not tokens:
            raise ExtError("the text has no tokens; give a text that continues the context")
        self._require_room(behind + len(tokens), base)
        return tokens

    def _too_long(self, what: str) -> ExtError:
        return ExtError(
            f"{what}; this server allows {self._most} tokens, besides those that profile the "
            "context: store a shorter context"
        )

    def _require_room(self, tokens: int, base: About | None) -> None:
        """Raises ExtError if ``tokens`` are too few to be stored, or too many for a device."""
        devices = len(self._folders)
        if base is None:
            options = Options().fitted(tokens, Blocks.fitting(self._entry_bytes))
            middle = tokens - options.sinks - options.window
            blocks = Blocks(middle, self._entry_bytes, devices, self._layers, self._copies)
            new, recorded = True, tokens
        else:
            blocks = base.continued(tokens, Options().window).blocks
            new, recorded = blocks.entries > base.blocks.entries, tokens - base.tokens
        last = blocks.file_bytes[-devices:] if new else (0,) * devices
        record = self._layers * (recorded * self._entry_bytes + ROOM * self._query_bytes)
        expire(self._folders[0], KEPT_S)
        for at, folder in enumerate(self._folders):
            needed = last[at] + (0 if at else record)
            if shutil.disk_usage(folder).free < needed:
                expire(self._folders[0], 0)
            if (free := shutil.disk_usage(folder).free) < needed:
                raise ExtError(
                    f"device {at} has not enough free space: the context needs {needed:,} B, "
                    f"{free:,} B are free; delete contexts, or configure larger or more "
                    "directories"
                )
