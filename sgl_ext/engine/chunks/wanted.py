"""Texts of a prompt whose KV may have been computed elsewhere: its chunks and its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from sgl_ext.chunks.composition import LEAD, Composition
from sgl_ext.engine.chunks.parameters import composition_of
from sgl_ext.engine.chunks.search import Wanted
from sgl_ext.engine.core.sglang_types import Req

_LEADS = 4
"""Maximum number of earlier turns of a conversation that are searched for a lead."""


def start_of(composition: Composition, number: int) -> int:
    """Returns the position in the prompt of the first token of a chunk, or of the lead."""
    return 0 if number == LEAD else composition.chunks[number].at


def chunks_of(req: Req, have: int) -> Iterator[tuple[int, Wanted]]:
    """Yields number and text of each chunk that ends behind the first ``have`` tokens.

    Chunks of which all tokens are recomputed are omitted.
    """
    if (composition := composition_of(req)) is None:
        return
    for number, chunk in enumerate(composition.chunks):
        end = chunk.at + chunk.length
        if end > have and len(chunk.recompute) < chunk.length:
            before = composition.preparations[chunk.preparation]
            tokens = req.origin_input_ids[chunk.at : end]
            yield number, Wanted(composition.namespace, req.cache_salt, before, tokens)


def leads(req: Req, prefix: int, page: int) -> Iterator[Wanted]:
    """Yields beginnings of the prompt that another prompt may have, the shortest first.

    The other prompt has no chunks, or only the first ones, as an earlier turn of the conversation
    has. They end behind the first ``prefix`` tokens and before those whose logprobs are requested.

    Args:
        page: tokens of a page.
    """
    if (composition := composition_of(req)) is None:
        return
    most = len(req.origin_input_ids)
    if req.return_logprob and req.logprob_start_len >= 0:
        most = req.logprob_start_len  # as in SGLang: logits are needed from there on
    chunks = composition.chunks
    ends = [
        (count, after.at)
        for count, (chunk, after) in enumerate(pairwise(chunks), 1)
        if after.at - (chunk.at + chunk.length) >= page  # a shorter gap saves too little
    ]
    user = (req.extra_key or "").removeprefix(composition.extra_key)
    for count, end in [(0, chunks[0].at), *ends[-_LEADS:]]:
        if prefix < end <= most:
            namespace = composition.until(count).extra_key + user if count else user[1:] or None
            yield Wanted(namespace, req.cache_salt, (), req.origin_input_ids[:end])
