"""Limits of the contexts that a server stores: their length, and the free space of its devices."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sgl_ext.clusters.about import About
from sgl_ext.clusters.build import new_about
from sgl_ext.clusters.files import no_room
from sgl_ext.clusters.geometry import Geometry
from sgl_ext.clusters.paths import PART
from sgl_ext.clusters.profile import Options
from sgl_ext.clusters.records import KEPT_S, expire
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
        geometry: geometry of the model's KV.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        folders: Sequence[Path],
        *,
        most: int,
        copies: int,
        geometry: Geometry,
    ) -> None:
        self._manager, self._folders, self._most = manager, folders, most
        self._copies, self._geometry = copies, geometry

    def tokens_of(self, text: str | Sequence[int], base: About | None) -> list[int]:
        """Returns the token ids of a text that can be stored.

        Args:
            text: text, or token ids.
            base: description of the stored context that the text continues, if any.

        Raises:
            ExtError: there are too many tokens, too few, or some beyond the vocabulary.
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
        self._described(behind + len(tokens), base)
        return tokens

    def _too_long(self, what: str) -> ExtError:
        return ExtError(
            f"{what}; this server allows {self._most} tokens, besides those that profile the "
            "context: store a shorter context"
        )

    def require_room(self, tokens: int, base: About | None, record: Path) -> None:
        """Checks that the devices have room for a context, and for the rest of its record.

        Removes interrupted records that are older than a day; if a device has no room, all
        interrupted records but this one.

        Args:
            tokens: number of tokens of the context.
            record: folder of its record, which may have parts already.

        Raises:
            ExtError: a device has no room.
        """
        about, geometry, devices = self._described(tokens, base), self._geometry, len(self._folders)
        blocks = about.blocks
        new = base is None or blocks.entries > base.blocks.entries
        last = blocks.file_bytes[-devices:] if new else (0,) * devices
        recorded = tokens - (0 if base is None else base.tokens)
        queries = ROOM * geometry.heads * geometry.head_dim * np.dtype(np.float32).itemsize
        parts = geometry.layers * (recorded * geometry.entry_bytes + queries)
        parts -= sum(each.stat().st_size for each in record.glob(f"*{PART}"))
        expire(self._folders[0], KEPT_S)
        for at, folder in enumerate(self._folders):
            needed = last[at] + (0 if at else max(parts, 0))
            needed += about.index_bytes if at < about.copies else 0
            if shutil.disk_usage(folder).free < needed:
                expire(self._folders[0], 0)
                if shutil.disk_usage(folder).free < needed:
                    raise no_room(at, folder, needed)

    def _described(self, tokens: int, base: About | None) -> About:
        """Returns the description of a context of so many tokens.

        Raises:
            ExtError: there are too few to be stored.
        """
        options = Options()
        if base is not None:
            return base.continued(tokens, options.window)
        return new_about(
            self._geometry, tokens, options, len(self._folders), salt=None, copies=self._copies
        )
