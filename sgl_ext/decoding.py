"""Decoding of JSON by types of msgspec, in any thread."""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_DECODING = threading.Lock()


def decode(content: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """Returns JSON text as an instance of ``kind``.

    Raises:
        msgspec.DecodeError: it is not.
    """
    # msgspec inspects a type at its first use, and crashes if two threads do so at once.
    with _DECODING:
        return msgspec.json.decode(content, type=kind)
