"""What a long run has found so far, in a file, so that one that was broken off can go on."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

import sgl_ext
from sgl_ext._native import _attention, _clusters, _rotation, _transfer
from sgl_ext.bench.harness.progress import say


class Partial:
    """Findings by name, one line each.

    Args:
        bench: name of the bench; its file lies in ``directory``.
        config: what else decides them; those of another one are forgotten, as are those of other
            code.
        quick: a quick run has a file of its own.
    """

    def __init__(
        self, directory: Path, bench: str, config: Mapping[str, Any], *, quick: bool
    ) -> None:
        self._path = path = directory / f"{bench}{'-quick' if quick else ''}.partial.jsonl"
        self._found: dict[str, Any] = {}
        header = json.dumps([config, _code()])
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [header]
        for line in lines[1:] if lines[:1] == [header] else ():
            with suppress(ValueError):  # cut off when the run was
                name, self._found[name] = json.loads(line)
                kept.append(line)
        path.write_text("\n".join(kept) + "\n")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def find(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was found under that name; if nothing was, what ``measure`` returns, which JSON has
        to take."""
        if name not in self._found:
            say(f"measuring {name}")
            self._found[name] = found = measure()
            with self._path.open("a") as file:
                file.write(json.dumps([name, found]) + "\n")
        return self._found[name]

    def forget(self) -> None:
        """All has been reported."""
        self._path.unlink(missing_ok=True)


@functools.cache
def _code() -> str:
    """Digest of this package as it is."""
    python = sorted(Path(sgl_ext.__file__).parent.rglob("*.py"))
    native = (_attention, _clusters, _rotation, _transfer)
    found = xxhash.xxh3_64()
    for path in (*python, *(Path(str(module.__file__)) for module in native)):
        found.update(path.read_bytes())
    return found.hexdigest()
