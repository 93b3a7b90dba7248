"""Writes ``sgl_ext/API.md``, the page of the Python API, from the signatures and docstrings.

Run it with the Python of the environment after the API or its docstrings have changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgl_ext import client, lang, offline
from sgl_ext.clusters.client import StoredContexts
from sgl_ext.engine.chunks.offline import EngineContexts

PAGE = Path(__file__).parents[1] / "sgl_ext" / "API.md"
_INTRODUCTION = """# Python API

Written by `scripts/list_api.py` from the docstrings; do not edit it. The package has type
annotations (`py.typed`). The clients import neither torch nor SGLang. Errors are
`sgl_ext.errors.ExtError`; everything else in the package is internal.
"""
API: dict[str, tuple[Any, ...]] = {
    "sgl_ext.client": (client.ContextCache, client.ContextInfo, client.part),
    "sgl_ext.clusters.client": (StoredContexts,),
    "sgl_ext.offline": (offline.contexts_of, EngineContexts),
    "sgl_ext.lang": (lang.chunk,),
}
"""Public classes and functions, by module."""
_RETURNED = (EngineContexts,)
"""Classes that functions return instances of; their constructors are internal."""


def page() -> str:
    """Returns the whole page."""
    lines = [_INTRODUCTION]
    for module, members in API.items():
        lines.append(f"\n## `{module}`\n")
        for member in members:
            lines += _member(member, member.__name__)
            if inspect.isclass(member):
                for name, method in _methods(member):
                    lines += _member(method, f"{member.__name__}.{name}", level=4)
    return "\n".join(lines)


def _methods(class_: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(class_).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name, member


def _member(member: Any, name: str, level: int = 3) -> list[str]:
    signature = "" if member in _RETURNED else str(inspect.signature(member)).replace("'", "")
    signature = re.sub(r"<function .*? at 0x\w+>", "…", signature)
    doc = inspect.getdoc(member) or ""
    return [
        f"{'#' * level} `{name}`\n",
        f"```python\n{name}{signature}\n```\n",
        f"```text\n{doc}\n```\n",
    ]


if __name__ == "__main__":
    PAGE.write_text(page())
