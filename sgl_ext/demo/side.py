"""Columns of a demonstration, and the servers that they are measured on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_ext.engine.launch import run_directory
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving import server
from sgl_ext.verify.compare import Reply
from sgl_ext.verify.target import Target

QUESTION = "\n\nQuestion: Where does the fox live?\nAnswer:"
_FACTS = (
    "The bear lives in a cave above the river. It sleeps from November to March. ",
    "The owl lives in the tower of the church. It has three children. ",
    "The fox lives under the old oak. It hunts at night, mostly for mice. ",
)


@dataclass(frozen=True)
class Side:
    """Column of a demonstration."""

    title: str
    rows: Mapping[str, str] = field(default_factory=dict)
    """Values of the column by the name of their row."""
    seconds: float | None = None
    """Duration by which the columns are compared, in seconds; None if there is none."""


def of_reply(title: str, reply: Reply) -> Side:
    """Returns the column of an answer."""
    computed = reply.prompt - sum(reply.sources.values())
    sources = [f"{tokens:,} tokens {name}" for name, tokens in reply.sources.items()]
    if computed > 0:
        sources.append(f"{computed:,} tokens computed")
    for entry in reply.entries:
        if entry["power"] == "clusters":
            sources.append(f"{entry['tokens']:,} tokens stored, {entry['sparsity']:.0%} read")
    rows = {
        "first token": f"{reply.seconds:.2f} s",
        "KV from": "\n".join(sources),
        "answer": first_line(reply),
    }
    return Side(title, rows, reply.seconds)


def first_line(reply: Reply) -> str:
    """Returns the first line of an answer."""
    return reply.text.strip().partition("\n")[0]


def documents(repeated: int) -> list[str]:
    """Returns three documents, each a fact that is repeated, of some 16 tokens a time."""
    return [fact * repeated for fact in _FACTS]


def system(name: str, config: Mapping[str, Any], pool: int) -> server.System:
    """Returns a server with a configuration and a device pool of ``pool`` tokens."""
    arguments = ["--max-total-tokens", str(pool), *server.BESIDE_OTHERS, "--page-size", "16"]
    arguments.append("--skip-server-warmup")  # serving() sends a first request itself
    arguments += server.extension(config)
    return server.System(name, arguments, {"OMP_WAIT_POLICY": "PASSIVE"})


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields a folder, which is removed at the end, or by a later program if this one is killed."""
    folder = run_directory.subdirectory()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving(systems: Sequence[server.System]) -> Iterator[list[Target]]:
    """Serves SmolLM2 by each of the systems, and stops them at the end."""
    with (
        server.logs("sgl_ext-demo-") as folder,
        server.serve(systems, prepare(SMOLLM2), folder, drain=False) as running,
    ):
        targets = [Target(each.url) for each in running]
        for target in targets:  # the first forwards are slow
            target.answer("Hello", 4)
        yield targets
