"""The ``swap`` section: preempted requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_ext.config.values import Bytes, Section


class SwapBaseline(Section):
    """Parts of swapping as in earlier systems (vLLM's way, FastSwitch §2.2), for benchmarks."""

    recompute: bool = False
    """True to swap nothing: preempted requests are recomputed, as in SGLang."""
    by_layer: bool = False
    """True to copy keys and values of each page and layer separately."""
    wait: bool = False
    """True to make all requests wait for a swap-out."""
    copy_again: bool = False
    """True to copy all pages of a request when it is preempted or ends, also those that host
    memory has."""


class Swap(Section):
    """Swapping of preempted requests, in place of recomputation (exact; FastSwitch)."""

    capacity: Bytes
    """Part of the host tier that swapped-out requests may use, in bytes. Without a host tier, one
    of this size is created."""
    policy: Literal[
        "sglang", "fcfs", "static", "round-robin", "token-counter", "random", "markov"
    ] = "sglang"
    """Choice of the requests that are preempted. ``sglang``: by SGLang's own options; ``fcfs``:
    the request that came last, and only if memory runs out; ``static``: the lower priority;
    ``round-robin``: requests that have had their turn; ``token-counter``: requests of the client
    (``cache_salt``) that was served most (VTC); ``random``, ``markov``: at random, for
    benchmarks."""
    swap_in: Literal["auto", "wait", "overlap"] = "auto"
    """Way in which KV is loaded. ``overlap``: other requests decode meanwhile; ``wait``: they wait;
    ``auto``: whichever costs fewer tokens."""
    quantum: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 50
    """Iterations of a turn (``round-robin``) or between draws (``random``, ``markov``); tokens that
    clients may differ by, generated ones counting twice (``token-counter``)."""
    ageing: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 1000
    """Iterations of waiting that are worth one priority (``static``)."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Seed of ``random`` and ``markov``."""
    baseline: SwapBaseline = SwapBaseline()
    """Slower ways of swapping, for benchmarks."""
