"""Parameters of a request's prompt, in the ``custom_params`` that SGLang passes to schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from sgl_ext.chunks.composition import Composition, Selection
from sgl_ext.chunks.methods import BLEND_LAYERS, Recompute
from sgl_ext.engine.core.sglang_types import Req

COMPOSITION, SELECTION = "ext_composition", "ext_selection"
"""Keys of the prompt's :class:`Composition`, and of the :class:`Selection` that is requested for
the chunk in the prompt."""
MARKED = "ext_marked"
"""Key of a flag: the tokens of the prompt contain marks, which the server's front replaces by a
composition."""
AUTOMATIC = "ext_automatic"
"""Key of the texts, by id, of the contexts that only the server has put marks of into the prompt.
Where they cannot be linked, the front puts the texts back."""

T = TypeVar("T")


def refused(layers: int, tp_size: int) -> dict[Recompute, str]:
    """Returns why a model is not served with some ways to choose the recomputed tokens.

    Args:
        layers: number of the model's layers.
    """
    if tp_size > 1:
        return {
            Recompute.BLEND: "blend-R selects tokens by the values of all KV heads, which tensor "
            "parallelism splits across ranks; choose another method",
            Recompute.QUERY: "query-R selects tokens by the attention of all heads, which tensor "
            "parallelism splits across ranks; choose another method",
        }
    if layers <= BLEND_LAYERS:
        return {
            Recompute.BLEND: f"blend-R computes all tokens in the first {BLEND_LAYERS} layers and "
            f"selects tokens for the layers behind them, but this model has {layers} layers; "
            "choose another method"
        }
    return {}


def read_parameters(req: Req, unserved: Mapping[Recompute, str]) -> None:
    """Parses and checks the parameters of a request that arrives.

    The parsed values replace the raw ones in ``custom_params``.

    Args:
        unserved: see :func:`refused`.

    Raises:
        ValueError: a parameter is invalid. The caller aborts the request; the parameters of an
            aborted request are ignored.
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
            except OverflowError as error:  # a number is too large for the digest
                raise ValueError(f"{name}: {error}") from None
            if req.return_logprob:
                read.check_logprobs(req.logprob_start_len)
            for chunk in read.chunks:
                for way, chosen in (Recompute.BLEND, chunk.blend), (Recompute.QUERY, chunk.query):
                    if chosen and way in unserved:
                        raise ValueError(unserved[way])
        elif isinstance(read, Selection):
            read.check(len(req.origin_input_ids))
        params[name] = read


def composition_of(req: Req) -> Composition | None:
    """Returns the composition of the request's prompt; None if it has none."""
    return _parameter(req, COMPOSITION, Composition)


def selection_of(req: Req) -> Selection | None:
    """Returns the selection that is requested for the computed chunk; None if there is none."""
    return _parameter(req, SELECTION, Selection)


def _parameter(req: Req, name: str, type_: type[T]) -> T | None:
    params = req.sampling_params.custom_params
    if req.to_finish is not None or not isinstance(params, dict):
        return None  # SGLang truncates the prompt of an aborted request
    value = params.get(name)
    return value if isinstance(value, type_) else None
