"""Prints which powers each device and attention backend serves, as Markdown tables.

They follow from the facts in ``sgl_ext/engine/core/served.py`` and the powers' requirements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sgl_ext.config import load
from sgl_ext.engine.core import served
from sgl_ext.engine.core.powers import powers_of
from sgl_ext.engine.core.served import Phases, Property

_TIERS = {"tiers": {"host": {"capacity": "1MiB"}}}
_MASTER = {"role": "master", "directory": "/peers", "capacity": "1MiB", "stream": "layer"}
POWERS: Mapping[str, Mapping[str, Any]] = {
    "tiers": _TIERS,
    "restore": _TIERS | {"restore": {}},
    "swap": {"swap": {"capacity": "1MiB"}},
    "chunks": {"chunks": {}},
    "peer": {"peer": {"role": "worker", "directory": "/peers"}},
    "peer.stream layer": {"peer": _MASTER},
    "clusters": {"clusters": {"directories": ["/ssd"]}},
}
"""Configurations that differ in what they require, by the name of the power or option."""


def required() -> dict[str, dict[Property, str]]:
    """Returns the requirements of each power or option."""
    return {name: powers_of(load(config))[-1].attention() for name, config in POWERS.items()}


def refusals() -> Iterator[tuple[str, str, str, str | None]]:
    """Yields device, attention backend, power or option, and why the backend does not serve it.

    Whether the power is implemented for the device is left out.
    """
    for device, backends in served.BACKENDS.items():
        for name in dict.fromkeys(backend.name for backend in backends):
            both = Phases(served.configured(device, name), served.configured(device, name))
            for power, properties in required().items():
                yield device, name, power, served.unsuited(device, both, properties)


def page() -> str:
    """Returns a table for each device."""
    lines = []
    cells = {(device, backend, power): why for device, backend, power, why in refusals()}
    for device in served.BACKENDS:
        ready = ", ".join(sorted(served.READY[device])) or "none"
        lines += [f"## {device} (implemented: {ready})", ""]
        lines += [f"| backend | {' | '.join(POWERS)} |", "|---" * (len(POWERS) + 1) + "|"]
        for name in dict.fromkeys(backend.name for backend in served.BACKENDS[device]):
            answers = ("no" if cells[device, name, power] else "yes" for power in POWERS)
            lines.append(f"| {name} | {' | '.join(answers)} |")
        lines.append("")
    reasons = dict.fromkeys(f"- {where[0]}: {why}" for where, why in cells.items() if why)
    return "\n".join([*lines, *reasons])


if __name__ == "__main__":
    print(page())
