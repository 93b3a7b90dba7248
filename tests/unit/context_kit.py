"""Kit for tests of the context cache: its routes on a real port, without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.middleware.base import RequestResponseEndpoint

from sgl_ext.config import Chunks
from sgl_ext.engine.chunks.api import install
from sgl_ext.engine.chunks.service import ContextService
from sgl_ext.engine.front.errors import refusal
from sgl_ext.errors import ExtError


class Manager:
    """Stub of SGLang's ``TokenizerManager`` in which each character is a token."""

    model_config = SimpleNamespace(vocab_size=200, num_hidden_layers=2)
    context_len = 100
    server_args = SimpleNamespace(tp_size=1, max_queued_requests=None)
    tokenizer = SimpleNamespace(
        bos_token_id=1,
        encode=lambda text, add_special_tokens: [1] * add_special_tokens + list(map(ord, text)),
        decode=lambda ids, clean_up_tokenization_spaces: "".join(map(chr, ids)),  # noqa: ARG005
    )

    def __init__(self) -> None:
        self.requests: list[GenerateReqInput] = []

    async def generate_request(self, request: GenerateReqInput) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        yield {"meta_info": {"finish_reason": {"type": "length"}}}


@dataclass
class ContextServer:
    """Server whose ``/generate`` answers with the body that SGLang would receive."""

    url: str
    service: ContextService
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    """Received requests: method and path, and body."""


@contextmanager
def context_server(*, api_key: str | None = None) -> Iterator[ContextServer]:
    app = FastAPI()
    service = ContextService(
        Manager(), method="lego-2", limit=10, page=16, token_bytes=100, pool=1000
    )
    served = ContextServer("", service)
    app.add_exception_handler(ExtError, refusal)
    install(app, served.service, Chunks(method="lego-2"))

    @app.get("/get_model_info")
    async def model_info() -> dict[str, str]:
        return {"model_path": "none"}

    @app.post("/generate")
    async def echo(request: Request) -> dict[str, Any]:
        return {"meta_info": {}, **await request.json()}

    @app.middleware("http")
    async def record(request: Request, answer: RequestResponseEndpoint) -> Response:
        served.requests.append((f"{request.method} {request.url.path}", await request.body()))
        return await answer(request)

    if api_key is not None:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=None)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        served.url = f"http://127.0.0.1:{port}"
        yield served
    finally:
        server.should_exit = True
        thread.join()
