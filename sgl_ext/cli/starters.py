"""Commented configurations to start from, by what a server is for."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sgl_ext.errors import ExtError
from sgl_ext.memory.limits import available_memory
from sgl_ext.packages import cache_dir

_MIB = 1 << 20
_HOST = 4
"""Part of the available memory that host memory takes: one in so many."""
_DISK = 2
"""Part of a device's free space that KV takes: one in so many."""

_TIERS = """\
# KV that leaves the device pool goes to host memory and to SSDs, and is loaded, not computed.
tiers:
  # Host memory for KV, allocated at start: a quarter of the memory available now.
  host: {{capacity: {host}}}
"""
_SSD = """\
  ssd:
    # One directory for each device.
    directories: [{directories}]
    # Capacity of each directory: half of its free space, {tokens} tokens of an 8B model in all.
    capacity: {disk}
"""
_NO_SSD = """\
  # An SSD keeps far more. For its size: sgl-ext init {use} --directory /mnt/nvme0/kv
  # ssd: {{directories: [/mnt/nvme0/kv], capacity: 100GiB}}
"""
_RESTORE = """\
# Long prefixes on SSDs are computed from the front while their back is loaded.
restore: {}
"""
_CHUNKS = """\
# Documents are computed once, by POST /ext/chunks or sgl-ext contexts create, and are linked at any
# position of any prompt. Linked answers are approximate; how far they diverge on a model:
# sgl-ext doctor --config THIS_FILE --model-path DIR
chunks:
  # Contexts outlive a restart if a database keeps them:
  # directory: /var/lib/sgl_ext
  # Link a text part that equals a context's text, without its id:
  automatic: false
"""
_CLUSTERS = """\
# Texts that are too large for memory are stored once, by POST /ext/clusters or by
# sgl-ext stored store. Requests that name one in "ext_stored" read a tenth of it; their answers are
# approximate.
# Remove the section with --tp-size above 1 or with LoRA.
clusters:
  directories: [{stored}]
"""
_SWAP = """\
# Requests that are preempted because the device pool is full are swapped out, not recomputed.
swap:
  # Part of tiers.host; without tiers.host, host memory of this size is taken.
  capacity: {swap}
"""
_POLICY = """\
  # static: by the priority of a request, which ages; see sgl_ext/swap/README.md for the others.
  # policy: static
"""
_MASTER = """\
# This server borrows KV memory of other servers of this user on this machine, and so serves longer
# requests than its own pool allows.
peer:
  role: master
  directory: {peers}      # the same for all servers; created if missing
  capacity: {host}      # the most that it borrows
"""
_WORKER = """\
# Start it on another port than the master: --port 30001.
# This server lends KV memory that it does not use, and takes it back when it needs it.
peer:
  role: worker
  directory: {peers}      # the same for all servers; created if missing
  keep: 4096      # tokens that are never lent
"""
_PARTS = {
    "chat": ("tiers", "restore"),
    "rag": ("tiers", "chunks", "clusters"),
    "agents": ("tiers", "restore", "swap"),
    "overload": ("swap", "policy"),
    "two-models-master": ("master",),
    "two-models-worker": ("worker",),
}
STARTERS = tuple(_PARTS)
"""Uses for which there is a configuration."""
_STORED = "stored"
_LEAST_DISK = 64 * _MIB
_TOKEN_BYTES = 131_072
"""KV of a token in a model of 8B with grouped queries in 16 bits, such as Llama 3."""


def starter(use: str, directories: Sequence[Path] = ()) -> str:
    """Returns a configuration in YAML for a use, with sizes for this machine.

    Stored contexts get a folder of their own in each directory, which is created.

    Args:
        use: one of :data:`STARTERS`.
        directories: directories on SSDs, one for each device.

    Raises:
        ExtError: directories are given to a use that stores no KV on them, or twice, or they do not
            exist or have no room.
    """
    if directories and "tiers" not in _PARTS[use]:
        raise ExtError(f"{use} stores no KV on SSDs; omit the directories")
    if missing := [str(each) for each in directories if not each.is_dir()]:
        raise ExtError(
            f"not a directory: {', '.join(missing)}; create each directory, or give another path"
        )
    states = [each.stat() for each in directories]
    if len({(each.st_dev, each.st_ino) for each in states}) < len(states):
        raise ExtError("a directory is given twice; give one for each device")
    host = max(256 * _MIB, available_memory() // _HOST)
    values = {
        "use": use,
        "host": _written(host),
        "swap": _written(host // 4 if "tiers" in _PARTS[use] else host),
        "peers": _quoted(_run_directory().absolute() / "peers"),
        "directories": ", ".join(map(_quoted, directories)),
        "stored": ", ".join(_quoted(each / _STORED) for each in directories),
    }
    if "clusters" in _PARTS[use]:
        for each in directories:
            (each / _STORED).mkdir(exist_ok=True)
    if directories:
        devices = Counter(each.st_dev for each in states)
        disk = (
            min(
                shutil.disk_usage(each).free // devices[state.st_dev]
                for each, state in zip(directories, states, strict=True)
            )
            // _DISK
        )
        if disk < _LEAST_DISK:
            raise ExtError(
                f"the directories have {disk * _DISK:,} B free; give some with more room"
            )
        values |= {
            "disk": _written(disk),
            "tokens": f"{_rounded(disk * len(directories) // _TOKEN_BYTES):,}",
        }
    texts = {
        "tiers": _TIERS + (_SSD if directories else _NO_SSD),
        "restore": _RESTORE if directories else "",
        "chunks": _CHUNKS,
        "clusters": _CLUSTERS if directories else "",
        "swap": _SWAP,
        "policy": _POLICY,
        "master": _MASTER,
        "worker": _WORKER,
    }
    head = f"# sgl_ext for {use}. All keys: sgl_ext/config/README.md\n"
    head += "# Start: ./scripts/serve.sh --page-size 16 --ext-config THIS_FILE\n"
    parts = [texts[part] for part in _PARTS[use]]
    filled = [part if part in (_CHUNKS, _RESTORE) else part.format(**values) for part in parts]
    return head + "".join(filled)


def _rounded(tokens: int) -> int:
    """Returns a number of tokens with two digits that count."""
    return round(tokens, 2 - len(str(tokens)))


def _run_directory() -> Path:
    """Returns a directory of this user for sockets."""
    run = Path(f"/run/user/{os.getuid()}")
    return run if run.is_dir() else cache_dir()


def _quoted(path: Path) -> str:
    """Returns a path as a string in YAML."""
    return json.dumps(str(path), ensure_ascii=False)


def _written(size: int) -> str:
    """Returns a size as the configuration takes it, rounded down."""
    return f"{size >> 30}GiB" if size >= 4 << 30 else f"{size // _MIB}MiB"
