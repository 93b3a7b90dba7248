"""Link methods: how the KV of a chunk is prepared and which tokens are recomputed when linked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from sgl_ext.errors import ExtError

BOS_TOKENS = 4
"""Begin-of-sequence tokens before a chunk that is prepared for LegoLink-0 (EPIC §4.4)."""
PASSAGES = 4
"""Maximum number of passages before a primed chunk."""
PASSAGE_TOKENS = 256
"""Maximum tokens of such a passage. Longer ones make contexts slower to create, because each token
of a primed chunk attends to all passages."""
BLEND_LAYERS = 2
"""Layers that CacheBlend computes for all tokens; it compares the values of the last of them."""


class Preparation(Enum):
    """Prefix that a chunk's KV is computed with."""

    BARE = "bare"
    """No prefix: the chunk's first token is an attention sink, as a prompt's first token is."""
    BOS = "bos"
    """:data:`BOS_TOKENS` begin-of-sequence tokens (LegoLink-0)."""
    PRIMED = "primed"
    """The system prompt and passages of the same kind: the chunk attends to other documents."""


class Recompute(Enum):
    """Tokens that are recomputed where a chunk is linked."""

    NOTHING = "nothing"
    HEAD = "head"
    """The first tokens of the chunk (EPIC §3.2)."""
    OFFLINE = "offline"
    """The tokens whose values differ most between two preparations of the chunk, selected once."""
    BLEND = "blend"
    """The tokens whose values differ most where the chunk is linked. They are recomputed in all
    layers but the first ones (CacheBlend)."""
    QUERY = "query"
    """The tokens that the last tokens of the prompt attend to most where the chunk is linked."""
    ALL = "all"


@dataclass(frozen=True)
class LinkMethod:
    """Link method: a preparation and a recomputation. ``str()`` gives its name."""

    preparation: Preparation
    recompute: Recompute
    amount: int = 0
    """Recomputed tokens of each chunk; for :attr:`Recompute.BLEND` and :attr:`Recompute.QUERY`,
    percentage of linked tokens."""

    def __str__(self) -> str:
        if self.preparation is Preparation.PRIMED:
            if self.recompute is Recompute.NOTHING:
                return "primed"
            return f"primed+{self.recompute.value}-{self.amount}"
        if self.preparation is Preparation.BOS:
            return "lego-0"
        names = {
            Recompute.NOTHING: "naive",
            Recompute.HEAD: f"lego-{self.amount}",
            Recompute.BLEND: f"blend-{self.amount}",
            Recompute.QUERY: f"query-{self.amount}",
            Recompute.ALL: "full",
        }
        return names[self.recompute]


_PATTERNS = (
    (r"naive", Preparation.BARE, Recompute.NOTHING),
    (r"full", Preparation.BARE, Recompute.ALL),
    (r"lego-0", Preparation.BOS, Recompute.NOTHING),
    (r"lego-([1-9]\d{0,3})", Preparation.BARE, Recompute.HEAD),
    (r"blend-([1-9]\d?)", Preparation.BARE, Recompute.BLEND),
    (r"query-([1-9]\d?)", Preparation.BARE, Recompute.QUERY),
    (r"primed", Preparation.PRIMED, Recompute.NOTHING),
    (r"primed\+head-([1-9]\d{0,3})", Preparation.PRIMED, Recompute.HEAD),
    (r"primed\+offline-([1-9]\d{0,3})", Preparation.PRIMED, Recompute.OFFLINE),
    (r"primed\+query-([1-9]\d?)", Preparation.PRIMED, Recompute.QUERY),
)


def link_method(name: str) -> LinkMethod:
    """Returns the link method with this name.

    Raises:
        ExtError: there is no such method.
    """
    for pattern, preparation, recompute in _PATTERNS:
        if match := re.fullmatch(pattern, name):
            return LinkMethod(preparation, recompute, int(match[1]) if match.groups() else 0)
    raise ExtError(
        f"unknown link method {name!r}; expected full, naive, lego-0, lego-K (K tokens of each "
        "chunk), blend-R or query-R (R percent), primed, primed+head-K, primed+offline-K or "
        "primed+query-R"
    )
