"""Master and worker as two servers, for benchmarks and tests."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare, shortened, untrained
from sgl_ext.serving.http import live
from sgl_ext.serving.server import BESIDE_OTHERS, Server, System, extension, serve

PAGE = 16
LAYERS = 30
TOKEN_BYTES = LAYERS * 2 * 3 * 64 * 4
"""KV bytes of a token of SmolLM2 in float32."""
WORKER_TOKEN_BYTES = 6 * 2 * 6 * 48 * 4
"""KV bytes of a token of the untrained model in float32."""
CHUNK = 512
"""Chunk size of the prefill of all servers, in tokens."""
COMMON = (
    "--page-size", str(PAGE), "--dtype", "float32", *BESIDE_OTHERS,
    "--chunked-prefill-size", str(CHUNK),
)  # fmt: skip
_LEND_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Lent:
    """Setup of a master.

    Attributes:
        local: tokens that fit its own memory, layer buffers included.
        borrowed: tokens that fit the memory that the worker lends.
        stream: see :class:`~sgl_ext.config.Peer`.
        emulate: bytes per second of the link to the worker's memory; None: not slowed down.
        layers: number of layers of the master's model, the first of SmolLM2's.
        positions: number of positions of the master's model; None for those it was trained on.
    """

    local: int
    borrowed: int
    stream: str
    emulate: int | None = None
    layers: int = LAYERS
    positions: int | None = None

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token of the master's model."""
        return TOKEN_BYTES // LAYERS * self.layers

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of all servers of the master's model."""
        if self.positions is None:
            return COMMON
        return (
            *COMMON,
            "--json-model-override-args", json.dumps({"max_position_embeddings": self.positions}),
        )  # fmt: skip

    @property
    def model(self) -> Path:
        """Directory of the master's model."""
        return prepare(SMOLLM2) if self.layers == LAYERS else shortened(SMOLLM2, self.layers)

    @property
    def buffers(self) -> int:
        """Number of layers that have a buffer."""
        return {"direct": 0, "layer": 1, "layers": 2}[self.stream]

    @property
    def formula(self) -> float:
        """Tokens that fit own and borrowed memory by Eq. 5, not rounded to blocks."""
        return self.local + self.borrowed * (1 - self.buffers / self.layers)


def peer(role: str, directory: Path, **more: Any) -> tuple[str, ...]:
    """Returns the arguments that make a server a master or a worker."""
    section = {"role": role, "directory": str(directory), **more}
    return extension({"peer": section})


def worker_tokens(lent: int, own: int, token_bytes: int = TOKEN_BYTES) -> int:
    """Returns the pool size of a worker, in tokens of its model.

    Args:
        lent: tokens of the master that fit the memory that is lent.
        own: tokens of the worker that fit the rest.
        token_bytes: KV bytes of a token of the master's model.
    """
    return own + -(-lent * token_bytes // (WORKER_TOKEN_BYTES * PAGE)) * PAGE


@contextmanager
def pair(
    setup: Lent,
    logs: Path,
    *,
    own: int = 2048,
    beside: tuple[System, ...] = (),
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[list[Server]]:
    """Serves a master, its worker and further systems; yields them when the memory is lent.

    Args:
        own: tokens of the worker that fit its memory beside the lent part.
        beside: further systems, which serve the master's model.
        environments: environment variables of ``master`` and ``worker``.

    Raises:
        ExtError: a server did not start, or the worker does not lend.
    """
    environments = environments or {}
    capacity = setup.borrowed * setup.token_bytes
    both = {"capacity": f"{capacity}B"}
    stream: dict[str, Any] = {"stream": setup.stream}
    if setup.emulate is not None:
        stream["emulate"] = {"bytes_per_second": setup.emulate}
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl_ext-peers-"))
        directory = Path(name)
        tokens = worker_tokens(setup.borrowed, own, setup.token_bytes)
        systems = [
            System(
                "master",
                (
                    *setup.arguments, "--max-total-tokens", str(setup.local),
                    *peer("master", directory, **both, **stream),
                ),
                environments.get("master", {}),
            ),
            System(
                "worker",
                (
                    *COMMON, "--model-path", str(untrained()), "--max-total-tokens", str(tokens),
                    *peer("worker", directory, **{"window": "1s"} | both),
                ),
                environments.get("worker", {}),
            ),
            *beside,
        ]  # fmt: skip
        servers = stack.enter_context(serve(systems, setup.model, logs))
        wait_until_lent(servers[0], setup.borrowed, setup.token_bytes)
        yield servers


def borrowed(master: Server, token_bytes: int = TOKEN_BYTES) -> int:
    """Returns the tokens that a master has borrowed from its workers, in whole blocks."""
    found = live(master.url)["peer"]["borrowed_bytes"]
    return int(found // (token_bytes * PAGE) * PAGE)


def wait_until_lent(master: Server, tokens: int, token_bytes: int = TOKEN_BYTES) -> None:
    """Waits until the master has borrowed all but two blocks of ``tokens`` tokens.

    Raises:
        ExtError: it has not borrowed them within a minute.
    """
    end = time.monotonic() + _LEND_DEADLINE_S
    while (found := borrowed(master, token_bytes)) < tokens - 2 * PAGE:
        if time.monotonic() > end:
            raise ExtError(f"{master.url} has borrowed {found} tokens of its worker, not {tokens}")
        time.sleep(0.1)
