"""Compared systems: stock SGLang, HiCache, each power alone, and all sections that go together."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sgl_ext.config.sets import Sections, maximal
from sgl_ext.errors import ExtError
from sgl_ext.serving.server import BESIDE_OTHERS, System, extension

PAGE = 16
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""KV bytes of a token of SmolLM2 in bfloat16."""
STOCK, HICACHE, ALL, INDEPENDENT = "stock", "hicache", "all", "all, independent"
SINGLE: Mapping[str, Sections] = {
    "tiers": frozenset({"tiers"}),
    "chunks": frozenset({"chunks"}),
    "restore": frozenset({"tiers", "restore"}),
    "swap": frozenset({"tiers", "swap"}),
    "peer": frozenset({"worker"}),
    "clusters": frozenset({"clusters"}),
}
"""Each power alone, with the tiers if it needs them."""
PLANNING = "SGLEXT_PLANNING"
"""Environment variable whose value ``independent`` makes powers decide by themselves."""
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def everything(role: str = "worker") -> Sections:
    """Returns the largest set of sections that one server accepts with a peer of that role.

    Raises:
        ExtError: no accepted set has such a peer.
    """
    for sections in maximal():
        if role in sections:
            return sections
    raise ExtError(f"the configuration accepts no set of sections with a peer as {role}")


class Scratch(NamedTuple):
    """Temporary directories of systems.

    Attributes:
        disk: directory for what they store.
        sockets: directory of peers; its path is short, because it has sockets.
    """

    disk: Path
    sockets: Path


@contextmanager
def scratch(out: Path) -> Iterator[Scratch]:
    """Yields new directories, and removes them at the end."""
    with (
        tempfile.TemporaryDirectory(dir=out, prefix="together-") as disk,
        tempfile.TemporaryDirectory(prefix="sgl_ext-peers-") as sockets,
    ):
        yield Scratch(Path(disk), Path(sockets))


@dataclass(frozen=True)
class Memory:
    """Memory of all systems of a comparison.

    Attributes:
        pool: tokens of the device pool.
        host: tokens that fit the host memory for KV, also HiCache's; at least ``pool``.
        ssd: MiB of each directory on an SSD.
        rate: bytes per second of an emulated SSD for HiCache and for tiers; None for the one that
            the machine has.
    """

    pool: int
    host: int
    ssd: int = 4096
    rate: int | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """SGLang arguments of all systems."""
        return (
            "--max-total-tokens", str(self.pool), "--page-size", str(PAGE),
            "--enable-priority-scheduling", *BESIDE_OTHERS,
        )  # fmt: skip

    def system(self, name: str, scratch: Scratch) -> System:
        """Returns the system with that name, which stores nothing yet.

        Args:
            name: :data:`STOCK`, :data:`HICACHE`, :data:`ALL`, :data:`INDEPENDENT`, or a key of
                :data:`SINGLE`.
            scratch: place of the directories of the system.
        """
        if name == STOCK:
            return System(name, self.arguments, ENVIRONMENT)
        if name == HICACHE:
            return self._hicache(scratch.disk)
        chosen = SINGLE[name] if name in SINGLE else everything()
        more = {PLANNING: "independent"} if name == INDEPENDENT else {}
        return extended(name, self.arguments, self.sections(chosen, scratch), more)

    def sections(self, sections: Sections, scratch: Scratch) -> dict[str, Any]:
        """Returns the configuration of these sections, with new directories in ``scratch``."""

        def directory(name: str) -> str:
            return tempfile.mkdtemp(dir=scratch.disk, prefix=f"{name}-")

        found: dict[str, Any] = {name: {} for name in ("chunks", "restore") if name in sections}
        if "tiers" in sections:
            size = {"capacity": f"{self.ssd}MiB", "keep_after": 1}
            ssd: dict[str, Any] = {"directories": [directory("ssd")], **size}
            if self.rate is not None:
                ssd["emulate"] = {"bytes_per_second": self.rate}
            host = {"capacity": f"{self.host * TOKEN_BYTES}B"}
            found["tiers"] = {"host": host, "ssd": ssd}
        if "swap" in sections:
            found["swap"] = {"capacity": f"{self.host // 2 * TOKEN_BYTES}B"}
        if "clusters" in sections:
            found["clusters"] = {"directories": [directory("clusters")]}
        if "worker" in sections:
            found["peer"] = {"role": "worker", "directory": str(scratch.sockets)}
        return found

    def _hicache(self, disk: Path) -> System:
        files = tempfile.mkdtemp(dir=disk, prefix="hicache-")
        storage: tuple[str, ...] = ("--hicache-storage-backend", "file")
        if self.rate is not None:
            device = {
                "backend_name": "slow_files",
                "module_path": "sgl_ext.engine.cpu.hicache_files",
                "class_name": "SlowFiles",
                "interface_v1": 0,
                "bytes_per_second": self.rate,
            }
            extra = "--hicache-storage-backend-extra-config"
            storage = ("--hicache-storage-backend", "dynamic", extra, json.dumps(device))
        arguments = (
            "--enable-hierarchical-cache", "--hicache-ratio", f"{self.host / self.pool:g}",
            *storage, "--hicache-storage-prefetch-policy", "wait_complete",
        )  # fmt: skip
        environment = {**ENVIRONMENT, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": files}
        return System(HICACHE, (*self.arguments, *arguments), environment)


def extended(
    name: str,
    arguments: tuple[str, ...],
    config: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> System:
    """Returns a system with the extension.

    Args:
        environment: environment variables in addition to :data:`ENVIRONMENT`.
    """
    return System(
        name,
        (*arguments, *extension(config)),
        {**ENVIRONMENT, **(environment or {})},
    )
