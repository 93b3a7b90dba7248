"""Marks that stand for contexts within the plain text of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping

_OPEN, _CLOSE = "\ue0c0", "\ue0c1"
MARK = re.compile(rf"{_OPEN}(ctx-[\w-]+){_CLOSE}", re.ASCII)
"""Pattern of a mark, whose group is the context's id. Icon fonts use both characters, so other text
may contain them, too."""


def mark(id_: str) -> str:
    """Returns the mark that stands for a context within plain text.

    A mark is enclosed in private-use characters, which chat templates do not change. A mark that a
    user writes by hand grants no more access than the id itself.
    """
    return f"{_OPEN}{id_}{_CLOSE}"


def ids_in(text: str) -> list[str]:
    """Returns the ids of all contexts that are marked in ``text``, in order."""
    return MARK.findall(text)


def marked(text: str) -> bool:
    """Returns whether any context is marked in ``text``."""
    return MARK.search(text) is not None


def unmarked(text: str, texts: Mapping[str, str]) -> str:
    """Returns ``text`` with the marks of some contexts replaced by their texts.

    Args:
        texts: texts by the contexts' ids; other marks stay.
    """
    return MARK.sub(lambda found: str(texts.get(found[1], found[0])), text)
