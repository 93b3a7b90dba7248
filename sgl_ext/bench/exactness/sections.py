"""Configurations of exactness runs: tiers and pools so small that KV moves all the time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_ext.config import load
from sgl_ext.config.sets import PEERS, Sections, parse, written
from sgl_ext.config.source import ConfigError, read
from sgl_ext.errors import ExtError

_PEER: Mapping[str, Any] = {"directory": "peers", "deadline": "4s", "lease": "4s"}
_MASTER: Mapping[str, Any] = {**_PEER, "role": "master", "capacity": "9MiB"}
_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "tiers": {
        "host": {"capacity": "16MiB"},
        "ssd": {"directories": ["ssd0", "ssd1"], "capacity": "512MiB", "keep_after": 1},
    },
    "chunks": {"largest_divergence": 100},  # a model of few layers is far off
    "restore": {"chunk": 128},
    "swap": {"capacity": "12MiB", "policy": "static"},
    "worker": {**_PEER, "role": "worker"},
    "master": _MASTER,
    "layers": {**_MASTER, "stream": "layers"},
    "clusters": {"directories": ["clusters0", "clusters1"], "largest": 1.0, "hot": "2MiB"},
}


def configuration(sections: Sections) -> dict[str, Any]:
    """Returns a configuration with these sections, whose directories are yet to be replaced.

    Args:
        sections: sections as :mod:`sgl_ext.config.sets` names them.
    """
    chosen = {name: each for name, each in _SECTIONS.items() if name in sections}
    named = {"peer" if name in PEERS else name: each for name, each in chosen.items()}
    return copy.deepcopy({name: dict(each) for name, each in named.items()})


def find(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the content of a configuration: that of a file, or of a set of sections.

    Args:
        name: a path, or sections such as ``tiers+swap+master``.

    Raises:
        ExtError: there is no such file and no such set, or the configuration is invalid.
    """
    try:
        if Path(name).is_file():
            load(name)
            _, data = read(name)
            return Path(name).stem, copy.deepcopy(data) if isinstance(data, dict) else {}
        sections = parse(name)
        load(config := configuration(sections))
    except ConfigError as error:
        raise ExtError(f"no configuration {name}: {error}; or give the path of a file") from None
    return written(sections), config
