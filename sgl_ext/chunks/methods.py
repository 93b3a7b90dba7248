"""How the KV of a chunk is prepared and what of it is recomputed where it is linked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from sgl_ext.errors import ExtError

BOS_TOKENS = 4
"""Before a chunk that is prepared for LegoLink-0 (EPIC §4.4)."""
PASSAGES = 4
"""Before a primed chunk, at most."""
BLEND_LAYERS = 2
"""That CacheBlend computes of all tokens, to compare the values of the last of them."""


class Preparation(Enum):
    """What a chunk's KV is computed behind."""

    BARE = "bare"
    """Nothing: its first token takes the attention that a prompt's first token does."""
    BOS = "bos"
    """:data:`BOS_TOKENS` begin-of-sequence tokens (LegoLink-0)."""
    PRIMED = "primed"
    """The system prompt and passages of the same kind, so that it has seen other documents."""


class Recompute(Enum):
    """What is computed anew where a chunk is linked."""

    NOTHING = "nothing"
    HEAD = "head"
    """Its first tokens (EPIC §3.2)."""
    OFFLINE = "offline"
    """The tokens whose values differ most between two preparations of it, found once."""
    BLEND = "blend"
    """The tokens whose values differ most where it is linked, of all layers but the first
    (CacheBlend)."""
    ALL = "all"


@dataclass(frozen=True)
class LinkMethod:
    """One way to link, by its name."""

    preparation: Preparation
    recompute: Recompute
    amount: int = 0
    """Tokens of each chunk; for :attr:`Recompute.BLEND` percent of the prompt."""

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
            Recompute.ALL: "full",
        }
        return names[self.recompute]


_PATTERNS = (
    (r"naive", Preparation.BARE, Recompute.NOTHING),
    (r"full", Preparation.BARE, Recompute.ALL),
    (r"lego-0", Preparation.BOS, Recompute.NOTHING),
    (r"lego-([1-9]\d{0,3})", Preparation.BARE, Recompute.HEAD),
    (r"blend-([1-9]\d?)", Preparation.BARE, Recompute.BLEND),
    (r"primed", Preparation.PRIMED, Recompute.NOTHING),
    (r"primed\+head-([1-9]\d{0,3})", Preparation.PRIMED, Recompute.HEAD),
    (r"primed\+offline-([1-9]\d{0,3})", Preparation.PRIMED, Recompute.OFFLINE),
)


def link_method(name: str) -> LinkMethod:
    """The method of that name.

    Raises:
        ExtError: there is none.
    """
    for pattern, preparation, recompute in _PATTERNS:
        if match := re.fullmatch(pattern, name):
            return LinkMethod(preparation, recompute, int(match[1]) if match.groups() else 0)
    raise ExtError(
        f"no link method {name!r}; there are full, naive, lego-0, lego-K (K tokens of each chunk), "
        "blend-R (R percent), primed, primed+head-K and primed+offline-K"
    )
