"""Systems that handle preempted requests in different ways, and a link as slow as the paper's.

``PER_PAGE`` swaps page by page, as FastSwitch describes vLLM (§2.2, §3.3). It copies keys and
values of each layer separately. It copies all pages of a request when the request is preempted and
when a turn ends, even pages that host memory has. All other requests wait until a preempted request
is swapped out, and until a resumed request is swapped in.

``RECOMPUTE`` is SGLang without host memory, with the same choice of the preempted requests.
``BESIDE_TIER`` recomputes what a preempted request had of its answer, too, but has the same host
memory as our system for prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_ext.config.swap import EXPERIMENT
from sgl_ext.serving import server

PAGE = 16
RECOMPUTE, PER_PAGE, OURS = "recompute", "per page, waiting", "ours"
BESIDE_TIER, OURS_AGAIN = "recompute beside a tier", "ours, again"
STOCK, HICACHE = "stock", "stock with hicache"
WITHOUT_GROUPS, WITHOUT_ASYNC_OUT, WITHOUT_ASYNC_IN, WITHOUT_CHOICE, WITHOUT_REUSE = WITHOUT = (
    "ours, page by page",
    "ours, swap-out waits",
    "ours, swap-in waits",
    "ours, swap-in never waits",
    "ours, no reuse",
)
WITHOUT_ASYNC = "ours, all swaps wait"
_SWAP: Mapping[str, Mapping[str, Any]] = {
    PER_PAGE: {"swap_in": "wait"},
    WITHOUT_ASYNC_IN: {"swap_in": "wait"},
    WITHOUT_ASYNC: {"swap_in": "wait"},
    WITHOUT_CHOICE: {"swap_in": "overlap"},
}
_EXPERIMENTS: Mapping[str, Mapping[str, bool]] = {
    RECOMPUTE: {"recompute": True},
    BESIDE_TIER: {"recompute": True},
    PER_PAGE: {"by_layer": True, "wait": True, "copy_again": True},
    WITHOUT_GROUPS: {"by_layer": True},
    WITHOUT_ASYNC_OUT: {"wait": True},
    WITHOUT_ASYNC: {"wait": True},
    WITHOUT_REUSE: {"copy_again": True},
}


@dataclass(frozen=True)
class Link:
    """Link between host memory and the device, as slow relative to an iteration as in FastSwitch.

    Args:
        iteration: seconds of an iteration on this machine.
        pages: mean number of pages of a swapped request.
        page_bytes: bytes of a page.
        layers: layers of the model, whose keys and values are separate copies of a page.
        times: factor by which a copy takes longer than that.
    """

    iteration: float
    pages: float
    page_bytes: int
    layers: int
    times: float = 1.0

    PER_PAGE = 1.16
    """Iterations that a swap by pages and layers takes, with LLaMA-8B on an A10 with PCIe 4."""
    BYTES = 0.15
    """Part of :attr:`PER_PAGE` that the bytes alone take, in iterations."""

    def config(self) -> dict[str, Any]:
        """Returns the value of the option ``tiers.host.link``."""
        page = self.times * self.iteration / self.pages
        return {
            "bytes_per_second": round(self.page_bytes / (self.BYTES * page)),
            "operations_per_second": 2 * self.layers / (self.PER_PAGE * page),
        }


DEFINITIONS = {"swap": _SWAP, "experiments": _EXPERIMENTS, "link": (Link.PER_PAGE, Link.BYTES)}
"""Definitions that decide the measurements, besides the workload."""


def systems(
    names: Sequence[str], pool: int, memory: str, policy: Mapping[str, Any], link: Link | None
) -> list[server.System]:
    """Returns the systems with these names.

    Args:
        pool: device pool, in tokens.
        memory: capacity of host memory, for swapped-out requests and for earlier turns.
        policy: ``policy`` or ``trace``, and ``quantum``, of all systems but the stock ones.
        link: link that slows host memory down; None for host memory as it is.
    """
    base = ("--max-total-tokens", str(pool), "--page-size", str(PAGE), *server.BESIDE_OTHERS)
    found = []
    for name in names:
        if name in (STOCK, HICACHE):
            more = ("--enable-hierarchical-cache", "--hicache-size", "3")
            arguments = (*base, "--enable-priority-scheduling", *(more if name == HICACHE else ()))
            found.append(server.System(name, arguments))
            continue
        host: dict[str, Any] = {"capacity": memory}
        swap = {"capacity": memory, **policy, **_SWAP.get(name, {})}
        experiment = dict(_EXPERIMENTS.get(name, {}))
        if (trace := swap.pop("trace", None)) is not None:
            experiment["trace"] = trace
        if name == RECOMPUTE:
            host["capacity"] = swap["capacity"] = "2MiB"  # in effect no host memory
        elif link is not None:
            host["link"] = link.config()
        config = {"tiers": {"host": host}, "swap": swap}
        environment = {EXPERIMENT: json.dumps(experiment)}
        arguments = (*base, *server.extension(config))
        found.append(server.System(name, arguments, environment))
    return found
