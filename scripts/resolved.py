"""Checks that this process and the processes that it spawns find one SGLang release in one folder.

Both the version in the package's metadata and the place of its code must be those of the release.
Exits with a message if they are not.
"""

from __future__ import annotations

import multiprocessing
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


def resolved() -> tuple[str, str]:
    """Returns the version of SGLang, and the folder of its code."""
    spec = find_spec("sglang")
    code = "none" if spec is None or spec.origin is None else str(Path(spec.origin).parent.parent)
    return version("sglang"), code


def main() -> None:
    """Checks the version and the folder that are given."""
    expected = sys.argv[1], str(Path(sys.argv[2]).resolve())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = {"this process": resolved(), "a process that it spawned": pool.apply(resolved)}
    for process, each in found.items():
        if each != expected:
            sys.exit(f"sgl_ext: {process} finds SGLang {each}, expected {expected}")


if __name__ == "__main__":
    main()
