"""Type of the text in bodies of the extension's own routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _of_unicode(text: str) -> str:
    text.encode()  # raises for a lone surrogate, which JSON can express
    return text


Text = Annotated[str, AfterValidator(_of_unicode)]
"""String without lone surrogates."""
