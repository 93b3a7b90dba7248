"""Servers that handle preempted requests in different ways, behind a link of the paper's terms.

What swaps page by page does so as FastSwitch describes vLLM (§2.2, §3.3): keys and values of each
layer by themselves, all pages of a request, when it gives way and when a turn ends, whatever host
memory had of them; all others wait until who gives way is out, and until who comes back is in. What
recomputes is SGLang without host memory, with the same policy of who gives way; once more with
prefixes of earlier turns in host memory, so that it differs from ours in swapping alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_ext.bench.harness import server

PAGE = 16
RECOMPUTE, PER_PAGE, OURS = "recompute", "per page, waiting", "ours"
RECOMPUTE_BESIDE_TIER = "recompute, prefixes in host memory"
STOCK, HICACHE = "stock", "stock with hicache"
WITHOUT_GROUPS, WITHOUT_ASYNC_OUT, WITHOUT_ASYNC_IN, WITHOUT_CHOICE, WITHOUT_REUSE = WITHOUT = (
    "ours, page by page",
    "ours, swap-out waits",
    "ours, swap-in waits",
    "ours, swap-in never waits",
    "ours, no reuse",
)
_SWAP: Mapping[str, Mapping[str, Any]] = {
    RECOMPUTE: {"baseline": {"recompute": True}},
    RECOMPUTE_BESIDE_TIER: {"baseline": {"recompute": True}},
    PER_PAGE: {
        "baseline": {"by_layer": True, "wait": True, "copy_again": True},
        "swap_in": "wait",
    },
    OURS: {},
    WITHOUT_GROUPS: {"baseline": {"by_layer": True}},
    WITHOUT_ASYNC_OUT: {"baseline": {"wait": True}},
    WITHOUT_ASYNC_IN: {"swap_in": "wait"},
    WITHOUT_CHOICE: {"swap_in": "overlap"},
    WITHOUT_REUSE: {"baseline": {"copy_again": True}},
}
_COPIES_OF_A_PAGE = 60
"""Keys and values of each of 30 layers."""


@dataclass(frozen=True)
class Link:
    """Between host memory and the device: as slow, against an iteration, as in FastSwitch.

    Args:
        iteration: seconds of an iteration here.
        pages: of a request that is swapped, on average.
        page_bytes: of one of them.
    """

    iteration: float
    pages: float
    page_bytes: int

    PER_PAGE = 1.16
    """Iterations that a swap page by page and layer by layer takes, LLaMA-8B on an A10 with PCIe 4;
    of that, the bytes alone:"""
    BYTES = 0.15

    def config(self) -> dict[str, Any]:
        """Of ``tiers.host.link``."""
        page = self.iteration / self.pages
        return {
            "bytes_per_second": round(self.page_bytes / (self.BYTES * page)),
            "operations_per_second": _COPIES_OF_A_PAGE / (self.PER_PAGE * page),
        }


DEFINITIONS = {"swap": _SWAP, "link": (Link.PER_PAGE, Link.BYTES)}
"""What decides the measurements, beside the workload."""


def systems(
    names: Sequence[str], pool: int, memory: str, policy: Mapping[str, Any], link: Link | None
) -> list[server.System]:
    """Servers by name.

    Args:
        pool: tokens that the device holds.
        memory: of the host, for what has given way and for earlier turns.
        policy: of all that swap: ``policy``, ``quantum``.
        link: None: host memory as it is.
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
        swap = {"capacity": memory, **policy, **_SWAP[name]}
        if name == RECOMPUTE:
            host["capacity"] = swap["capacity"] = "2MiB"  # as without host memory
        elif link is not None:
            host["link"] = link.config()
        config = json.dumps({"tiers": {"host": host}, "swap": swap})
        found.append(server.System(name, (*base, "--enable-ext", "--ext-config", config)))
    return found
