"""Prompt of SGLang's request, as far as its prefix may be restored."""

from __future__ import annotations

from typing import NamedTuple

from sgl_ext.engine.core.requests import precedence, reusable, tokens_of
from sgl_ext.engine.core.sglang_types import Req


class Prompt(NamedTuple):
    """Prompt whose prefix may be restored."""

    first: int
    """Number of the first page that is not on the device."""
    most: int
    """Maximum pages from there on that can be restored; SGLang may look up more."""
    tokens: int
    """Tokens of the prompt."""
    precedence: int
    """Precedence, smaller first: from SGLang's priority if it schedules by priority, else 0."""


def prompt_of(req: Req, prefix: int, page: int) -> Prompt | None:
    """Returns the request's prompt; None if it is not to be restored.

    Args:
        prefix: tokens of the prompt that are on the device.
        page: tokens of a page.
    """
    if req.session is not None or req.multimodal_inputs is not None:
        return None
    first, most = prefix // page, reusable(req) // page
    return Prompt(first, most - first, tokens_of(req), precedence(req)) if most > first else None
