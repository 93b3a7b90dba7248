"""Which tests may be skipped in CI (environment variable ``CI``), and why."""

from __future__ import annotations

import re

ALLOWED = {
    "root writes anywhere": "CI runs as root, whom no mode keeps from writing",
    "takes minutes; set SGL_EXT_ROUNDS": "run by hand before a release",
    "this kernel refuses huge pages": "depends on the kernel of CI's machine",
    "this kernel does not count the memory of io_uring": "depends on the kernel, too",
}
"""Beginning of the reason that a test gives, and why CI may do without the test."""


def unexpected(reasons: list[str]) -> list[str]:
    """Those of pytest's reasons, ``Skipped: ...`` or plain, that are not in :data:`ALLOWED`."""
    plain = [re.sub("^Skipped: ", "", reason) for reason in reasons]
    return sorted({reason for reason in plain if not reason.startswith(tuple(ALLOWED))})
