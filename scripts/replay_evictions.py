"""Replays a trace of prompts on host memory, and prints the share of its blocks that were found.

``scripts/replay_evictions.py TRACE [BLOCKS ...]``: ``TRACE`` has one JSON object in each line, with
the blocks of a prompt in ``hash_ids``, as the traces that Mooncake published have (FAST '25,
https://github.com/kvcache-ai/Mooncake). ``BLOCKS`` are sizes of host memory.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from sgl_ext.tiers.host import HostPages

SIZES = (1_000, 3_000, 10_000, 30_000)

Prompt = Sequence[bytes]


def found(prompts: Sequence[Prompt], blocks: int) -> int:
    """Returns the number of blocks that host memory finds."""
    host, hits = HostPages(blocks), 0
    for prompt in prompts:
        there = host.lookup(prompt)
        host.use(prompt[:there])
        hits += there
        missing = [prompt[at] for at in host.missing(prompt)][: host.capacity]
        if (pages := host.reserve(len(missing))) is not None:
            host.publish(missing, pages)
    return hits


def found_recent(prompts: Sequence[Prompt], blocks: int) -> int:
    """Returns the number of blocks that are found if the least recently used one is evicted."""
    recent, hits = OrderedDict[bytes, None](), 0
    for prompt in prompts:
        hits += sum(1 for _ in takewhile(recent.__contains__, prompt))
        for block in reversed(prompt):
            recent[block] = None
            recent.move_to_end(block)
        while len(recent) > blocks:
            recent.popitem(last=False)
    return hits


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    lines = Path(sys.argv[1]).read_text().splitlines()
    prompts = [[one.to_bytes(8, "big") for one in json.loads(line)["hash_ids"]] for line in lines]
    total, different = sum(map(len, prompts)), len({block for each in prompts for block in each})
    print(f"{len(prompts):,} prompts, {total:,} blocks, {1 - different / total:.1%} seen before")
    print("host memory  found  least recently used order")
    for blocks in map(int, sys.argv[2:] or SIZES):
        ours, recent = found(prompts, blocks) / total, found_recent(prompts, blocks) / total
        print(f"{blocks:11,}  {ours:5.1%}  {recent:5.1%}")


if __name__ == "__main__":
    main()
