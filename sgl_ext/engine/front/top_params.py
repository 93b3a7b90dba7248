"""Parameters of the powers at the top level of a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from starlette.types import ASGIApp

from sgl_ext.engine.front.bodies import Bodies, object_of
from sgl_ext.errors import ExtError

_GENERATE = "/generate"
_CUSTOM = "custom_params"


class TopParams(Bodies):
    """ASGI middleware that moves parameters of the powers to ``custom_params``.

    SGLang's requests ignore fields that they do not know, and would be answered as if these had not
    been given. ``custom_params`` are at the top level of OpenAI requests, and in the sampling
    parameters of ``/generate``, where the keys are also taken from top-level ``custom_params``.

    Args:
        app: ASGI application behind the middleware.
        keys: keys of the powers in ``custom_params``.
    """

    paths: ClassVar = frozenset(
        {_GENERATE, "/v1/chat/completions", "/v1/completions", "/invocations"}
    )

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        super().__init__(app)
        self._keys = frozenset(keys)
        self._signs = tuple(f'"{key}"'.encode() for key in self._keys)

    def concerns(self, path: str, body: bytes) -> bool:  # noqa: ARG002
        return self.needs(body)

    def needs(self, body: bytes) -> bool:
        return any(sign in body for sign in self._signs)

    def rewrite(self, path: str, request: dict[str, Any]) -> None:
        given = {key: request.pop(key) for key in self._keys & request.keys()}
        given = {key: value for key, value in given.items() if value is not None}
        if path == _GENERATE and isinstance(top := request.get(_CUSTOM), dict):
            own = {key: top.pop(key) for key in self._keys & top.keys()}
            given = _joined({_CUSTOM: own}, given)
        if not given:
            return
        if path != _GENERATE:
            request[_CUSTOM] = _joined(request, given)
            return
        params = request.get("sampling_params")
        each = params if isinstance(params, list) else [params]
        made = [
            {**one, _CUSTOM: _joined(one, given)}
            for one in ({} if found is None else found for found in each)
            if isinstance(one, dict)
        ]
        if len(made) < len(each):
            return  # SGLang refuses these sampling parameters
        request["sampling_params"] = made if isinstance(params, list) else made[0]


def _joined(params: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``custom_params`` of some parameters with those that were given beside them.

    Raises:
        ExtError: a parameter has two values.
    """
    custom = object_of(params, _CUSTOM)
    for key, value in given.items():
        if custom.get(key, value) != value:
            raise ExtError(f"{key} is given twice, with different values; omit one of them")
    return {**custom, **given}
