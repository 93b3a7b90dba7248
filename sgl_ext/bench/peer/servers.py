"""A master and its worker as two servers, for benches and tests."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_ext.bench.harness.server import BESIDE_OTHERS, Server, System, live, serve
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare, untrained

PAGE = 16
LAYERS = 30
TOKEN_BYTES = LAYERS * 2 * 3 * 64 * 4
"""Of SmolLM2 in float32."""
WORKER_TOKEN_BYTES = 6 * 2 * 6 * 48 * 4
"""Of the untrained model in float32."""
CHUNK = 512
"""Tokens that are computed at a time, by all."""
COMMON = (
    "--page-size", str(PAGE), "--dtype", "float32", *BESIDE_OTHERS,
    "--chunked-prefill-size", str(CHUNK),
)  # fmt: skip
_LEND_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Lent:
    """How a master is set up.

    Attributes:
        local: tokens that its own memory holds, its layer buffers included.
        borrowed: tokens that the worker lends.
        stream: see :class:`~sgl_ext.config.Peer`.
        emulate: bytes per second of the way to the worker's memory; None for as it is.
    """

    local: int
    borrowed: int
    stream: str
    emulate: int | None = None

    @property
    def buffers(self) -> int:
        """Layers that have a buffer."""
        return {"direct": 0, "layer": 1, "layers": 2}[self.stream]

    @property
    def regular(self) -> int:
        """Tokens that the master's own blocks hold: what its buffers leave (Eq. 5)."""
        rest = self.local - self.buffers * self.borrowed / LAYERS
        return int(rest) // PAGE * PAGE

    @property
    def formula(self) -> float:
        """Tokens in all, of real numbers."""
        return self.local + self.borrowed * (1 - self.buffers / LAYERS)


def peer(role: str, directory: Path, **more: Any) -> tuple[str, ...]:
    """The arguments that make a server one of a pair."""
    section = {"role": role, "directory": str(directory), **more}
    return ("--enable-ext", "--ext-config", json.dumps({"peer": section}))


def worker_tokens(lent: int, own: int) -> int:
    """Tokens of a worker that has room for ``lent`` tokens of the master and ``own`` of its own."""
    return own + -(-lent * TOKEN_BYTES // (WORKER_TOKEN_BYTES * PAGE)) * PAGE


@contextmanager
def pair(
    setup: Lent,
    logs: Path,
    *,
    own: int = 2048,
    master: tuple[str, ...] = (),
    worker: tuple[str, ...] = (),
    beside: tuple[System, ...] = (),
    environments: Mapping[str, Mapping[str, str]] | None = None,
    terms: Mapping[str, str] | None = None,
) -> Iterator[list[Server]]:
    """A master, its worker, and further systems; yields when all that is to be lent is lent.

    Args:
        own: tokens of the worker's own.
        master: further arguments of the master.
        worker: of the worker.
        beside: further systems, of the master's model.
        environments: variables of ``master`` and ``worker``.
        terms: times on which they lend, of both.

    Raises:
        ExtError: a server did not start, or the worker does not lend.
    """
    environments = environments or {}
    capacity = setup.borrowed * TOKEN_BYTES
    both = {"capacity": f"{capacity}B", **(terms or {})}
    stream: dict[str, Any] = {"stream": setup.stream}
    if setup.emulate is not None:
        stream["emulate"] = {"bytes_per_second": setup.emulate}
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl_ext-peers-"))
        directory = Path(name)
        tokens = worker_tokens(setup.borrowed, own)
        systems = [
            System(
                "master",
                (
                    *COMMON, "--max-total-tokens", str(setup.regular),
                    *peer("master", directory, **both, **stream), *master,
                ),
                environments.get("master", {}),
            ),
            System(
                "worker",
                (
                    *COMMON, "--model-path", str(untrained()), "--max-total-tokens", str(tokens),
                    *peer("worker", directory, **{"window": "1s"} | both), *worker,
                ),
                environments.get("worker", {}),
            ),
            *beside,
        ]  # fmt: skip
        servers = stack.enter_context(serve(systems, prepare(SMOLLM2), logs))
        wait_until_lent(servers[0], setup.borrowed)
        yield servers


def borrowed(master: Server) -> int:
    """Whole tokens that a master has of its workers."""
    found = live(master.url)["peer"]["borrowed_bytes"]
    return int(found // (TOKEN_BYTES * PAGE) * PAGE)


def wait_until_lent(master: Server, tokens: int) -> None:
    """Returns when the master has all but a block of that.

    Raises:
        ExtError: it has not in a minute.
    """
    end = time.monotonic() + _LEND_DEADLINE_S
    while (found := borrowed(master)) < tokens - 2 * PAGE:
        if time.monotonic() > end:
            raise ExtError(f"{master.url} has {found} tokens of its worker's, not {tokens}")
        time.sleep(0.1)
