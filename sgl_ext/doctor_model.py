"""Check of a model for chunks: starts a server, which probes how far linked chunks diverge."""

from __future__ import annotations

from pathlib import Path

import requests

from sgl_ext.config import ExtConfig
from sgl_ext.errors import ExtError
from sgl_ext.preflight import Check
from sgl_ext.serving import server

_TOKENS = "8192"
"""Tokens of the server's KV pool; the probe needs few."""
_DEADLINE_S = 60.0
_NAME = "chunks on this model"


def linking(model: Path, config: ExtConfig) -> Check:
    """Starts a server on the model folder ``model`` and returns its probe of linked chunks.

    The check takes the time and the memory of a server start. It is skipped if ``config`` has no
    ``chunks`` section.
    """
    if config.chunks is None:
        return Check(_NAME, "note", "skipped", "add a chunks section to the configuration")
    chosen = config.resolved()
    # Without the directory of contexts, which a running server may have open.
    sections = {key: chosen[key] for key in ("memory", "start_deadline")}
    sections["chunks"] = {**chosen["chunks"], "directory": None}
    arguments = ("--max-total-tokens", _TOKENS, *server.extension(sections))
    system = server.System("doctor", arguments)
    try:
        with (
            server.logs("sgl_ext-doctor-") as folder,
            server.serve([system], model, folder, deadline=config.start_deadline) as (running,),
        ):
            url = f"{running.url}/ext/chunks/fidelity"
            answer = requests.get(url, timeout=_DEADLINE_S)
            answer.raise_for_status()
            found = answer.json()
    except ExtError as error:
        return Check(_NAME, "fail", str(error), "see the last lines of the server's log")
    except requests.RequestException as error:
        return Check(_NAME, "fail", str(error), "try again")
    nats = found["nats"]
    return Check(
        _NAME, "ok",
        f"{found['method']} diverges by {nats['divergence']:.3f} nats (limit "
        f"{config.chunks.largest_divergence:g}); a chunk at its original position by "
        f"{nats['exact']:.4f}",
    )  # fmt: skip
