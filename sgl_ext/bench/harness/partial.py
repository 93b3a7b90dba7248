"""Results of a long run in a file, so that an interrupted run can continue."""

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
from sgl_ext.progress import say


class Partial:
    """Results by name, in a file with one line for each.

    Args:
        directory: folder of the file.
        bench: name of the benchmark.
        config: configuration that the results depend on. Results of another configuration or of
            other code are discarded.
        quick: True for a quick run, which has its own file.
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
            with suppress(ValueError):  # cut off when the run was interrupted
                name, self._found[name] = json.loads(line)
                kept.append(line)
        path.write_text("\n".join(kept) + "\n")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def find(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns the result of that name; measures and keeps it if there is none.

        Args:
            measure: returns the result, in JSON types.
        """
        if name not in self._found:
            say(f"measuring {name}")
            self._found[name] = found = measure()
            with self._path.open("a") as file:
                file.write(json.dumps([name, found]) + "\n")
        return self._found[name]

    def forget(self) -> None:
        """Removes the file, after all results were reported."""
        self._path.unlink(missing_ok=True)


@functools.cache
def _code() -> str:
    """Returns a digest of the Python files and native modules of this package."""
    python = sorted(Path(sgl_ext.__file__).parent.rglob("*.py"))
    native = (_attention, _clusters, _rotation, _transfer)
    found = xxhash.xxh3_64()
    for path in (*python, *(Path(str(module.__file__)) for module in native)):
        found.update(path.read_bytes())
    return found.hexdigest()
