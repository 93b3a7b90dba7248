"""Text in bodies of the extension's own routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _of_unicode(text: str) -> str:
    text.encode()  # raises for half a character, which JSON can say
    return text


Text = Annotated[str, AfterValidator(_of_unicode)]
"""A string without lone surrogates."""
