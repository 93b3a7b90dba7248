"""Exception that ends a program of this package with a message instead of a traceback."""

from __future__ import annotations


class ExtError(Exception):
    """Error whose message says in one sentence what was asked, what was found and what to do."""

    status = 400
    """HTTP status of a request that fails with this error."""


class UnknownContextError(ExtError):
    """Error for a context that never existed, is gone, or belongs to another tenant.

    It does not disclose which of these is the case.
    """

    status = 404


def reason_of(error: BaseException) -> str:
    """Returns the reason of an error without the path of its file, which clients must not see."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
