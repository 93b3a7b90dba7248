"""Rewrites the hashes of scripts/cpu.lock. To change a version, edit its line and run this script.

The index lists all files of a pinned release. The hashes of those that Linux on x86-64 or aarch64
with Python 3.11 can install are kept. torch is in scripts/torch.lock, which gives the reason.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

LOCK = Path(__file__).with_name("cpu.lock")
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
PYTHON = (3, 11)
_JSON = "application/vnd.pypi.simple.v1+json"
_PINNED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s\\]+)")


def tags() -> frozenset[Tag]:
    """Returns the tags of wheels that the lock includes."""
    machines = ("x86_64", "aarch64")
    glibc = [f"manylinux_2_{minor}" for minor in range(5, 40)]
    glibc += ["manylinux1", "manylinux2010", "manylinux2014", "linux"]
    platforms = [f"{each}_{machine}" for each in glibc for machine in machines]
    return frozenset(
        [*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, "cp311", platforms)]
    )


def installable(file: str, version: str, wanted: frozenset[Tag]) -> bool:
    """Returns whether a file is of this release and is a source or a wheel for ``wanted``."""
    if file.endswith((".tar.gz", ".zip")):
        return file.removesuffix(".tar.gz").removesuffix(".zip").endswith(f"-{version}")
    try:
        _, found, _, made_for = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    return str(found) == version and not wanted.isdisjoint(made_for)


def hashes(files: list[dict[str, Any]], version: str, wanted: frozenset[Tag]) -> list[str]:
    """Returns the SHA-256 hashes of the installable files of a project, sorted."""
    return sorted(
        file["hashes"]["sha256"] for file in files if installable(file["filename"], version, wanted)
    )


def listed(name: str) -> list[dict[str, Any]]:
    """Returns the files of a project in the index."""
    request = urllib.request.Request(  # noqa: S310  # the index that pip reads
        f"{INDEX}/{canonicalize_name(name)}/", headers={"Accept": _JSON}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        files: list[dict[str, Any]] = json.load(answer)["files"]
    return files


def main() -> None:
    """Rewrites the lock file; comments and pins stay as they are."""
    wanted, lines = tags(), []
    for line in LOCK.read_text().splitlines():
        if line.lstrip().startswith("--hash"):
            continue
        pin = _PINNED.match(line)
        if pin is None:
            lines.append(line)
            continue
        found = hashes(listed(pin["name"]), pin["version"], wanted)
        if not found:
            sys.exit(f"{INDEX} has no file of {pin[0]} for Linux and Python 3.11")
        lines.append(" \\\n".join([pin[0], *(f"    --hash=sha256:{each}" for each in found)]))
    LOCK.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
