"""Sets of sections that one server accepts together, as the configuration's validation decides."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sgl_ext.config.source import ConfigError
from sgl_ext.config.whole import EXAMPLES, SECTIONS, load

_DIRECTORY = {"directory": "/run/peers"}
_MASTER = {"role": "master", "capacity": "1GiB", **_DIRECTORY}
PEERS: Mapping[str, Mapping[str, Any]] = {
    "worker": {"role": "worker", **_DIRECTORY},
    "master": _MASTER,
    "layers": {**_MASTER, "stream": "layers"},
}
"""Minimal ``peer`` sections: a worker, a master, and a master that reads borrowed memory through
layer buffers."""

Sections = frozenset[str]
"""Names of sections; a key of :data:`PEERS` stands for a section ``peer``."""


class Verdict(NamedTuple):
    """Answer of the validation to a set of sections."""

    sections: Sections
    refusal: str
    """Reason why the set is refused; empty if it is accepted."""


def minimal(sections: Sections) -> dict[str, Any]:
    """Returns the smallest configuration that has these sections."""
    found: dict[str, Any] = {}
    for name in sections:
        if name in PEERS:
            found["peer"] = dict(PEERS[name])
        else:
            found[name] = json.loads(EXAMPLES[name])
    if "clusters" in found:
        found["clusters"]["directories"] = ["/ssd/clusters"]
    return found


def verdict(sections: Sections) -> Verdict:
    """Validates a set of sections with their smallest contents."""
    try:
        load(minimal(sections))
    except ConfigError as error:
        return Verdict(sections, str(error).removeprefix("ext_config: "))
    return Verdict(sections, "")


def verdicts() -> Iterator[Verdict]:
    """Yields the verdict on every non-empty set, once for each kind of peer if it has one."""
    choices: list[tuple[str, ...]] = [
        ("", *PEERS) if name == "peer" else ("", name) for name in SECTIONS
    ]
    for chosen in itertools.product(*choices):
        if sections := frozenset(filter(None, chosen)):
            yield verdict(sections)


def maximal() -> list[Sections]:
    """Returns the accepted sets that are part of no other accepted set, the largest first.

    The order is the same in every process.
    """
    accepted = [each.sections for each in verdicts() if not each.refusal]
    largest = [each for each in accepted if not any(each < other for other in accepted)]
    return sorted(largest, key=lambda each: (-len(each), written(each)))


def written(sections: Sections) -> str:
    """Returns a name of the set, such as ``tiers+swap+master``, that :func:`parse` reads."""
    order = [each for name in SECTIONS for each in (PEERS if name == "peer" else (name,))]
    return "+".join(name for name in order if name in sections)


def parse(text: str) -> Sections:
    """Returns the set with that name.

    Raises:
        ConfigError: a part names no section, or more than one names a peer.
    """
    found = frozenset(text.split("+"))
    known = {*SECTIONS, *PEERS} - {"peer"}
    if unknown := sorted(found - known):
        raise ConfigError(
            f"{text!r} names the section {unknown[0]!r}; name some of "
            f"{', '.join(name for name in SECTIONS if name != 'peer')}, and one of "
            f"{', '.join(PEERS)} for a peer, with + between them"
        )
    if len(found & PEERS.keys()) > 1:
        raise ConfigError(f"{text!r} has several kinds of peers; name one of {', '.join(PEERS)}")
    return found
