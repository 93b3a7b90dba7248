"""The ``swap`` section: preempted requests."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from sgl_ext.config.source import ConfigError
from sgl_ext.config.values import Bytes, Section

EXPERIMENT = "SGLEXT_SWAP_EXPERIMENT"
"""Environment variable of benchmarks and tests: a :class:`SwapExperiment` as JSON."""


class SwapExperiment(Section):
    """Parts of swapping as in earlier systems (vLLM's way, FastSwitch §2.2), and drawn priorities.

    Not part of the configuration: :data:`EXPERIMENT` sets it for a server and its processes.
    """

    recompute: bool = False
    """True to swap nothing: preempted requests are recomputed, as in SGLang."""
    by_layer: bool = False
    """True to copy keys and values of each page and layer separately."""
    wait: bool = False
    """True to make all requests wait for a swap-out."""
    copy_again: bool = False
    """True to copy all pages of a request when it is preempted or ends, also those that host
    memory has."""
    trace: Literal["random", "markov"] | None = None
    """Priorities that are drawn at random every ``quantum`` iterations, in place of a policy."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Seed of ``trace``."""


class Swap(Section):
    """Swapping of preempted requests, in place of recomputation (exact; FastSwitch)."""

    capacity: Bytes
    """Part of the host tier that swapped-out requests may use, in bytes. Without a host tier, one
    of this size is created."""
    policy: Literal["sglang", "fcfs", "static", "round-robin", "token-counter"] = "sglang"
    """Choice of the requests that are preempted. ``sglang``: by SGLang's own options; ``fcfs``:
    the request that came last, and only if memory runs out; ``static``: the lower priority;
    ``round-robin``: requests that have had their turn; ``token-counter``: requests of the client
    (``cache_salt``) that was served most (VTC)."""
    swap_in: Literal["auto", "wait", "overlap"] = "auto"
    """Way in which KV is loaded. ``overlap``: other requests decode meanwhile; ``wait``: they wait;
    ``auto``: whichever costs fewer tokens."""
    quantum: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 50
    """``round-robin``: iterations per turn; ``token-counter``: bucket size in weighted tokens
    (generated tokens count twice); clients in the same bucket do not preempt each other."""
    ageing: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 1000
    """Waiting iterations after which a request's priority rises by one (``static``)."""

    @property
    def experiment(self) -> SwapExperiment:
        """Experiment that the environment asks for; without effect if it asks for none.

        Raises:
            ConfigError: :data:`EXPERIMENT` is invalid.
        """
        text = os.environ.get(EXPERIMENT) or "{}"
        try:
            return SwapExperiment.model_validate_json(text)
        except ValidationError as error:
            reason = "; ".join(str(each["msg"]) for each in error.errors())
            raise ConfigError(f"{EXPERIMENT} is {text:.200}: {reason}") from None

    @property
    def order(self) -> str:
        """Source of priorities: name of the policy, or of the trace of an experiment."""
        return self.experiment.trace or self.policy
