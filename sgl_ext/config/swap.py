"""The ``swap`` section: preempted requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_ext.config.values import Bytes, Section


class SwapBaseline(Section):
    """Parts of swapping as they were before it (vLLM's, FastSwitch §2.2)."""

    recompute: bool = False
    """Nothing is swapped: what gives way is computed again, as SGLang does."""
    by_layer: bool = False
    """Keys and values of each page and layer are copied by themselves."""
    wait: bool = False
    """All wait until what gives way has been copied."""
    copy_again: bool = False
    """All pages of a request are copied when it gives way or ends, whatever was copied before."""


class Swap(Section):
    """Preempted requests are swapped instead of recomputed (exact; FastSwitch)."""

    capacity: Bytes
    """Of the host tier, for requests that are swapped out; of a host tier of that size if none is
    given."""
    policy: Literal[
        "sglang", "fcfs", "static", "round-robin", "token-counter", "random", "markov"
    ] = "sglang"
    """Who gives way: ``sglang``: as its own options say; ``fcfs``: only who came last, and only
    where memory runs out; ``static``: the lower priority; ``round-robin``: who has had its turn;
    ``token-counter``: who belongs to the client (``cache_salt``) that was served most (VTC);
    ``random``, ``markov``: by chance, to measure with."""
    swap_in: Literal["auto", "wait", "overlap"] = "auto"
    """Whether others decode while a request's KV comes: if that costs fewer tokens than waiting for
    it, never, or always."""
    quantum: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 50
    """Iterations of a turn (``round-robin``) or until priorities change (``random``, ``markov``);
    tokens, the generated ones counting twice, that clients may differ by (``token-counter``)."""
    ageing: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 1000
    """Iterations of waiting that are worth one priority, to ``static``."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Of ``random`` and ``markov``."""
    baseline: SwapBaseline = SwapBaseline()
    """To measure against; slower."""
