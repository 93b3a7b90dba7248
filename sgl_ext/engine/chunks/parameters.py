"""What a request says of its prompt, in the ``custom_params`` that SGLang hands to schedulers."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sgl_ext.chunks.composition import Composition, Selection
from sgl_ext.engine.core.sglang_types import Req

COMPOSITION, SELECTION = "ext_composition", "ext_selection"
"""Keys: what the prompt is made of; what is asked of the chunk that it is."""
MARKED = "ext_marked"
"""Key: the tokens of the prompt hold marks, which the server's front turns into a composition."""
NO_BLEND = (
    "blend-R chooses tokens by the values of all KV heads, which tensor parallel ranks share "
    "out; choose another method"
)

T = TypeVar("T")


def read_parameters(req: Req, tp_size: int) -> None:
    """Reads what a request that arrives says of its prompt, once.

    Raises:
        ValueError: it cannot be; nothing of it is believed.
    """
    params = req.sampling_params.custom_params
    if not isinstance(params, dict):
        return
    given = {name: params.pop(name, None) for name in (COMPOSITION, SELECTION)}
    for name, type_ in ((COMPOSITION, Composition), (SELECTION, Selection)):
        if (value := given[name]) is None:
            continue
        try:
            read = value if isinstance(value, type_) else msgspec.convert(value, type_)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"{name}: {error}") from None
        if isinstance(read, Composition):
            try:
                read.check(len(req.origin_input_ids), req.extra_key)
            except OverflowError as error:  # a number that has no place in its digest
                raise ValueError(f"{name}: {error}") from None
            if req.return_logprob:
                read.check_logprobs(req.logprob_start_len)
            if tp_size > 1 and any(chunk.blend for chunk in read.chunks):
                raise ValueError(NO_BLEND)
        elif isinstance(read, Selection):
            read.check(len(req.origin_input_ids))
        params[name] = read


def composition_of(req: Req) -> Composition | None:
    """What the request's prompt is made of, if it says so."""
    return _parameter(req, COMPOSITION, Composition)


def selection_of(req: Req) -> Selection | None:
    """What the request asks of the chunk that it computes, if anything."""
    return _parameter(req, SELECTION, Selection)


def _parameter(req: Req, name: str, type_: type[T]) -> T | None:
    params = req.sampling_params.custom_params
    if req.to_finish is not None or not isinstance(params, dict):
        return None  # an aborted request's prompt is cut off
    value = params.get(name)
    return value if isinstance(value, type_) else None
