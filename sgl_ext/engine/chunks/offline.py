"""Contexts of an ``sgl.Engine``, which has no HTTP server."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_ext import distributions
from sgl_ext.chunks.divergence import Distribution
from sgl_ext.client import ContextInfo
from sgl_ext.engine.chunks import fidelity
from sgl_ext.engine.chunks.api import CreateContexts, created
from sgl_ext.engine.chunks.service import ContextService, attached_contexts, context_service
from sgl_ext.engine.core.activation import carried_by
from sgl_ext.engine.front.fronts import add_front
from sgl_ext.errors import ExtError
from sgl_ext.marks import mark

T = TypeVar("T")


class EngineContexts:
    """Context cache of an engine, from :func:`sgl_ext.offline.contexts_of`.

    As with ``engine.generate``, calls must not overlap.

    Raises:
        UnknownContextError: the engine does not have the context, or no longer has it.
        ExtError: an argument is invalid, or the engine cannot serve the call.
    """

    def __init__(self, engine: Any, service: ContextService, salt: str | None) -> None:
        self._engine = engine
        self._service = service
        self._salt = salt

    def create(
        self,
        chunks: str | Sequence[str | Sequence[int]],
        method: str | None = None,
        prefix: str | None = None,
        ttl: float | None = None,
        split: Mapping[str, object] | None = None,
    ) -> tuple[ContextInfo, ...]:
        """Creates contexts, as :meth:`sgl_ext.client.ContextCache.create` does."""
        try:
            body = CreateContexts.model_validate(
                {
                    "chunks": [chunks] if isinstance(chunks, str) else chunks,
                    "method": method,
                    "split": split or {},
                    "prefix": prefix,
                    "ttl": ttl,
                    "cache_salt": self._salt,
                }
            )
        except ValidationError as error:
            raise ExtError(f"cannot create contexts with these arguments: {error}") from None
        found = self._run(created(self._service, body))
        return tuple(map(self._service.describe, found))

    def get(self, id_: str) -> ContextInfo:
        """Returns a context and marks it as used."""
        return self._service.describe(self._service.contexts.get(id_, self._salt))

    def list(self) -> tuple[ContextInfo, ...]:
        """Returns all contexts of the tenant, the least recently used first."""
        return tuple(map(self._service.describe, self._service.contexts.all(self._salt)))

    def delete(self, id_: str) -> None:
        """Deletes a context; requests that already link it continue."""
        self._run(self._service.delete(id_, self._salt))

    def prompt(self, *parts: str | ContextInfo) -> str:
        """Returns the prompt for ``engine.generate`` of these texts and contexts, in this order."""
        return "".join(part if isinstance(part, str) else mark(part.id) for part in parts)

    def _distributions(
        self, prompt: str | Sequence[int], last: int, begin: int
    ) -> Sequence[Distribution]:
        """Returns the next-token distributions of the last tokens of a prompt.

        Args:
            last: number of tokens.
            begin: position of the first of them.
        """
        body = distributions.request(prompt, begin, top=fidelity.TOP, salt=self._salt)
        return distributions.read(self._run(self._answer(body))["meta_info"], last)

    async def _answer(self, body: Mapping[str, object]) -> Mapping[str, Any]:
        request = GenerateReqInput(**body)
        return await anext(self._engine.tokenizer_manager.generate_request(request))

    def _run(self, waiting: Coroutine[Any, Any, T]) -> T:
        return self._engine.loop.run_until_complete(waiting)


def contexts_of(engine: Any, cache_salt: str | None = None) -> EngineContexts:
    """Returns the context cache of an engine; see :func:`sgl_ext.offline.contexts_of`."""
    config = carried_by(engine.server_args)
    if config is None or config.chunks is None:
        raise ExtError(
            "chunks are not enabled on this engine; create it with enable_ext=True and "
            "ext_config={'chunks': {}}"
        )
    manager = engine.tokenizer_manager
    if (service := attached_contexts(manager)) is None:
        info = engine._scheduler_init_result.scheduler_infos[0]
        service = context_service(manager, config.chunks, config.tiers, info)
        add_front(manager, service)
    if service.fidelity is None:
        own = EngineContexts(engine, service, fidelity.SALT)
        service.fidelity = fidelity.Probe(service.encode, own, own._distributions).measure()
    fidelity.require(service.fidelity, config.chunks.method, config.chunks.largest_divergence)
    return EngineContexts(engine, service, cache_salt)
