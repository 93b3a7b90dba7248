"""Reasons for which tests may be skipped in CI (environment variable ``CI``)."""

from __future__ import annotations

import re

ALLOWED = {
    "root writes anywhere": "CI runs as root, whom no mode keeps from writing",
    "takes minutes; set SGLEXT_ROUNDS": "run by hand before a release",
    "this kernel refuses huge pages": "depends on the kernel of CI's machine",
    "this kernel does not count the memory of io_uring": "depends on the kernel, too",
}
"""Prefixes of allowed skip reasons, each with an explanation why CI may skip the test"""


def unexpected(reasons: list[str]) -> list[str]:
    """Returns the reasons that are not in :data:`ALLOWED`, sorted and without duplicates.

    Args:
        reasons: pytest's reasons, with or without the prefix ``Skipped: ``.
    """
    plain = [re.sub("^Skipped: ", "", reason) for reason in reasons]
    return sorted({reason for reason in plain if not reason.startswith(tuple(ALLOWED))})
