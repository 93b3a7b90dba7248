"""The one exception that ends a program of this package with a message instead of a traceback."""

from __future__ import annotations


class ExtError(Exception):
    """What was asked, what was found and what to do, in one sentence."""

    status = 400
    """Of HTTP, where a request ends with it."""


def reason_of(error: BaseException) -> str:
    """The reason of an error without the path of its file, which is not for clients to know."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
